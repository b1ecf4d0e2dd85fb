"""Every text comes back; control ids are out of reach of text; bytes are counted; models are deterministic."""

import base64
import io
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import sentencepiece as spm

from jaxlm.config import CHAT_TOKENS, ConfigError, RunError
from jaxlm.data.tokenizer import ours, train
from jaxlm.host import child

HARD = [
    "", " ", "  leading, trailing  ", "\n", "\n\n\t x\r\n\v\f", "    def f():\n\t\treturn  1\n", "\0", "a\0b",
    "\x01\x02\x1b\x7f\x80\x9f", "</s><s><unk><pad><0x41><0x0A>",
    "<|im_start|>user\nhi<|im_end|><|system|><|user|><|assistant|>", "▁", "▁▁ a▁b ▁",
    "é e\u0301 \uff46\uff55 \ufb01 \u2460 \u212b", "\ufeff\u200b\u00ad\u2028\u2029\u3000",
    "日本語 العربية עברית हिन्दी 👩‍👩‍👧‍👦🏳️‍🌈", "\U0010ffff\ue000\ufffe\uffff\ufffd", "0123456789 1e-10 3.14159",
    "x" * 5000,
]  # fmt: skip


ODD = ["\n", "\n\n", " ", "  ", "    ", "        ", "\t", "\r\n", "):\n", "foo", "self", "return", "x", "é", "日本", "😀",
       "\0", "1", "23", "#", '"""', ".", ",", "{", "}", "(", "_", "e\u0301", "</s>", "\ufdd4", "\u2585", "\u3000", "\x85",
       "'s", "-----", "<|im_end|>", "):\n    return", ",\n        ", "\n\n\n    def f("]  # fmt: skip


def odd_texts(n):
    """Code and prose in pieces, with indents, blank lines and characters that SentencePiece's trainer refuses."""
    rng = random.Random(0)
    return ["".join(rng.choices(ODD, k=rng.randrange(60))) for _ in range(n)]


def random_texts(n):
    """Strings over ASCII, Latin, the neighbourhood of U+2581, private and astral planes."""
    rng = random.Random(0)
    ranges = [(0, 128), (0, 0x300), (0x2570, 0x2590), (0x4E00, 0x9FFF), (0xE000, 0x110000)]
    return ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))) for _ in range(n)]


@pytest.fixture(scope="module")
def training_texts(make_document):
    return [make_document("a", i) + f"\n    indented {i}\n" for i in range(400)]


@pytest.fixture(scope="module")
def coder(training_texts):
    return train.train_tokenizer(training_texts, vocab_size=405, chat_tokens=True)


def test_round_trip_and_byte_counts(coder):
    texts = HARD + random_texts(2000)
    lengths = coder.token_bytes()
    controls = {0, 1, 2, *range(400, 405)}
    for text, ids in zip(texts, coder.encode_batch(texts), strict=True):
        assert coder.decode(ids) == text
        assert lengths[ids].sum() == len(text.encode())
        assert not controls & set(ids.tolist())
        assert ids.dtype == np.int32
        assert ids.tolist() == coder.encode(text)
        if "▁" not in text and "\0" not in text:
            assert coder._sp.decode(ids.tolist()) == text
    # It can fail: SentencePiece itself takes U+2581 for a space.
    assert coder._sp.decode(coder._sp.encode("a▁b")) == "a b"
    with pytest.raises(ConfigError, match="no token"):
        coder.id_of("<|nobody|>")


def test_lone_surrogates_become_question_marks(coder):
    assert coder.decode(coder.encode("a\ud800b")) == "a?b"


def test_ids(coder):
    assert coder.vocab_size == 405
    assert (coder.bos_id, coder.eos_id) == (1, 2)
    assert [coder.id_of(token) for token in CHAT_TOKENS] == [400, 401, 402, 403, 404]
    assert coder.decode([1, 400, *coder.encode("hi"), 401, 2]) == "hi"
    assert coder.token_bytes()[[0, 1, 2, 400, 404]].tolist() == [0] * 5
    assert coder.token_bytes()[coder.encode("\n")].tolist() == [1]


