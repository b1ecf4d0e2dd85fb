"""Examples as arrays: the longest lose their oldest turns, pairs stay whole or go; what is held out is asked nowhere else."""

import dataclasses

import numpy as np
import pytest
import tiny_chats
import tiny_hf

from jaxlm.data.batches import encoded
from jaxlm.data.chats import masks
from jaxlm.data.chats.examples import Chat, Pair, Place
from jaxlm.data.tokenizer import coder

PLACE = Place("a.jsonl", 1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


def chat(*turns: int, system: int = 0, given: int = 0) -> Chat:
    """A chat of turns of so many words each way, each turn of its own word."""
    said = [("system", "and " * system)] if system else []
    for word, n in zip(("one", "two", "six", "red", "sun"), turns, strict=False):
        said += [("user", f"{word} " * n), ("assistant", f"{word} " * n)]
    return Chat(tuple({"role": role, "content": content} for role, content in said), PLACE, given)


def pair(chosen: str, rejected: str, prompt: str = "one", margin: float = 0.0) -> Pair:
    sides = [({"role": "assistant", "content": content},) for content in (chosen, rejected)]
    return Pair(({"role": "user", "content": prompt},), *sides, margin, PLACE)


def build(tokenizer, *read, seq_len=64):
    return encoded.build(read, tokenizer, seq_len=seq_len)


def alone(tokenizer, one: Chat) -> list[int]:
    return masks.masked(tokenizer, [one])[0].ids.tolist()


def test_segments_are_the_examples(tokenizer):
    read = [chat(2), chat(1, 3, system=2), chat(4)]
    found, counts = build(tokenizer, *read)
    assert len(found) == counts.read == 3
    for number, one in enumerate(read):
        ((ids, kinds),) = found.segments(number)
        (want,) = masks.masked(tokenizer, [one])
        np.testing.assert_array_equal(ids, want.ids)
        np.testing.assert_array_equal(kinds, want.kinds)
        assert found.lengths()[number] == len(want.ids) - 1
        assert found.counted()[number] == np.count_nonzero(want.kinds[1:])
    pairs, _ = build(tokenizer, pair("two", "six six"), pair("red", "sun"))
    assert [len(list(pairs.segments(number))) for number in range(2)] == [2, 2]
    assert pairs.lengths()[0] == sum(len(ids) - 1 for ids, _ in pairs.segments(0))
    assert pairs.counted()[0] == sum(np.count_nonzero(kinds) for _, kinds in pairs.segments(0))


@pytest.mark.parametrize("system", [0, 2])
def test_a_long_chat_loses_its_oldest_turns(tokenizer, system):
    """As few as need be, and never the system's message: the rest is a chat that might have been read so."""
    whole = chat(3, 4, 2, 5, system=system)
    front = whole.messages[: bool(system)]
    lengths = [len(alone(tokenizer, Chat(front + whole.messages[len(front) + 2 * n :], PLACE))) - 1 for n in range(4)]
    for lost, length in enumerate(lengths):
        for seq_len in (length, length + 1):
            found, counts = build(tokenizer, chat(1), whole, seq_len=seq_len)
            want = Chat(front + whole.messages[len(front) + 2 * lost :], PLACE)
            ((ids, kinds),) = found.segments(1)
            assert ids.tolist() == alone(tokenizer, want)
            np.testing.assert_array_equal(kinds, masks.masked(tokenizer, [want])[0].kinds)
            assert (counts.cut, counts.turns_cut, counts.too_long) == (int(lost > 0), lost, 0)
    found, counts = build(tokenizer, chat(1), whole, seq_len=lengths[-1] - 1)
    assert (len(found), counts.too_long, counts.cut) == (1, 1, 0)
    (line,) = counts.lines("chats", 20)
    assert line == "1 of 2 chats are left out: even the last turn is longer than train.seq_len=20 tokens"


def test_what_is_given_stays_given(tokenizer):
    """Of a chat that lost turns, the same answers count."""
    whole = chat(3, 4, 2, given=4)
    short = Chat(whole.messages[2:], PLACE, given=2)
    found, _ = build(tokenizer, whole, seq_len=len(alone(tokenizer, short)) - 1)
    ((_, kinds),) = found.segments(0)
    np.testing.assert_array_equal(kinds, masks.masked(tokenizer, [short])[0].kinds)


def test_a_pair_is_whole_or_left_out(tokenizer):
    long, short, same = pair("two " * 30, "six"), pair("two", "six", margin=2), pair("two", "two")
    found, counts = build(tokenizer, long, short, same, seq_len=40)
    assert (counts.read, counts.too_long, counts.same, len(found)) == (3, 1, 1, 1)
    assert found.margins_E.tolist() == [2.0]
    assert counts.lines("pairs", 40) == [
        "1 of 3 pairs are left out: both sides together are longer than train.seq_len=40 tokens",
        "1 of 3 pairs are left out: chosen and rejected are the same",
    ]


def test_what_has_no_mask_is_left_out(tokenizer, monkeypatch):
    """A chat, and a pair of which one side has none; the survey sees neither."""
    of_all, seen = masks.masked, []

    def masked(tokenizer, chats, ignore):
        found = of_all(tokenizer, chats, ignore)
        return [
            masks.INSIDE if "red" in chat.messages[-1]["content"] else one
            for chat, one in zip(chats, found, strict=True)
        ]

    monkeypatch.setattr(encoded, "masked", masked)
    for read in ([chat(1), chat(1, 2, 3, 4)], [pair("sun", "sea"), pair("sea", "red"), pair("red", "sea")]):
        seen.clear()
        found, counts = encoded.build(read, tokenizer, seq_len=64, see=lambda one, sides: seen.append(one))
        assert (len(found), counts.inside) == (1, len(read) - 1)
        assert seen == read[:1]
        assert "an answer begins inside a token" in counts.lines("chats", 64)[0]


def test_chunks_change_nothing(tokenizer, tmp_path, monkeypatch):
    from jaxlm.data.chats import examples

    path = tiny_chats.chats(tmp_path / "a.jsonl", 30, turns=4)
    read = list(examples.read(path, "auto", False))
    one, counts = build(tokenizer, *read)
    monkeypatch.setattr(encoded, "CHUNK", 7)
    other, again = build(tokenizer, *read)
    assert one.sha256() == other.sha256()
    assert counts == again
    assert counts.cut > 0


def test_held_out_by_what_is_asked(tokenizer):
    """The same question is never on both sides; about the share asked for, and at least one if there are two."""
    read = [pair("two", "six", prompt=f"one {i // 2}") for i in range(400)]
    found, _ = build(tokenizer, *read)
    out = encoded.held_out(found.keys_E, 0.25)
    assert (out[0::2] == out[1::2]).all()
    assert 0.15 < out.mean() < 0.35
    left = found.take(~out)
    assert len(left) == (~out).sum()
    ((ids, _), _) = left.segments(2)
    ((want, _), _) = found.segments(int(np.flatnonzero(~out)[2]))
    np.testing.assert_array_equal(ids, want)
    assert found.take(np.ones(400, bool)).sha256() == found.sha256() != left.sha256()
    few, _ = build(tokenizer, *read[:4])
    assert encoded.held_out(few.keys_E, 1e-9).sum() == 2
    assert encoded.held_out(few.keys_E, 0.999999).sum() == 2
    assert encoded.held_out(build(tokenizer, *read[:2])[0].keys_E, 0.25).sum() == 0
    assert encoded.held_out(build(tokenizer)[0].keys_E, 0.25).sum() == 0


# As Qwen 3: an empty thought in front of the last answer alone.
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ '# ' if loop.last and m.role == 'assistant' else '' }}"
    "{{ m.content + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_answers_that_are_written_otherwise_are_rows_of_their_own(tmp_path):
    """On the side of the chat that they are from; as the model is asked for them, all before them given."""
    tiny_hf.byte_level(tmp_path, chat_template=THINKS)
    tokenizer = coder.load(tmp_path)
    one = chat(1, 2, 3)
    found, counts = build(tokenizer, one, chat(1), seq_len=400)
    texts = [
        (tokenizer.decode(ids[kinds > 0]), tokenizer.decode(ids)) for n in range(4) for ids, kinds in found.segments(n)
    ]
    said = [message["content"] for message in one.messages[1::2]]
    assert [text for text, _ in texts[:3]] == [f"# {text}" for text in said]
    assert all(whole.count("#") == 1 for _, whole in texts)
    assert (len(found), counts.alone, counts.read) == (4, 2, 2)
    assert len(set(found.keys_E[:3].tolist())) == 1
    (line,) = counts.lines("chats", 400)
    assert line.startswith("2 answers get extra rows of their own: ")
    last, counts = build(tokenizer, dataclasses.replace(one, last=True), seq_len=400)
    ((ids, kinds),) = last.segments(0)
    assert (tokenizer.decode(ids[kinds > 0]), counts.alone) == (f"# {said[-1]}", 0)


