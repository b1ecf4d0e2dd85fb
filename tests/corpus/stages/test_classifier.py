"""A user's own stages: a classifier learnt from two folders, a list of words, a function; and what is refused."""

import json
import random

import numpy as np
import pytest
import tiny_stage

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import classifier, toxicity

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


def test_only_the_beginning_is_looked_at(tmp_path, examples):
    stage = tiny_stage.make("classifier chars=200", tmp_path, **examples)
    lesson, advert = (texts(words, 1, 7)[0].ljust(200)[:200] for words in (LESSON, ADVERT))
    one, two = (tiny_stage.apply(stage, lesson + rest).metadata["quality"] for rest in ("", advert))
    assert one == two


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


CLEAN = [
    "The harbour lies at the end of the road.",
    "Kill the process with SIGKILL, and the master will start another child.",
    "Class assets from Essex, Sussex and Scunthorpe; a cocktail with Dick Van Dyke in Penistone.",
    "Breast cancer screening is offered every three years.",
    "The cat sat on the mat and slept.",
]
BAD = ["You fucking idiot, shut up.", "What a piece of shit you are, bitch!"]


def test_probabilities_are_those_of_the_library():
    profanity_check = pytest.importorskip("profanity_check")
    lines = [*CLEAN, *BAD, "", "1234 ???", "fuck fuck FUCK the the", "naïve Ünïcode"]
    np.testing.assert_allclose(toxicity.profanity(lines), profanity_check.predict_prob(lines), atol=1e-12)


def test_bad_lines_go_and_clean_ones_stay():
    stage = tiny_stage.make("toxicity max_bad_lines=0.2")
    text = "\n".join([*CLEAN, BAD[0], "", *CLEAN])
    outcome = tiny_stage.apply(stage, text)
    assert outcome.removed is None
    assert outcome.text == "\n".join([*CLEAN, "", *CLEAN])
    assert outcome.edits == {"bad line": 1}
    clean = tiny_stage.apply(stage, "\n".join(CLEAN))
    assert (clean.text, clean.edits) == ("\n".join(CLEAN), {})
    kept = tiny_stage.apply(tiny_stage.make("toxicity max_bad_lines=0.2 drop_lines=False"), text)
    assert (kept.text, kept.removed) == (text, None)


def test_documents_with_many_bad_lines_go():
    outcome = tiny_stage.apply(tiny_stage.make("toxicity"), "\n".join([*CLEAN, *BAD]))
    assert outcome.reason == "bad lines"
    assert outcome.removed.detail.startswith("2 of 7: You fucking")
    assert tiny_stage.apply(tiny_stage.make("toxicity min_score=1.0"), BAD[0]).removed is None
    assert tiny_stage.apply(tiny_stage.make("toxicity"), "\n \n").removed is None


def test_a_list_of_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("# ours\nass\nCunt  # British\nblue  waffle\nsex\n畜生\n\n", "utf-8")
    stage = tiny_stage.make("toxicity min_score=1.0 max_bad_lines=0.0", tmp_path, words=str(path))
    for text in ("What an ass.", "ASS", '"cunt"', "the blue waffle", "x\nsex, y", "他是畜生吗"):
        assert tiny_stage.apply(stage, text).reason == "bad lines", text
    for text in (*CLEAN, "assess the class", "Essex", "blue", "sexton", "grass ass1 assé"):
        assert tiny_stage.apply(stage, text).removed is None, text
    assert not toxicity.listed("sexsexy bassex", toxicity._automaton(str(path)))


def test_bad_lists(tmp_path):
    with pytest.raises(ConfigError, match=r"toxicity.words=.*one word a line"):
        tiny_stage.make("toxicity words=missing.txt", tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="holds no word"):
        tiny_stage.make("toxicity", tmp_path, words=str(tmp_path / "empty.txt"))


FILTERS = """
def long(text, metadata):
    return len(text) > 10


def share_of_letters(text, metadata):
    metadata["letters"] = sum(map(str.isalpha, text))
    return metadata["letters"] / len(text)
"""


@pytest.fixture
def filters(tmp_path):
    (tmp_path / "my_filters.py").write_text(FILTERS)
    return tmp_path / "my_filters.py"


def test_a_function_of_a_file_says_what_stays(filters, tmp_path):
    stage = tiny_stage.make(f"function path={filters}:long", tmp_path)
    assert tiny_stage.apply(stage, "Long enough to stay.").metadata["score"] == 1
    gone = tiny_stage.apply(stage, "Short.")
    assert (gone.reason, gone.removed.detail) == ("low score", "score=0.000, min_score=0.5")


def test_a_score_is_noted_and_metadata_may_grow(filters, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    stage = tiny_stage.make("function path=my_filters:share_of_letters min_score=0.25", tmp_path)
    outcome = tiny_stage.apply(stage, "ab 1", url="https://a.org")
    assert outcome.removed is None
    assert outcome.metadata == {"url": "https://a.org", "letters": 2, "score": 0.5}
    assert tiny_stage.apply(stage, "1234 5678 a").reason == "low score"


def test_an_edited_file_is_another_input(filters):
    spec = tiny_stage.registry.StageSpec("function", {"path": f"{filters}:long", "min_score": 0.5})
    before = tiny_stage.registry.digest(spec)
    filters.write_text(FILTERS + "\n")
    assert before != tiny_stage.registry.digest(spec) != ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "ValueError: Empty module name"),
        ("my_filters", "ValueError: Empty module name"),
        ("no.such.module:keep", "ModuleNotFoundError: No module named 'no'"),
        ("json:keep", "AttributeError: module 'json' has no attribute 'keep'"),
        ("missing.py:keep", "FileNotFoundError: "),
    ],
)
def test_what_can_not_be_imported_is_refused(tmp_path, path, why):
    with pytest.raises(ConfigError, match=r"write FILE\.py:FUNCTION or MODULE:FUNCTION") as error:
        tiny_stage.make("function", tmp_path, path=path)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
