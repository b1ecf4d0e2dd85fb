"""Planted sources: the same twice, a mixture of two, code beside prose; and each measure on texts made to show it."""

import dataclasses
import json
import random

import numpy as np
import pytest

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, config_files
from jaxlm.configs import base
from jaxlm.corpus.audit import mismatch


def prose(seed: int, documents: int, topic: str, shared: float = 0.6) -> list[str]:
    """Sentences of words drawn by Zipf's law, a share of them from a list that all topics use."""
    rng, letters = random.Random(f"{topic}{seed}"), random.Random(topic)
    own = ["".join(letters.choices("abdegiklmnoprstu", k=letters.randint(3, 9))) for _ in range(800)]
    letters = random.Random("all")
    common = ["".join(letters.choices("aeiounrstlh", k=letters.randint(1, 6))) for _ in range(300)]

    def word() -> str:
        words = common if rng.random() < shared else own
        return words[int(len(words) ** rng.random()) - 1]

    def sentence() -> str:
        return " ".join(word() for _ in range(rng.randint(6, 18))).capitalize() + "."

    return [
        "\n\n".join(" ".join(sentence() for _ in range(4)) for _ in range(rng.randint(1, 6))) for _ in range(documents)
    ]


def code(seed: int, documents: int) -> list[str]:
    rng = random.Random(f"code{seed}")
    names = [f"{a}_{b}" for a in ("read", "make", "find", "sum") for b in ("row", "file", "node", "all", "x")]

    def function() -> str:
        a, b, c = rng.sample(names, 3)
        return f"def {a}({b}, {c}=None):\n    if {b} is None:\n        return {c}\n    {a} = {b}({c})\n    return {a}\n"

    return ["\n\n".join(function() for _ in range(rng.randint(2, 12))) for _ in range(documents)]


@pytest.fixture(scope="module")
def report():
    target = [text for a, b in zip(prose(9, 280, "a"), prose(9, 280, "b"), strict=True) for text in (a, b)]
    rng = random.Random(0)
    target = [text for i, text in enumerate(target) if rng.random() < (0.7, 0.3)[i % 2]]
    sources = {"a": prose(1, 300, "a"), "b": prose(1, 300, "b"), "code": code(1, 200), "again": prose(2, 300, "a")}
    return mismatch.compare(sources, target, weights={"a": 0.2, "b": 0.5, "code": 0.3, "again": 0.0})


def pair(report, a, b):
    (found,) = [p for p in report["pairs"] if (p["a"], p["b"]) == (a, b)]
    return found


def test_two_samples_of_one_source_are_alike(report):
    same, other = pair(report, "a", "again"), pair(report, "a", "b")
    assert abs(same["js_words"] - same["floor_words"]) < 0.01
    assert abs(same["js_bigrams"] - same["floor_bigrams"]) < 0.02
    assert 0.4 < same["auc"] < 0.6
    assert other["js_words"] > other["floor_words"] + 0.1
    assert other["auc"] > 0.95


def test_a_planted_mixture_is_found(report):
    nearest = report["mixture"]["nearest"]
    assert abs(nearest["a"] + nearest["again"] - 0.7) < 0.1
    assert abs(nearest["b"] - 0.3) < 0.1
    assert nearest["code"] < 0.01
    assert report["mixture"]["js_nearest"] < report["mixture"]["js_now"] / 2
    assert sum(nearest.values()) == pytest.approx(1)


def test_advice_follows(report):
    assert report["advice"]["code"]["action"] == "drop"
    assert "of its lines are code against" in report["advice"]["code"]["sentence"]
    assert "30% now" in report["advice"]["code"]["sentence"]
    assert report["advice"]["b"]["action"] == "lower"
    assert report["advice"]["a"]["action"] in ("raise", "keep")
    for name, advice in report["advice"].items():
        assert name in advice["sentence"]
        assert advice["sentence"].endswith(".")
        assert "\n" not in advice["sentence"]


def test_a_report_is_json_and_the_order_of_texts_does_not_matter(report):
    assert json.loads(json.dumps(report)) == report
    first = report["pairs"][0]
    assert first["distance"] == max(0.0, first["js_words"] - first["floor_words"])
    sources = {"a": prose(1, 60, "a"), "b": prose(1, 60, "b")}
    backward = {name: texts[::-1] for name, texts in sources.items()}
    first, second = (mismatch.compare(s, sources["a"], sample_mb=0.03) for s in (sources, backward))
    assert first["pairs"] == second["pairs"]


def test_without_a_target_the_outlier_is_named():
    sources = {"a": prose(1, 100, "a"), "b": prose(1, 100, "b"), "c": prose(1, 100, "c"), "code": code(1, 100)}
    report = mismatch.compare(sources)
    assert report["mixture"] is None
    assert {name: advice["action"] for name, advice in report["advice"].items()} == {
        "a": "keep",
        "b": "keep",
        "c": "keep",
        "code": "try",
    }
    twins = mismatch.compare({"a": prose(1, 200, "a"), "twin": prose(2, 200, "a")})
    assert "as one with twin" in twins["advice"]["a"]["sentence"]
    alone = mismatch.compare({"a": prose(1, 20, "a")})
    assert alone["advice"]["a"]["action"] == "keep"


