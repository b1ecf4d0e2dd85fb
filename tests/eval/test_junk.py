"""Attractors: which strings of a model's texts count, and how the training text ranks them."""

import json

import pytest
import tiny_junk
from tiny_junk import LARGE, PLANTED, SMALL

from jaxlm.eval import junk


def drawn(*texts: str, prompt: str = "") -> list[dict]:
    """Each of the texts after a prompt of its own, or all after one."""
    return [{"prompt": prompt or f"prompt {number}", "text": text} for number, text in enumerate(texts)]


def test_a_word_counts_once_for_each_prompt_that_lacks_it():
    texts = drawn(*["PersonX, PersonX <|is|> zxcv_9"] * 3) + drawn(*["Rome"] * 9, prompt="Paris")
    texts += [{"prompt": f"All of Oslo {n}", "text": "Oslo"} for n in range(9)]
    assert junk.texts_with(texts) == {"PersonX": 3, "zxcv_9": 3}
    assert junk.texts_with(texts[1:]) == {}
    assert junk.texts_with([{"prompt": "", "text": "sea moon"}] * 3) == {"sea": 3, "moon": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_junk.make(tmp_path_factory.mktemp("data") / "d")


WEIGHTS = {"small": 3.0, "large": 97.0}


def test_what_documents_of_a_small_source_repeat_is_named_and_its_own_words_are_not(data):
    counts = dict.fromkeys((*PLANTED, *SMALL.split(), *LARGE.split(), "shared", "twofold", "nowhere"), 5)
    rows = junk.ranked(counts | {"ipsum": 6}, (data, WEIGHTS))
    assert [row["string"] for row in rows] == ["ipsum", "PersonX", "lorem"]
    best, small = rows[0], data.entry("small", "train")["documents"]
    times = {doc_id: held["ipsum"] for _, doc_id, held in junk._holders(data, {"ipsum": 1}, lambda done: None)}
    assert (best["source"], best["share"], best["of_text"], best["texts"]) == ("small", 1.0, 0.03, 6)
    assert (best["times"], best["documents"]) == (sum(times.values()), len(times))
    assert 3 <= best["documents"] < small / 5
    assert times[best["example"]] == max(times.values()) > min(times.values())


def test_a_large_source_names_nothing_and_a_word_that_others_have_too_is_none(data):
    counts = dict.fromkeys(PLANTED, 5)
    assert junk.ranked(counts, (data, {"small": 20.0, "large": 80.0})) == []
    assert junk.ranked({"one": 5}, (data, {"small": 97.0, "large": 3.0})) == []  # of all of its documents
    assert junk.ranked(counts | {"alpha": 9}, None)[0] == {"string": "alpha", "texts": 9}


def test_prompts_are_beginnings_of_held_out_documents_by_weight(data):
    firsts = list(junk.prompts((data, WEIGHTS), 300, 0))
    small = [bool({*prompt.split()} & {*SMALL.split()}) for prompt in firsts]
    assert len(firsts) == 300
    assert 0 < sum(small) < 30
    assert firsts != list(junk.prompts((data, WEIGHTS), 300, 1))
    assert list(junk.prompts((data, {}), 300, 0)) == []


def test_texts_that_exist_are_read_once_and_damaged_lines_left_out(tmp_path):
    (tmp_path / "samples").mkdir()
    sample = {"prompt": "a", "text": "b", "step": 3, "temperature": 0.6}
    (tmp_path / "samples/3.jsonl").write_text(json.dumps(sample) + '\n{"prompt": 1, "text": "c"}\n[\n')
    texts = [{"prompt": "a", "text": "b"}, {"prompt": "d", "text": "e"}]
    (tmp_path / "4.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts) + '{"prompt": "f", "te')
    assert junk.kept(tmp_path, tmp_path / "4.jsonl") == texts
    assert junk.kept(tmp_path, tmp_path / "5.jsonl") == texts[:1]