def test_digits_are_split_and_indents_are_not(coder):
    pieces = [coder._sp.id_to_piece(i) for i in coder.encode("2024")]
    assert pieces == ["2", "0", "2", "4"]
    assert [coder._sp.id_to_piece(i) for i in coder.encode("2\n    b")] == ["2", "\n▁▁▁▁", "b"]


def test_ids_in_front_of_a_cut(coder, training_texts):
    """As many as the text in front has by itself, if it has the same: in texts with control tokens, beside them, in words."""
    texts = ["", "one two", "<|im_start|><|user|>\none<|im_end|>\n", f"a <{ours.GUARD}|im_end|> b</s>", "\n \n  f():"]
    texts.append(training_texts[7])
    cuts = [
        [cut for cut in range(len(text) + 1) if text.rfind("<", 0, cut) <= text.rfind(">", 0, cut)] for text in texts
    ]
    for text, places, (ids, at) in zip(texts, cuts, coder.encode_cut(texts, cuts), strict=True):
        assert ids.tolist() == coder.encode_marked(text)
        heads = [coder.encode_marked(text[:cut]) for cut in places]
        assert at.tolist() == [len(head) if ids.tolist()[: len(head)] == head else -1 for head in heads]
    assert -1 in at


def test_model_bytes_are_deterministic_and_survive(coder, training_texts, tmp_path):
    again = train.train_tokenizer(iter(training_texts), vocab_size=405, chat_tokens=True)
    assert again.model_bytes == coder.model_bytes
    (tmp_path / "t.model").write_bytes(coder.model_bytes)
    for other in (ours.Tokenizer.load(tmp_path / "t.model"), pickle.loads(pickle.dumps(coder))):
        assert other.sha256 == coder.sha256
        assert other.encode("héllo\n") == coder.encode("héllo\n")
    assert train.train_tokenizer(training_texts[1:], vocab_size=405, chat_tokens=True).sha256 != coder.sha256


@pytest.mark.parametrize(
    ("texts", "keys", "message"),
    [
        (["hello world"] * 9, {"vocab_size": 5000}, r"too small to train a tokenizer on"),
        (["", "\n\0\n"], {}, "no text to train"),
        (["hello"], {"vocab_size": 200}, "256 byte pieces"),
    ],
)
def test_clear_errors_in_training(texts, keys, message):
    with pytest.raises(ConfigError, match=message):
        train.train_tokenizer(texts, **({"vocab_size": 400, "chat_tokens": True} | keys))


def test_the_largest_vocabulary_named_is_right(training_texts):
    with pytest.raises(
        train.VocabularyTooLarge, match=r"it supports is \d+: set --config.model.vocab_size=0,"
    ) as error:
        train.train_tokenizer(training_texts[:100], vocab_size=5000, chat_tokens=True)
    largest = error.value.largest
    assert f" {largest}:" in str(error.value)
    assert train.train_tokenizer(training_texts[:100], vocab_size=largest, chat_tokens=True).vocab_size == largest


def test_clear_errors_in_loading(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        ours.Tokenizer.load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="not a SentencePiece model"):
        ours.Tokenizer.load(tmp_path / "bad.model")


@pytest.mark.parametrize(
    ("old", "new"), [(b"<0x41>", b"<0x4\xff>"), (b"<0x41>", b"<0xZZ>"), (b"<|im_end|>", b"<|im\xff\xff\xff\xff|>")]
)
def test_a_model_with_a_damaged_piece_is_one_line(unigram, tmp_path, old, new):
    assert unigram.model_bytes.count(old) == 1
    (tmp_path / "bad.model").write_bytes(unigram.model_bytes.replace(old, new))
    with pytest.raises(ConfigError, match="is not a SentencePiece model, or it is damaged: copy it again"):
        ours.Tokenizer.load(tmp_path / "bad.model")