def test_chats_are_counted_not_their_rows(tmp_path):
    """What is cut or left out is a chat, however many rows of its answers are; rows of their own are those that fit."""
    tiny_hf.byte_level(tmp_path, chat_template=THINKS)
    tokenizer = coder.load(tmp_path)
    one = chat(12, 12, 12, 12)
    alone, _ = build(tokenizer, one.up_to(1), seq_len=2000)
    length = int(alone.lengths()[0])
    found, counts = build(tokenizer, one, seq_len=length + 80)
    assert (len(found), counts.cut, counts.too_long, counts.alone) == (4, 1, 0, 3)
    assert counts.lines("chats", 1)[0].startswith("1 of 1 chats lost their oldest turns")
    found, counts = build(tokenizer, one, seq_len=20)
    assert (len(found), counts.cut, counts.too_long, counts.alone) == (0, 0, 1, 0)


@pytest.mark.parametrize("last", [False, True])
def test_a_row_of_its_own_loses_no_turn_too_many(last, tmp_path):
    tiny_hf.byte_level(tmp_path, chat_template=THINKS)
    tokenizer = coder.load(tmp_path)
    one = dataclasses.replace(chat(3, 3, 3, 3), last=last)
    found, counts = build(tokenizer, one, seq_len=2000)
    whole = int(found.lengths().max())
    found, counts = build(tokenizer, one, seq_len=whole - 1)
    assert (counts.cut, counts.turns_cut) == (1, 1)


