"""A quality classifier, trained from two sets of examples, as "educational" filters are (FineWeb-Edu, arXiv:2406.17557).

Logistic regression on hashed words and pairs of words. Saved as arrays and JSON, never as a pickle.
"""

import collections.abc
import functools
import json
import math
import pathlib
import zipfile

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus.sources.units import iterate_documents
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage, scored
from jaxlm.host import files

N_FEATURES = 1 << 18
MIN_EXAMPLES = 10  # of each kind
MIN_AUC = 0.6  # below this the classifier can't tell the two sets apart
_MAX_BYTES = 1 << 28  # read of each set


class Classifier(Stage):
    """Writes the probability that a document is good to metadata["quality"], and removes documents below `min_score`."""

    inputs = ("good", "bad", "model")

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._score = load(settings.model or folder)

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        s, config_key = settings, "prepare.stages.classifier"
        if s.model:
            load(s.model)
        elif s.good and s.bad:
            train(_examples(s.good, f"{config_key}.good"), _examples(s.bad, f"{config_key}.bad"), s.chars, folder)
        else:
            raise ConfigError(f"{config_key}: set good and bad to folders of examples, or set model")

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        return scored(document, "quality", self._score(document.text), "low quality", self.settings.min_score)


def _examples(spec: str, config_key: str) -> list[str]:
    try:
        texts = [text for _, text in iterate_documents(spec, max_bytes=_MAX_BYTES)]
    except ConfigError as error:
        raise ConfigError(f"{config_key}: {error}") from error
    if len(texts) < MIN_EXAMPLES:
        raise ConfigError(f"{config_key}={spec} has {len(texts)} examples; give {MIN_EXAMPLES} or more")
    return texts


def train(good: list[str], bad: list[str], chars: int, folder: pathlib.Path) -> dict:
    """Trains a classifier on `chars` characters of each text, and writes it to `folder`.

    Returns the content of classifier.json, with the cross-validated AUC. Raises ConfigError if the AUC is below MIN_AUC.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    texts, labels = [text[:chars] for text in good + bad], np.repeat([1, 0], [len(good), len(bad)])
    features = _vectorizer().transform(texts)
    model = LogisticRegression(
        C=10.0, class_weight="balanced", solver="liblinear", dual=True, max_iter=1000, random_state=0
    )
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    auc = roc_auc_score(labels, cross_val_predict(model, features, labels, cv=folds, method="decision_function"))
    if auc < MIN_AUC:
        raise ConfigError(
            f"prepare.stages.classifier: good and bad examples look alike (cross-validated AUC {auc:.2f}, chance is "
            "0.50); give more examples, or sets that differ in their words"
        )
    model.fit(features, labels)
    weights = model.coef_[0].astype(np.float32)
    used = np.flatnonzero(weights)
    report = {"auc": round(float(auc), 4), "good": len(good), "bad": len(bad), "chars": chars, "n_features": N_FEATURES}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "weights.npz", index=used, weight=weights[used], intercept=model.intercept_.astype(np.float32))
    (folder / "classifier.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def load(folder: str | pathlib.Path) -> collections.abc.Callable[[str], float]:
    """Returns the saved classifier: text -> the probability that it is good. Raises ConfigError if it can't be loaded."""
    folder = pathlib.Path(folder).expanduser()
    try:
        report = files.json_of((folder / "classifier.json").read_bytes())
        with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
            weights = np.zeros(report["n_features"], np.float32)
            weights[arrays["index"]] = arrays["weight"]
            intercept = float(arrays["intercept"][0])
        if report["n_features"] != N_FEATURES:
            raise ValueError(f"n_features is {report['n_features']}, not {N_FEATURES}")
        chars = int(report["chars"])
    except (OSError, zipfile.BadZipFile, *files.MANGLED) as error:
        raise ConfigError(
            f"no classifier in {folder} ({error}); name the one with weights.npz and classifier.json"
        ) from error

    def score(text: str) -> float:
        row = _vectorizer().transform([text[:chars]])
        return 1 / (1 + math.exp(-float(weights[row.indices] @ row.data) - intercept))

    return score


@functools.cache
def _vectorizer():
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(n_features=N_FEATURES, ngram_range=(1, 2), alternate_sign=False, dtype=np.float32)