def test_few_and_short_documents_do():
    report = mismatch.compare({"one": ["a single document of a few words"], "two": ["another", "and one more"]})
    assert report["pairs"][0]["auc"] is None
    whole = " ".join(prose(1, 200, "a"))  # one document of many passages
    assert mismatch.compare({"one": [whole], "two": code(1, 40)})["pairs"][0]["auc"] > 0.9


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="source a has no text to compare"):
        mismatch.compare({"a": [" ", ""]})
    with pytest.raises(ConfigError, match="the target has no text to compare"):
        mismatch.compare({"a": ["text"]}, [])
    config = config_files.load("base")
    with config.unlocked():
        config.prepare.sources.target = base.source("pages", ("unicode",))
    with pytest.raises(ConfigError, match="a source can't be called target"):
        config_lib.resolve(config)


def test_samples_are_bounded():
    texts = (f"{i} " * 500 for i in range(10**9))
    sample = mismatch.sample(texts, sample_chars=20_000, read_bytes=1_000_000)
    assert 20_000 <= sum(map(len, sample.passages)) < 20_000 + mismatch.PASSAGE_CHARS
    assert 1_000_000 <= sample.n_bytes < 1_010_000
    assert len(sample.lengths) > len(set(sample.groups.tolist())) >= 4


def test_js_divergence_by_hand():
    assert mismatch.js_divergence(np.array([1, 2, 2, 1]), np.array([1, 2])) == 0
    assert mismatch.js_divergence(np.array([1, 1]), np.array([2, 2, 2])) == pytest.approx(1)
    # p = (1/2, 1/2), q = (1, 0): H(3/4, 1/4) - H(1/2, 1/2) / 2
    assert mismatch.js_divergence(np.array([1, 2]), np.array([1, 1])) == pytest.approx(0.811278 - 0.5, abs=1e-6)


def test_nearest_mixture_of_known_distributions():
    rng = np.random.default_rng(0)
    components = rng.dirichlet(np.full(500, 0.3), size=3) + 1e-12
    weights = np.array([0.6, 0.0, 0.4])
    assert mismatch.nearest_mixture(components, weights @ components) == pytest.approx(weights, abs=0.005)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("list", "- one\n* two\n3. three\n(b) four"),
        ("table", "| a | b |\n|---|---|\n| 1 | 2 |"),
        ("table", "name\tage\tcity\nAda\t36\tLondon"),
        ("heading", "# Title\n\ntext\n\n## Part two\n\ntext"),
        ("heading", " = Valkyria = \n\ntext"),
        ("heading", "Title\n=====\n\ntext"),
        ("code", "import os\n\ndef f(x):\n    y = x + 1\n    return y"),
        ("code", "int main(void) {\n  printf(1);\n  return 0;\n}"),
        ("code", "See:\n```\nanything at all\nmore of it\n```"),
    ],
)
def test_formats_are_seen(kind, text):
    found = mismatch.formats([text])
    assert found[kind]["passages"] == 1
    assert found[kind]["lines"] >= 0.3
    assert all(other["passages"] == 0 for name, other in found.items() if name != kind)


@pytest.mark.parametrize(
    "text",
    [
        "If you go, take it; for the road is long.\nWhile he slept - as all do - it rained.\nA. Smith came with us.",
        "Nay, answer me; stand and unfold yourself;\nLong live the king! Bernardo?\nHe; You come most carefully;",
        "He said the following:\nfor example:\nwith one exception:\nThe price (in 1990) was 5 = five.",
        "1990 was a good year\n3.5 million came\n-5 degrees\nimport duties rose\nreturn tickets sold",
        "日本語の文章です。\n二つ目の文です。",
    ],
)
def test_prose_is_not_taken_for_a_format(text):
    assert all(value["passages"] == 0 for value in mismatch.formats([text]).values())


def test_a_comment_is_no_heading():
    source = "# a comment\nx = f(1)\n# another\ny = f(2)\nreturn y\n"
    assert mismatch.formats([source])["heading"]["lines"] == 0


def test_readability_orders_plain_and_learned_english():
    plain = mismatch.readability(["The cat sat on the mat. It was a good cat. We like it."])
    learned = mismatch.readability(
        [
            "Notwithstanding considerable methodological heterogeneity, contemporary epidemiological investigations "
            "demonstrate statistically significant associations between environmental determinants and morbidity."
        ]
    )
    assert plain["flesch"] > 90 > 30 > learned["flesch"]
    assert plain["words_per_sentence"] == pytest.approx(14 / 3)
    assert learned["chars_per_word"] > 2 * plain["chars_per_word"]
    assert mismatch.readability(["1234", ""]) == {"words_per_sentence": 0.0, "chars_per_word": 0.0, "flesch": 0.0}
    # made, hoped: one syllable each; table, wanted: two
    two = mismatch.readability(["made hoped table wanted."])
    assert two["flesch"] == pytest.approx(206.835 - 1.015 * 4 - 84.6 * 6 / 4)


PAIR = mismatch.Pair("a", "b", 0.5, 0.125, 0.75, 0.25, None, ["words"], ["of b"])


def test_distance_is_what_exceeds_chance():
    assert PAIR.distance == 0.375
    assert dataclasses.replace(PAIR, floor_words=0.625).distance == 0.0