def test_the_last_answer_alone_is_the_last_that_is_learnt(tmp_path):
    one = chat(1, 2, 3)
    one.messages[5]["weight"] = 0
    for source in (None, THINKS):
        tokenizer = tiny_chats.tokenizer()
        if source:
            tiny_hf.byte_level(tmp_path, chat_template=source)
            tokenizer = coder.load(tmp_path)
        found, _ = build(tokenizer, dataclasses.replace(one, last=True), seq_len=400)
        ((ids, kinds),) = found.segments(0)
        assert one.messages[3]["content"] in tokenizer.decode(ids[kinds > 0].tolist())
        assert one.messages[5]["content"] not in tokenizer.decode(ids[kinds > 0].tolist())


def test_answers_inside_of_pairs_that_are_written_otherwise_are_given(tmp_path):
    tiny_hf.byte_level(tmp_path, chat_template=THINKS)
    tokenizer = coder.load(tmp_path)
    ask, say = chat(1).messages
    found, counts = build(tokenizer, Pair((ask,), (say, ask, say), (say,), 0.0, PLACE), seq_len=400)
    texts = [tokenizer.decode(ids[kinds > 0]) for ids, kinds in found.segments(0)]
    assert (texts, counts.untold) == ([f"# {say['content']}"] * 2, 1)