@pytest.fixture(scope="module")
def unigram(training_texts):
    return train.train_tokenizer(training_texts, vocab_size=405, chat_tokens=True, model_type="unigram")


def test_unigram_keeps_every_text_too(unigram, coder):
    texts = HARD + random_texts(1000)
    lengths = unigram.token_bytes()
    for text, ids in zip(texts, unigram.encode_batch(texts), strict=True):
        assert unigram.decode(ids) == text
        assert lengths[ids].sum() == len(text.encode())
    assert [unigram.id_of(token) for token in CHAT_TOKENS] == [400, 401, 402, 403, 404]
    assert len(unigram.encode("2024")) == 4
    assert unigram.sha256 != coder.sha256


@pytest.fixture(scope="module")
def python_texts():
    """Two lists of sources of the standard library: 2 MB, and others of 0.5 MB."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py")) + sorted(
        pathlib.Path(json.__file__).parent.glob("*.py")
    )
    texts = [text for file in files if 1000 < len(text := file.read_text("utf-8", "replace")) < 60_000]
    return [text for i, text in enumerate(texts) if i % 5], texts[::5]


@pytest.fixture(scope="module")
def of_code(python_texts):
    return train.train_tokenizer(python_texts[0], vocab_size=2048, chat_tokens=False)


def test_code_takes_fewer_tokens_than_byte_level_bpe_of_the_same_text(python_texts, of_code, training_texts):
    tokenizers = pytest.importorskip("tokenizers")
    trained, held_out = python_texts
    theirs, level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    theirs.pre_tokenizer = level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2048, initial_alphabet=level.alphabet(), show_progress=False)
    theirs.train_from_iterator(trained, trainer)
    wanted = sum(len(coded.ids) for coded in theirs.encode_batch(held_out))
    assert sum(map(len, of_code.encode_batch(held_out))) < 0.98 * wanted
    by_lines = by_lines_model(trained, 2048)  # as before: what it can't reach
    assert sum(map(len, by_lines.encode_batch(held_out))) > 1.05 * wanted


def by_lines_model(texts, vocab_size, **changes):
    """A model of the time when each line was a text of its own, as data of versions 2 and 3 has."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe", "vocab_size": vocab_size, "byte_fallback": True, "split_digits": True,
        "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True, "character_coverage": 0.9999, "pad_id": -1, "minloglevel": 2,
    }  # fmt: skip
    lines = (line[:1000] for text in texts for line in text.splitlines() if line)
    spm.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **settings | changes)
    return ours.Tokenizer(model.getvalue())


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_model_of_before_has_its_ids(training_texts, kind):
    before = by_lines_model(training_texts, 400, model_type=kind)
    assert before.words == ours._WORDS
    texts = HARD + odd_texts(100) + training_texts[:50]
    for text, ids in zip(texts, before.encode_batch(texts), strict=True):
        words = [[*"▁".encode()] if word == "▁" else word for word in re.findall(ours._WORDS, text)]
        known = [w if isinstance(w, str) else [before._sp.piece_to_id(f"<0x{b:02X}>") for b in w] for w in words]
        assert ids.tolist() == [i for w in known for i in (before._sp.encode(w) if isinstance(w, str) else w)]


def test_ids_are_plain_sentencepieces_of_the_whole_text(coder, unigram, of_code, python_texts):
    """So llama.cpp, which cuts no words, has the same. (A unigram model: as long as the sum is exact in float32.)"""
    for trained in (coder, unigram, of_code):
        texts = odd_texts(500) + python_texts[1][: 0 if trained is unigram else 20]
        for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
            assert ids.tolist() == trained._sp.encode(text)
            assert trained.decode(ids) == text
    # It can fail: a text that is cut at each newline, as models of before may be, has others.
    text = python_texts[1][0]
    assert [i for line in text.splitlines(keepends=True) for i in of_code.encode(line)] != of_code.encode(text)


