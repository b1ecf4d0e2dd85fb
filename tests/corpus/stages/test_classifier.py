"""A classifier learns from two folders, tells how well, refuses what cannot be learned and holds no pickle."""

import json
import random

import numpy as np
import pytest
import tiny_stage

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import classifier

LESSON = [
    "theorem", "proof", "energy", "cell", "because", "therefore", "example", "plant", "history", "measure", "force",
    "explain", "water", "light",
]  # fmt: skip
ADVERT = [
    "buy", "cheap", "offer", "now", "click", "deal", "price", "free", "shipping", "discount", "casino", "bonus", "win",
    "subscribe",
]  # fmt: skip
COMMON = ["the", "of", "and", "to", "in", "is", "that", "it", "for", "on", "with", "as", "are", "this"]


def texts(words: list[str], n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(words + COMMON * 2, k=rng.randint(30, 60))) + f" {rng.random()}" for _ in range(n)]


@pytest.fixture
def examples(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    for i, text in enumerate(texts(LESSON, 30, 0)):
        (tmp_path / "good" / f"{i}.txt").write_text(text)
    rows = [json.dumps({"text": text}) for text in texts(ADVERT, 40, 1)]
    (tmp_path / "bad" / "bad.jsonl").write_text("\n".join(rows))
    return {"good": str(tmp_path / "good"), "bad": str(tmp_path / "bad")}


def test_tells_good_from_bad(tmp_path, examples):
    stage = tiny_stage.make("classifier", tmp_path, **examples)
    for text in texts(LESSON, 20, 2):
        outcome = tiny_stage.apply(stage, text)
        assert outcome.removed is None
        assert 0.5 <= outcome.metadata["quality"] <= 1
    for text in texts(ADVERT, 20, 3):
        assert tiny_stage.apply(stage, text).reason == "low quality"
    noted = tiny_stage.apply(tiny_stage.make("classifier min_score=0.0", tmp_path, **examples), text)
    assert noted.removed is None
    assert noted.metadata["quality"] < 0.5
    assert tiny_stage.apply(stage, "").metadata["quality"] == pytest.approx(0.5, abs=0.4)


def test_the_saved_one_is_the_same_and_is_used_elsewhere(tmp_path, examples):
    first = tiny_stage.make("classifier", tmp_path / "a", **examples)
    second = tiny_stage.make("classifier", tmp_path / "b", **examples)
    for name in ("weights.npz", "classifier.json"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert np.load(first.folder / "weights.npz", allow_pickle=False)["weight"].dtype == np.float32
    report = json.loads((first.folder / "classifier.json").read_text())
    assert (report["good"], report["bad"]) == (30, 40)
    assert report["auc"] > 0.95
    reused = tiny_stage.make("classifier", tmp_path / "c", model=str(first.folder))
    text = texts(LESSON, 1, 5)[0]
    score = classifier.load(first.folder)
    assert tiny_stage.apply(reused, text).metadata["quality"] == round(score(text), 4) > 0.5


def test_scores_are_scikit_learns(tmp_path):
    from sklearn.linear_model import LogisticRegression

    good, bad = texts(LESSON + ADVERT[:8], 20, 0), texts(ADVERT + LESSON[:8], 20, 1)
    classifier.train(good, bad, 4000, tmp_path)
    vectorizer = classifier._vectorizer()
    model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=5000, tol=1e-8)
    model.fit(vectorizer.transform(good + bad), [1] * 20 + [0] * 20)
    expected = model.predict_proba(vectorizer.transform(good[:3] + bad[:3]))[:, 1]
    np.testing.assert_allclose([classifier.load(tmp_path)(t) for t in good[:3] + bad[:3]], expected, atol=0.02)


def test_refusals(tmp_path, examples):
    with pytest.raises(ConfigError, match="set good and bad"):
        tiny_stage.make("classifier", tmp_path, good=examples["good"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"classifier\.bad: .*no file"):
        tiny_stage.make("classifier", tmp_path, good=examples["good"], bad=str(tmp_path / "empty"))
    (tmp_path / "few.txt").write_text("One example.")
    with pytest.raises(ConfigError, match=r"classifier\.bad=.* has 1 examples"):
        tiny_stage.make("classifier", tmp_path, good=examples["good"], bad=str(tmp_path / "few.txt"))
    with pytest.raises(ConfigError, match="no classifier in"):
        tiny_stage.make("classifier", tmp_path, model=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="look alike"):
        classifier.train(texts(COMMON, 40, 1), texts(COMMON, 40, 2), 4000, tmp_path / "same")
    assert not (tmp_path / "same").exists()
