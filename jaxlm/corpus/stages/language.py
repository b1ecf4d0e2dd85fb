"""Keeps the documents that are written in certain languages.

py3langid (a byte n-gram naive Bayes, github.com/adbar/py3langid) has its model in its wheel; a local fastText model
(lid.176, GlotLID: arXiv:1607.01759) takes its place where one is given. Either sees a sample only: the first, middle and last
part of a long text, as its beginning may be a menu or a licence.
"""

import collections
import collections.abc
import dataclasses
import functools
import pathlib

from jaxlm import config as config_lib
from jaxlm.config import ConfigError
from jaxlm.corpus.stage import Document, Remove, Stage


@dataclasses.dataclass(frozen=True)
class Settings:
    languages: tuple[str, ...]
    min_score: float
    sample_chars: int
    model: str


class Language(Stage):
    """Writes the most probable language to metadata["language_id"]; removes other and uncertain ones. Code passes."""

    Settings = Settings

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._classify = _fasttext(settings.model) if settings.model else _py3langid().classify

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        if settings.sample_chars < 100:
            raise ConfigError(f"prepare.stages.language.sample_chars={settings.sample_chars}: use 100 or more")
        if settings.model:
            _fasttext(settings.model)
            return
        known = _py3langid().labels
        for code in settings.languages:
            if code not in known:
                raise ConfigError(
                    f"prepare.stages.language.languages: no language {code!r}; {config_lib.nearest(code, known)}"
                )

    def apply(self, document: Document, edits: collections.Counter[str]) -> Remove | None:
        if document.metadata.get("format") == "code":
            return None
        s = self.settings
        language, score = self._classify(sample(document.text, s.sample_chars))
        document.metadata["language_id"] = language
        if not s.languages:
            return None
        if language not in s.languages:
            return Remove("other language", f"{language} ({score:.2f})")
        if score < s.min_score:
            return Remove("uncertain language", f"{language} ({score:.2f}), min_score={s.min_score}")
        return None


def sample(text: str, chars: int) -> str:
    """The text, or `chars` characters of it in three parts: from its beginning, middle and end."""
    if len(text) <= chars:
        return text
    part = chars // 3
    middle = (len(text) - part) // 2
    return f"{text[:part]} {text[middle : middle + part]} {text[-part:]}"


@functools.cache
def _py3langid():
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@functools.cache
def _fasttext(path: str) -> collections.abc.Callable[[str], tuple[str, float]]:
    try:
        import fasttext
    except ImportError as error:
        raise ConfigError(
            "prepare.stages.language.model needs fastText: pip install fasttext-numpy2-wheel, or model="
        ) from error
    if not pathlib.Path(path).is_file():
        raise ConfigError(f"prepare.stages.language.model={path}: no such file; download lid.176.ftz or set model=")
    try:
        model = fasttext.load_model(path)
    except ValueError as error:
        raise ConfigError(f"prepare.stages.language.model={path} is no fastText model: {error}") from error

    def classify(text: str) -> tuple[str, float]:
        labels, scores = model.predict(" ".join(text.split()))
        return (labels[0].removeprefix("__label__"), float(scores[0])) if labels else ("und", 0.0)

    return classify