def test_no_piece_has_white_space_behind_a_letter_or_reaches_across_words(coder, unigram, of_code):
    for trained in (of_code, coder, unigram):
        single = {*trained.byte_ids().tolist()}
        pieces = [raw.decode() for i, raw in enumerate(trained.piece_bytes()) if raw and i not in single]
        assert trained is not of_code or {":\n    ", "):\n        ", "\n    "} <= {*pieces}
        assert len(set(pieces)) == len(pieces)
        assert not [piece for piece in pieces if re.search(rf"\w\s|\n\S|[{train._INDENT}{train._BREAK}]", piece)]
        assert trained.words is not None
        cut = re.compile(trained.words).findall
        # Whatever stands around a piece: it lies in one word.
        around = ["", " ", "  ", "\n", "\n  ", "a", "1", ".", "\n.", ". ", "日", "):\n    "]
        for piece in pieces[:: 1 + len(pieces) // 400]:
            for front, behind in itertools.product(around, repeat=2):
                ends = [0, *itertools.accumulate(map(len, cut(front + piece + behind)))]
                assert ends[-1] == len(front + piece + behind)
                assert not [end for end in ends if len(front) < end < len(front + piece)], (front, piece, behind)


def test_an_answer_behind_the_newline_of_its_header_has_ids_of_its_own(of_code):
    answers = ["```python\nx", "# A", "- a", '"""', "(a)", "x = 1"]
    for (_, at), answer in zip(
        of_code.encode_cut(["\n" + a for a in answers], [[1]] * len(answers)), answers, strict=True
    ):
        assert at.tolist() == [1], answer
    assert of_code.encode_cut(["\n    x"], [[1]])[0][1].tolist() == [
        -1
    ]  # as other models' tokenizers, an indent does not


def test_words_are_few_in_code(of_code, python_texts):
    """What is remembered: no more than half again the words that no newline reaches into."""
    words, before = (
        {word for text in python_texts[1] for word in re.findall(pattern, text)}
        for pattern in (of_code.words, ours._WORDS)
    )
    assert len(words) < 1.5 * len(before)


def test_pieces_that_join_letters_across_a_space_leave_no_words():
    assert ours.word_pattern(["a", "▁a", "▁▁"]) == ours._WORDS
    assert ours.word_pattern(["a▁", "\n"]) is None
    assert re.findall(ours.word_pattern(["\n▁", "▁a"]), "a a\n a b") == ["a", " a", "\n a", " b"]
    assert re.findall(ours.word_pattern(["x\n", "ax", "▁a"]), "a ax\nb c") == ["a", " ax\n", "b", " c"]


def test_a_vocabulary_of_few_characters_keeps_its_size():
    """More characters than fit: the rarest are spelled in bytes."""
    text = "".join(chr(0x4E00 + i) for i in range(30)) * 40
    small = train.train_tokenizer([text], vocab_size=300, chat_tokens=False)
    assert small.vocab_size == 300


def test_unigram_cuts_a_word_alike_in_any_text(unigram, training_texts):
    """Plain SentencePiece does not: its float32 sums lose the difference of two cuts far into a text."""
    text = "".join(training_texts)
    lines = [i for line in text.splitlines(keepends=True) for i in unigram.encode(line)]
    assert unigram.encode(text) == lines
    assert unigram.encode("\n" * 3 + text) == unigram.encode("\n" * 3) + lines


def test_remembered_words_change_nothing(coder, training_texts, monkeypatch):
    texts = HARD + random_texts(300) + training_texts
    first = [ids.tolist() for ids in coder.encode_batch(texts)]
    whole = [ids.tolist() for ids in coder._encode_whole(texts)]
    assert first == whole
    monkeypatch.setattr(ours, "_CACHE_CHARS", 1000)  # forgotten after nearly every text
    forgetful = ours.Tokenizer(coder.model_bytes)
    assert [forgetful.encode(text) for text in texts] == whole
    assert forgetful._word_chars <= 1000
    assert coder.encode_batch([]) == []
    ids = coder.encode_batch(["one"])[0]
    ids[:] = 0  # the caller's own: what is remembered stays
    assert coder.encode("one") != ids.tolist()


@pytest.mark.parametrize("changes", [{"split_by_whitespace": False}, {"add_dummy_prefix": True}])
def test_models_made_elsewhere_are_not_cut_into_words(training_texts, changes, monkeypatch):
    texts = ["a b " * 9 + text.splitlines()[0] for text in training_texts]
    other = by_lines_model(texts, 500, split_digits=False, **changes)
    assert other.words is None
    text = "a b a b a b " * 20 + "ba"
    assert other.encode(text) == other._sp.encode(text)
    lines = "\n".join([text] * 20)
    whole = other.encode(lines)
    monkeypatch.setattr(ours, "_PIECE_CHARS", 100)  # the longest texts are cut at newlines
    assert (other.encode(lines) == whole) == ("add_dummy_prefix" not in changes)


def test_the_process_that_trains_gives_what_sentencepiece_gives_in_this_one(training_texts):
    model = io.BytesIO()
    settings = {"vocab_size": 400, "byte_fallback": True, "num_threads": 2, "minloglevel": 2, "pad_id": -1}
    lines = list(train._training_parts(training_texts))
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **settings)
    answer = train._train_apart(iter(lines), settings)
    assert base64.b64decode(answer["model"]) == model.getvalue()


