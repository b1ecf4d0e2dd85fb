"""Abuse and listed words are found as words of their own; their look-alikes are not."""

import numpy as np
import pytest
import tiny_stage

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import toxicity

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
