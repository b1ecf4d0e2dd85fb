"""What is shown of a row's text while its ids come."""

import random
import time

import pytest
import tiny_data

from jaxlm.data.tokenizer.coder import Text


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0}).tokenizer()


def shown(coder, ids, stops, seed=0):
    """(the pieces of a text whose ids come in random groups, the stop string that ended it)."""
    rng, text, pieces = random.Random(seed), Text(coder, stops), []
    while ids:
        n = rng.randint(1, 4)
        pieces.append(text.feed(ids[:n]))
        ids = ids[n:]
    return [*pieces, text.close()], text.stopped


def test_a_character_waits_for_its_bytes(coder):
    ids, text = coder.encode("é🙂!"), Text(coder, ())
    assert len(ids) == 7  # bytes
    assert [text.feed([i]) for i in ids] == ["", "é", "", "", "", "🙂", "!"]
    assert text.close() == ""


def test_what_was_cut_becomes_the_mark_of_a_missing_character(coder):
    text = Text(coder, ())
    assert text.feed(coder.encode("sun é")[:-1]) == "sun "
    assert text.close() == "\ufffd"


@pytest.mark.parametrize(
    ("said", "stops", "before", "stopped"),
    [
        ("one two three", ["o th"], "one tw", "o th"),  # over the border of tokens
        ("sun é🙂 moon", ["🙂"], "sun é", "🙂"),  # of bytes that come one by one
        ("sun é🙂 moon", ["é🙂 m"], "sun ", "é🙂 m"),
        ("xababac", ["abac", "zz"], "xab", "abac"),  # begins twice
        ("xabc", ["abc", "b"], "xa", "b"),  # whole first
        ("xabc", ["bc", "abc"], "x", "abc"),  # both at once: the longer
        ("one\n\ntwo", ["\n\n", "\n"], "one", "\n"),
        ("one two", ["two!"], "one two", None),
        ("one", ["one"], "", "one"),
        ("", ["one"], "", None),
    ],
)
def test_a_stop_string_ends_the_text_however_its_ids_come(coder, said, stops, before, stopped):
    for seed in range(20):
        pieces, found = shown(coder, coder.encode(said), stops, seed)
        assert ("".join(pieces), found) == (before, stopped)


def test_only_what_may_begin_a_stop_string_is_held_back(coder):
    text = Text(coder, ["END."])
    assert text.feed(coder.encode("sun E")) == "sun "
    assert text.feed(coder.encode("N")) == ""
    assert text.feed(coder.encode("X")) == "ENX"
    assert (text.feed(coder.encode("END")), text.close()) == ("", "END")


def test_a_long_stop_string_costs_little(coder):
    text, began = Text(coder, ["x" * 1_000_000]), time.perf_counter()
    assert "".join(text.feed([i]) for i in coder.encode("sun and sea")) == "sun and sea"
    assert time.perf_counter() - began < 1


def test_ids_behind_the_vocabulary_and_control_tokens_are_no_text(coder):
    assert Text(coder, ()).feed([coder.eos_id, *coder.encode("sun"), coder.vocab_size + 3]) == "sun"