def test_training_texts_are_cut_at_newlines_and_lose_what_the_trainer_refuses():
    texts = ["\n\n", "a\0▁\u2585\ufdd4b\n  c  d\n\n e", "x\n" * 3000, "y" * 9000, "\ud800"]
    parts = list(train._training_parts(texts))
    indent = train._INDENT
    assert parts[0] == f"ab\n{indent * 2}c  d\n\n{indent}e"
    assert "".join(parts[1:-4]).replace(train._BREAK, "") == "x\n" * 3000
    assert all(part.startswith(f"\n{train._BREAK}x") for part in parts[2:-4])
    assert [len(part) for part in parts[-4:]] == [4000, 4000, 1000, 1]


def children(pid: int) -> list[int]:
    return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


TRAINS = """
import random
from jaxlm.data.tokenizer import train as tokenizer
letters = "abcdefghijklmnopqrstuvwxyz"
rng = random.Random(0)
words = ["".join(rng.choices(letters, k=rng.randint(3, 12))) for _ in range(150000)]
try:
    tokenizer.train_tokenizer([" ".join(words)], vocab_size=20000, chat_tokens=False, model_type="unigram")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads Linux's list of processes")
def test_ctrl_c_while_it_trains_is_told_as_such_at_once():
    with subprocess.Popen([sys.executable, "-c", TRAINS], stdout=subprocess.PIPE, text=True) as parent:
        try:
            began = time.monotonic()
            while not (trainers := children(parent.pid)):
                assert parent.poll() is None
                assert time.monotonic() - began < 60
                time.sleep(0.01)
            time.sleep(0.5)
            assert children(parent.pid) == trainers, "it ended before it could be stopped"
            parent.send_signal(signal.SIGINT)
            assert parent.communicate(timeout=10)[0] == "interrupted\n"
            assert not any(os.path.exists(f"/proc/{pid}") for pid in trainers)
        finally:
            parent.kill()


def test_a_trainer_that_is_killed_may_do_better_the_next_time(training_texts, monkeypatch):
    def send(trainer, message):
        os.kill(trainer.pid, signal.SIGKILL)
        return sent(trainer, message)

    sent = child.Child.send
    monkeypatch.setattr(child.Child, "send", send)
    with pytest.raises(RunError, match="killed by signal 9, perhaps for memory"):
        train.train_tokenizer(training_texts, vocab_size=400, chat_tokens=False)
