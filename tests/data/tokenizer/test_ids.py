"""One way from texts to ids: what each caller of it gives a model begins with one EOS; and what is shown while ids come."""

import dataclasses
import json
import random
import time
import types

import numpy as np
import pytest
import tiny_data

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.data.batches import replay
from jaxlm.data.chats import chat, examples, masks
from jaxlm.data.shards import build
from jaxlm.data.tokenizer import ids
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.data.tokenizer.stop_strings import Text
from jaxlm.eval import core, humaneval, redteam, samples
from jaxlm.eval import text as eval_text
from jaxlm.serve import guide, requests, talk
from jaxlm.serve.body import Refused


class Twice(Tokenizer):
    """The mutation: what a text begins with stands there twice."""

    def __init__(self, model_bytes: bytes):
        super().__init__(model_bytes)
        self.opening *= 2


class Never(Tokenizer):
    """The mutation: nothing stands in front."""

    def __init__(self, model_bytes: bytes):
        super().__init__(model_bytes)
        self.opening = ()


TEXTS = ["one two three", "", "\n sea", "</s> is no EOS", "moon" * 40]


class Fed(Exception):
    """Ends an entry point where its ids are seen, before a model is needed."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]


def _fed(*_, **__):
    raise Fed(next(rows for rows in (*_, *__.values()) if isinstance(rows, list)))


def from_samples(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(samples.generate, "generate", _fed)
    settings = config.resolve(config_files.load("base", ["data.path=x"])).sample
    with pytest.raises(Fed) as fed:
        samples.continue_prompts(None, {}, coder, TEXTS, settings, 0)
    return fed.value.rows


def from_a_stream_of_samples(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(samples.generate, "asks", _fed)
    settings = config.resolve(config_files.load("base", ["data.path=x"])).sample
    with pytest.raises(Fed) as fed:
        samples.Stream(None, {}, coder, TEXTS, settings, 0)
    return fed.value.rows


def from_the_check_of_prompts(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(samples.engine, "check_prompts", _fed)
    settings = config.resolve(config_files.load("base", ["data.path=x"])).sample
    settings = dataclasses.replace(settings, prompts=tuple(TEXTS))
    model, data = types.SimpleNamespace(config=None), types.SimpleNamespace(tokenizer=lambda: coder)
    with pytest.raises(Fed) as fed:
        samples.make(settings, 0, model, data, tmp_path)
    return fed.value.rows


def from_a_text_of_ones_own(coder, data, tmp_path, monkeypatch):
    rows = []

    class Scores:
        tokenizer, context, opening = coder, 10**6, coder.eos_id + 1

        def score(self, requests, what):
            rows.extend([*context, *scored] for context, scored in requests)
            return [types.SimpleNamespace(logp=-1.0)] * len(requests)

    list(eval_text.results(Scores(), [("a", words) for words in (*TEXTS, *TEXTS) if words], 10**6))
    return rows


def from_the_harness(coder, data, tmp_path, monkeypatch):
    lm_harness = pytest.importorskip("jaxlm.eval.lm_harness")
    model = lm_harness.ScorerLM(types.SimpleNamespace(tokenizer=coder), "a task")
    return [model.tok_encode(text) for text in TEXTS]


def from_conversations(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "template", lambda _: "{% for m in messages %}{{ m.content }}{% endfor %}")
    return [chat.ids(coder, [{"role": "user", "content": text}]) for text in TEXTS]


def from_conversations_of_the_harness(coder, data, tmp_path, monkeypatch):
    lm_harness = pytest.importorskip("jaxlm.eval.lm_harness")
    monkeypatch.setattr(chat, "template", lambda _: "{% for m in messages %}{{ m.content }}{% endfor %}")
    model = lm_harness.ScorerLM(types.SimpleNamespace(tokenizer=coder), "a task", chats=True)
    texts = [model.apply_chat_template([{"role": "user", "content": text}]) for text in TEXTS]
    return [model.tok_encode(text) for text in texts]


def from_examples(coder, data, tmp_path, monkeypatch):
    answer = "{% generation %}x{% endgeneration %}"
    monkeypatch.setattr(chat, "template", lambda _: "{{ messages[0].content }}\n\n" + answer)
    place = examples.Place("a", 1)
    talks = [({"role": "user", "content": text}, {"role": "assistant", "content": "x"}) for text in TEXTS]
    found = masks.masked(coder, [examples.Chat(talk, place) for talk in talks])
    return [one.ids[:-3].tolist() for one in found]


def from_replayed_text(coder, data, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text or "left out"}) + "\n" for text in TEXTS))
    text = replay.open_text(str(tmp_path), coder, text_key="text", val_fraction=1e-9)
    found = text.stream("replay").read(0, text.token_counts()["replay"])
    opens = found == text.separator_id
    return [row.tolist() for row in np.split(found, np.flatnonzero(opens[1:] & ~opens[:-1]) + 1)]


def from_core(coder, data, tmp_path, monkeypatch):
    task = types.SimpleNamespace(kind="language_modeling", fewshot=0, delimiter=" ")
    scorer_of = types.SimpleNamespace(tokenizer=coder)
    texts = [(text.strip() or "x").partition(" ") for text in TEXTS]
    given = [{"context": first, "continuation": rest or "y"} for first, _, rest in texts]
    asked = [core.questions(scorer_of, task, given, number)[0] for number in range(len(given))]
    return [[*context, *scored] for context, scored in asked]


def from_humaneval(coder, data, tmp_path, monkeypatch):
    problems = [{"prompt": text} for text in TEXTS]
    monkeypatch.setattr(humaneval, "read", lambda *_: problems)
    monkeypatch.setattr(humaneval.completions, "complete", _fed)
    with pytest.raises(Fed) as fed:
        humaneval.evaluate(types.SimpleNamespace(tokenizer=coder), "", types.SimpleNamespace(data_dir="x"), 0)
    return fed.value.rows


def _red_team(coder, monkeypatch, part, chats=False):
    prompts = [{"prompt": text} for text in TEXTS]
    entries = {"privacy": prompts, "memorised": prompts, "bias": [{"stereotype": t, "other": t} for t in TEXTS]}
    monkeypatch.setattr(redteam, "read", lambda: entries | {"refusals": ()})
    monkeypatch.setattr(redteam.completions, "continue_ids", _fed)
    asked = types.SimpleNamespace(max_new_tokens=1, temperature=0.0, seed=0)
    fake = types.SimpleNamespace(
        tokenizer=coder, score=_fed, opening=-1, chats=chats
    )  # which stands where a text begins with nothing
    with pytest.raises(Fed) as fed:
        redteam.evaluate(fake, part, types.SimpleNamespace(redteam=asked), 0)
    return fed.value.rows


def from_the_red_team(coder, data, tmp_path, monkeypatch):
    return _red_team(coder, monkeypatch, "privacy")


def from_the_red_team_in_a_chat(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "template", lambda _: "{% for m in messages %}{{ m.content }}{% endfor %}")
    return _red_team(coder, monkeypatch, "privacy", chats=True)


def from_the_pairs_of_the_red_team(coder, data, tmp_path, monkeypatch):
    return [[*context, *scored] for context, scored in _red_team(coder, monkeypatch, "bias")]


def _reader(coder):
    return requests.Reader(coder, coder.vocab_size, 4096, chat.ends(coder), guide.Guides(coder, coder.vocab_size, ()))


def _read(read, bodies):
    """The ids of each body; none where they are refused, since there are none."""
    rows = []
    for body in bodies:
        try:
            rows.append(read(body).asks[0].ids)
        except Refused:
            rows.append(())
    return rows


def from_the_server(coder, data, tmp_path, monkeypatch):
    return _read(_reader(coder).completion, [{"prompt": text} for text in TEXTS])


def from_ids_that_the_server_gets(coder, data, tmp_path, monkeypatch):
    return _read(_reader(coder).completion, [{"prompt": [coder.encode(text)]} for text in TEXTS])


def from_chats_with_the_server(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "template", lambda _: "{% for m in messages %}{{ m.content }}{% endfor %}")
    return _read(_reader(coder).chat, [{"messages": [{"role": "user", "content": text}]} for text in TEXTS])


def from_the_tokens_that_the_server_gives(coder, data, tmp_path, monkeypatch):
    return [_reader(coder).tokenize({"prompt": text}) for text in TEXTS]


def _asked(coder, plain):
    made = talk.Conversation(coder, (), 4096, plain)
    return [made.ids(text, 8) for text in TEXTS]


def from_a_talk(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "template", lambda _: "{% for m in messages %}{{ m.content }}{% endfor %}")
    return _asked(coder, plain=False)


def from_a_talk_in_plain_text(coder, data, tmp_path, monkeypatch):
    return _asked(coder, plain=True)


def from_shards(coder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_tokenizer", lambda *_: coder)
    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=0.3, block_tokens=64)

    def read(source, stats):
        yield from ((str(i), text) for i, text in enumerate([*TEXTS, *(t + "." for t in TEXTS)]))

    made = build.build_data(tmp_path / "d", [build.Source("a", "made", 1)], settings, read=read, log=str)
    rows = []
    for split in ("train", "val"):
        stream = made.stream("a", split)
        for document in made.documents("a", split, 0, stream.tokens):
            rows.append(stream.read(document.start, document.start + document.tokens).tolist())
    return rows


# Every way by which ids come to a model. A reward model's is in tests/commands/test_preferences.py, an export's in
# tests/interop/test_export_parity.py.
ENTRIES = [
    *(from_shards, from_conversations, from_examples, from_replayed_text, from_core, from_humaneval),
    *(from_the_harness, from_conversations_of_the_harness),
    *(from_the_red_team, from_the_red_team_in_a_chat, from_the_pairs_of_the_red_team),
    *(from_samples, from_a_stream_of_samples, from_the_check_of_prompts, from_a_text_of_ones_own),
    *(from_a_talk, from_a_talk_in_plain_text),
    *(from_the_server, from_ids_that_the_server_gets),
    *(from_chats_with_the_server, from_the_tokens_that_the_server_gives),
]
EMPTY = {from_replayed_text: {""}, from_a_text_of_ones_own: {""}}  # of files, texts of nothing are left out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0})


def opened_once(rows: list[list[int]], eos_id: int) -> bool:
    return all([*row[:1]] == [eos_id] and row.count(eos_id) == 1 for row in rows)


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_puts_one_eos_in_front(entry, data, tmp_path, monkeypatch):
    coder = data.tokenizer()
    rows = entry(coder, data, tmp_path, monkeypatch)
    assert len(rows) >= len(TEXTS)
    assert opened_once(rows, coder.eos_id)
    texts = {coder.decode(row) for row in rows}
    assert texts >= set(TEXTS) - EMPTY.get(entry, set()) or entry is from_core  # which strips them


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("wrong", [Twice, Never])
def test_the_comparison_can_fail(entry, wrong, data, tmp_path, monkeypatch):
    """Nobody puts an EOS of their own there. Shards begin each document with the separator, whatever opens a text."""
    coder = wrong(data.tokenizer().model_bytes)
    rows = entry(coder, data, tmp_path, monkeypatch)
    assert opened_once(rows, coder.eos_id) == (entry in (from_shards, from_replayed_text) and wrong is Never)


class Imported(Tokenizer):
    """A tokenizer as others have it, with BOS in front of a text."""

    def __init__(self, model_bytes: bytes):
        super().__init__(model_bytes)
        self.opening, self.separator_id = (self.bos_id,), self.bos_id


def test_what_opens_a_text_and_what_parts_documents_may_differ(data):
    own = data.tokenizer()
    bos, eos = own.bos_id, own.eos_id
    text = own.encode("sun")

    def made(coder, **fields):
        vars(coder).update(fields)
        (row,) = ids.training_documents(coder, ["sun"])
        assert row.dtype == np.int32
        return row.tolist(), ids.document(coder, "sun")

    assert made(own) == ([eos, *text], [eos, *text])
    assert made(Imported(own.model_bytes)) == ([bos, *text, eos], [bos, *text])
    assert made(Never(own.model_bytes)) == ([eos, *text], text)
    assert made(Never(own.model_bytes), opening=(bos,)) == ([eos, bos, *text], [bos, *text])


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
