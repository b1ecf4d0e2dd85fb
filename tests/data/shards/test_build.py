"""From sources to a data directory, in an order that does not depend on the memory."""

import dataclasses
import hashlib
import itertools
import json
import random
import shutil

import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.data.shards import build, shards, vocabulary
from jaxlm.data.shards.shuffle import Shuffle
from jaxlm.host import files


def listing(path):
    return {
        p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def texts(data, source, split):
    tokens = data.stream(source, split).read(0, data.entry(source, split)["tokens"])
    begins = np.flatnonzero(tokens == data.separator_id)
    assert begins[0] == 0
    coder = data.tokenizer()
    return [coder.decode(part[1:]) for part in np.split(tokens, begins[1:])]


def test_every_document_is_there_once_and_exact(data, corpus):
    for source in corpus.sources:
        raw = [json.loads(line)["text"] for line in open(source.spec)]
        train, val = texts(data, source.name, "train"), texts(data, source.name, "val")
        assert sorted(train + val) == sorted(raw)
        assert 0.03 < len(val) / len(raw) < 0.25
        assert train != [t for t in raw if t in set(train)]  # shuffled
        entries = data.manifest["sources"][source.name]
        assert entries["train"]["bytes"] + entries["val"]["bytes"] == sum(len(t.encode()) for t in raw)
        assert entries["train"]["documents"] == len(train)


def test_two_builds_are_equal_to_the_byte(data, corpus, tmp_path):
    again = corpus.build(tmp_path / "again")
    assert listing(again.path) == listing(data.path)
    other = corpus.build(tmp_path / "other", seed=1)
    assert other.manifest["sources"] != data.manifest["sources"]


def test_weights_may_change_without_a_rebuild(corpus, tmp_path):
    corpus.build(tmp_path / "d")
    sources = tuple(dataclasses.replace(s, weight=1) for s in corpus.sources)
    dataclasses.replace(corpus, sources=sources).build(tmp_path / "d")


def test_another_recipe_is_refused_and_named(corpus, tmp_path):
    corpus.build(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"built with vocab_size = 325, now it is 330; set another --config.data.dir"):
        corpus.build(tmp_path / "d", vocab_size=330)
    fewer = dataclasses.replace(corpus, sources=corpus.sources[:2])
    with pytest.raises(ConfigError, match=r"source code = .*now it is nothing"):
        fewer.build(tmp_path / "d")


@pytest.mark.parametrize("version", ["2", "3"])
def test_older_data_is_used_as_it_is_and_another_version_is_refused(corpus, tmp_path, version):
    """2: EOS behind each document: `tests/train/test_older_checkpoints.py` trains on what the code of that time made."""
    path = corpus.build(tmp_path / "d").path / shards.MANIFEST
    manifest = json.loads(path.read_text())
    assert manifest["recipe"]["version"] == "4"
    manifest["recipe"]["version"] = version
    if version == "2":
        del manifest["tokenizer"]["separator_id"]
    path.write_text(json.dumps(manifest))
    again = corpus.build(tmp_path / "d")
    assert (again.manifest["recipe"]["version"], again.separator_id) == (version, again.eos_id)
    manifest["recipe"]["version"] = "1"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="version = 1, now it is 4"):
        corpus.build(tmp_path / "d")


@pytest.mark.parametrize(("chat_tokens", "most"), [(True, 512), (False, 64_000)])
def test_a_size_that_is_left_open_is_chosen_and_then_is_the_datas(corpus, tmp_path, monkeypatch, chat_tokens, most):
    """10 kB support some 400 ids: below the least that is chosen."""
    monkeypatch.setattr(vocabulary, "LEAST", 325)
    monkeypatch.setattr(vocabulary, "MOST", most)
    monkeypatch.setattr(vocabulary, "BYTES_PER_ID", 20 if most == 512 else 1)
    first = corpus.build(tmp_path / "d", vocab_size=0, chat_tokens=chat_tokens)
    if most == 512:
        assert first.vocab_size == 512
    else:
        assert 400 < first.vocab_size < 5000  # the most that SentencePiece finds in it
    again = corpus.build(tmp_path / "d", vocab_size=0, chat_tokens=chat_tokens)
    same = corpus.build(tmp_path / "d", vocab_size=first.vocab_size, chat_tokens=chat_tokens)
    assert first.sha256 == again.sha256 == same.sha256
    with pytest.raises(ConfigError, match=f"vocab_size = {first.vocab_size}, now it is 330"):
        corpus.build(tmp_path / "d", vocab_size=330, chat_tokens=chat_tokens)


def test_a_crash_leaves_no_manifest_and_the_next_run_starts_anew(corpus, data, tmp_path, monkeypatch):
    original, calls = build._write_source, []

    def crash_at_the_last_source(root, name, *rest):
        calls.append(name)
        if len(calls) == 3:
            raise OSError("disk full")
        return original(root, name, *rest)

    monkeypatch.setattr(build, "_write_source", crash_at_the_last_source)
    with pytest.raises(OSError, match="disk full"):
        corpus.build(tmp_path / "d")
    assert not (tmp_path / "d" / shards.MANIFEST).exists()
    (tmp_path / "d" / "train" / "prose" / "00099.array_record").write_bytes(b"left over")
    (tmp_path / "d" / "mine.txt").write_text("not jaxlm's")
    monkeypatch.undo()
    corpus.build(tmp_path / "d")
    assert (tmp_path / "d" / "mine.txt").exists()
    assert {k: v for k, v in listing(tmp_path / "d").items() if k != "mine.txt"} == listing(data.path)


def test_duplicates_fall_on_one_side(tmp_path, make_document):
    raw = [make_document("a", i % 40) for i in range(400)]

    def read(source, stats):
        return ((f"{i}", text.replace(" ", " " * (1 + i % 3))) for i, text in enumerate(raw))

    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=0.2)
    data = build.build_data(
        tmp_path, [build.Source("a", "made", 1)], settings, read=read, log=str, recipe_extra={"r": 1}
    )
    train, val = ({" ".join(t.split()) for t in texts(data, "a", split)} for split in shards.SPLITS)
    assert train
    assert val
    assert not train & val


def test_records_without_text_are_counted_in_the_manifest(tmp_path, make_document):
    rows = [{"text": make_document("a", i)} for i in range(40)]
    lines = [*map(json.dumps, [{"text": ""}, *rows, {"other": 1}]), "no JSON"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = build.Source("a", str(tmp_path / "a.jsonl"), 1)
    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=0.2)
    data = build.build_data(tmp_path / "data", [source], settings, log=str)
    read = data.manifest["sources"]["a"]["read"]
    assert read["documents"] == 40
    assert sum(read["skipped"].values()) == 3


def sources_of(**texts_of):
    """Sources read from lists."""
    listed = [build.Source(name, "made", 1) for name in texts_of]
    return listed, lambda source, stats: ((f"{source.name}{i}", t) for i, t in enumerate(texts_of[source.name]))


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_at_least_one_document_on_each_side(tmp_path, fraction, make_document):
    parts = ["\n".join(make_document("a", 100 * i + j) for j in range(60)) for i in range(5)]
    listed, read = sources_of(a=parts)
    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=fraction)
    data = build.build_data(tmp_path, listed, settings, read=read, log=str)
    assert data.entry("a", "train")["documents"] >= 1
    assert data.entry("a", "val")["documents"] >= 1


@pytest.mark.parametrize(("length", "longest", "few"), [(40, 40, False), (40, 4000, True), (1, 1, True)])
def test_held_out_text_that_is_too_little_to_judge_by_is_said(tmp_path, make_document, length, longest, few):
    """One document of 20 is as long as the others, or longer than all of them; a short one is held out, or all are short."""
    parts = ["\n".join(make_document("a", 100 * i + j) for j in range(length)) for i in range(19)]
    listed, read = sources_of(a=[*parts, "\n".join(make_document("a", 10_000 + i) for i in range(longest))])
    said = []
    settings = build.BuildSettings(300, False, val_fraction=0.05)
    build.build_data(tmp_path, listed, settings, read=read, log=said.append)
    wrote = next(line for line in said if line.startswith("wrote a"))
    assert ("held out, too few to judge by (a larger --config.data.val_fraction holds out more);" in wrote) == few


def test_held_out_text_that_is_most_of_a_source_is_said(tmp_path, make_document):
    """Of 20 documents the long one is held out."""
    for seed in range(40):  # until the split takes it
        long = "\n".join(make_document("a", 100 + i) for i in range(400))
        listed, read = sources_of(a=[*(make_document("a", i) for i in range(19)), long])
        said, settings = [], build.BuildSettings(300, False, seed=seed, val_fraction=0.05)
        data = build.build_data(tmp_path / str(seed), listed, settings, read=read, log=said.append)
        wrote = next(line for line in said if line.startswith("wrote a"))
        large = data.entry("a", "val")["tokens"] > data.entry("a", "train")["tokens"]
        assert ("held out, far more than 5%: this source has few documents, and long ones;" in wrote) == large
        if large:
            return
    raise AssertionError("no seed holds the long document out")


def test_one_document_cannot_be_split(tmp_path):
    listed, read = sources_of(a=["alone"] * 3)
    with pytest.raises(ConfigError, match="'a' has only one document, or copies of one"):
        build.build_data(tmp_path, listed, build.BuildSettings(300, False), read=read, log=str)

    def read_one(source, stats):
        stats.skip("no field 'text'", "bad.jsonl:2")
        yield from read(source, stats)

    with pytest.raises(ConfigError, match=r"skipped 1: no field 'text' \(first: bad.jsonl:2"):
        build.build_data(tmp_path, listed, build.BuildSettings(300, False), read=read_one, log=str)
    listed, read = sources_of(a=[])
    with pytest.raises(ConfigError, match="'a' gave no document"):
        build.build_data(tmp_path, listed, build.BuildSettings(300, False), read=read, log=str)


def test_a_given_tokenizer_is_used(corpus, data, tmp_path):
    model = str(data.path / "tokenizer.model")
    built = corpus.build(tmp_path / "d", tokenizer_path=model)
    assert built.manifest["tokenizer"] == data.manifest["tokenizer"]
    assert corpus.build(tmp_path / "open", tokenizer_path=model, vocab_size=0).vocab_size == 325
    assert built.manifest["sources"]["code"]["train"]["shards"] == data.manifest["sources"]["code"]["train"]["shards"]
    assert corpus.build(data.path, tokenizer_path=model).sha256 == data.sha256  # a run trained on it is trained on
    with pytest.raises(ConfigError, match="has 325 ids, not 400"):
        corpus.build(tmp_path / "e", tokenizer_path=model, vocab_size=400)
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        corpus.build(tmp_path / "e", tokenizer_path=str(tmp_path / "none.model"))


def test_the_tokenizer_sees_nothing_held_out_and_each_source_by_weight(tmp_path, monkeypatch, make_document):
    texts_of = {name: [make_document(name, i) for i in range(400)] for name in ("a", "b")}
    listed, read = sources_of(**texts_of)
    listed = [dataclasses.replace(s, weight=w) for s, w in zip(listed, (3, 1), strict=True)]
    seen, original = [], build.train_tokenizer
    monkeypatch.setattr(
        build, "train_tokenizer", lambda sample, **kw: original(seen.extend(sample) or list(seen), **kw)
    )
    settings = build.BuildSettings(300, False, val_fraction=0.3, tokenizer_sample_bytes=8000)
    data = build.build_data(tmp_path, listed, settings, read=read, log=str)
    assert 6000 <= sum(len(t) for t in seen if t[0] == "a") <= 6200
    assert 2000 <= sum(len(t) for t in seen if t[0] == "b") <= 2200
    assert not set(seen) & set(texts(data, "a", "val") + texts(data, "b", "val"))


def test_weights_of_zero_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="every mixture weight is 0"):
        build.build_data(tmp_path / "d", [build.Source("a", "made", 0)], build.BuildSettings(300, False), log=str)
    assert not (tmp_path / "d").exists()


def test_two_builders_do_not_meet(corpus, tmp_path):
    (tmp_path / "d").mkdir()
    with (
        files.lock(tmp_path / "d", "is writing", "config.data.dir"),
        pytest.raises(ConfigError, match="another process is writing"),
    ):
        corpus.build(tmp_path / "d")


def test_the_same_place_by_another_path_is_the_same_data(tmp_path, make_document, monkeypatch):
    raw = tmp_path / "raw"
    raw.mkdir()
    for i in range(40):
        (raw / f"{i}.txt").write_text(make_document("a", i))
    settings = build.BuildSettings(vocab_size=300, chat_tokens=False)

    def make(spec):
        return build.build_data(tmp_path / "d", [build.Source("a", str(spec), 1)], settings, log=str).sha256

    monkeypatch.chdir(tmp_path)
    assert make("raw") == make(raw) == make(f"{raw}/../raw")
    other = shutil.copytree(raw, tmp_path / "other")
    (other / "0.txt").write_text((raw / "0.txt").read_text()[::-1])  # the same names and sizes, another text
    with pytest.raises(ConfigError, match="was built with source a = raw"):
        make(other)
    (raw / "more.txt").write_text("another document")
    with pytest.raises(ConfigError, match="was built from files of a, which are not the same now"):
        make(raw)
    # Gone files count as unchanged only under the name that they had: another name may be a typing error.
    raw.rename(tmp_path / "elsewhere")
    make("raw")
    with pytest.raises(ConfigError, match="was built with source a = raw"):
        make("rwa")


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr(build, "_TASK_BYTES", 2000)
    monkeypatch.setattr(build, "_BATCH_BYTES", 500)


def test_tasks_give_the_same_bytes_as_one_process(corpus, data, tmp_path, small_tasks):
    tasks = []

    def run(folder, phase, function, count):
        assert (phase, function) == ("encode", "jaxlm.data.shards.build.encode")
        for task in reversed(range(count)):  # in any order
            build.encode(folder, task)
            tasks.append(task)

    built = corpus.build(tmp_path / "d", engine=run)
    assert len(tasks) > 2 * len(corpus.sources)
    assert listing(built.path) == listing(data.path)
    assert built.manifest == data.manifest


def test_a_source_may_be_called_as_a_folder_of_the_work(tmp_path, small_tasks, make_document):
    listed, read = sources_of(
        documents=[make_document("a", i) for i in range(60)], encoded=["one text", "another", "a third"]
    )
    data = build.build_data(tmp_path, listed, build.BuildSettings(300, False), read=read, log=str)
    assert data.entry("documents", "train")["documents"] + data.entry("documents", "val")["documents"] == 60
    assert data.entry("encoded", "train")["documents"] + data.entry("encoded", "val")["documents"] == 3


@pytest.mark.parametrize("phase", ["read", "encode", "write"])
def test_what_was_done_before_a_crash_is_not_done_again(corpus, data, tmp_path, small_tasks, monkeypatch, phase):
    calls = {name: [] for name in ("iterate_documents", "_encoded", "_write_source", "train_tokenizer")}
    crash = {"read": ("iterate_documents", 1), "encode": ("_encoded", 3), "write": ("_write_source", 1)}[phase]

    def counted(name, original):
        def call(*args, **settings):
            if crash and (name, len(calls[name])) == crash:
                raise OSError("disk full")
            value = original(*args, **settings)
            calls[name].append(value)
            return value

        monkeypatch.setattr(build, name, call)

    tasks = 0

    def in_turn(folder, phase, function, count):
        nonlocal tasks
        tasks = count
        build._in_turn(folder, phase, function, count)

    for name in calls:
        counted(name, getattr(build, name))
    with pytest.raises(OSError, match="disk full"):
        corpus.build(tmp_path / "d", engine=in_turn)
    crash = None
    built = corpus.build(tmp_path / "d", engine=in_turn)
    assert listing(built.path) == listing(data.path)
    sources = len(corpus.sources)
    done = {name: len(values) for name, values in calls.items()}
    assert done["iterate_documents"] == sources
    assert done["train_tokenizer"] == 1
    assert done["_encoded"] == tasks
    assert done["_write_source"] == sources + (phase == "write")


DOCUMENTS = [(f"id{i}é", "text " * (i % 50) + str(i), i * 7919) for i in range(1500)]


def shuffled(path, memory_bytes, key="k", documents=DOCUMENTS):
    shuffle = Shuffle(path, key, memory_bytes)
    for document in documents:
        shuffle.add(*document)
    assert shuffle.documents == len(documents)
    once, again = list(shuffle), list(shuffle)
    assert once == again
    return shuffle, [(doc_id, raw.decode(), content) for doc_id, raw, content in once]


@pytest.mark.parametrize("memory_bytes", [1 << 30, 100_000, 2_000])
def test_the_order_does_not_depend_on_the_memory(tmp_path, memory_bytes):
    shuffle, order = shuffled(tmp_path / "s", memory_bytes)
    assert sorted(order) == sorted(DOCUMENTS)
    assert order == shuffled(tmp_path / "whole", 1 << 30)[1]
    assert (tmp_path / "s").exists() == (memory_bytes < 1 << 20)
    shuffle.close()
    assert not (tmp_path / "s").exists()


def test_it_shuffles_and_the_key_matters(tmp_path):
    one, two = (shuffled(tmp_path / key, 1 << 30, key)[1] for key in "ab")
    assert one != two
    places = [content // 7919 for _, _, content in one]
    mean = sum(abs(place - i) for i, place in enumerate(places)) / len(places)
    assert mean == pytest.approx(len(places) / 3, rel=0.05)  # as of a random permutation
    descents = sum(a > b for a, b in itertools.pairwise(places))
    assert descents == pytest.approx(len(places) / 2, rel=0.05)


def test_what_a_killed_process_left_of_a_bucket_is_not_read(tmp_path):
    shuffle, order = shuffled(tmp_path / "s", 2_000)
    for place in sorted((tmp_path / "s").iterdir()):  # a process was killed between two buckets
        (tmp_path / "s" / f"{place.name}.split").mkdir(exist_ok=True)
        for inner in range(64):
            (tmp_path / "s" / f"{place.name}.split" / f"{inner:02d}").write_bytes(place.read_bytes()[:200])
    assert [(a, b.decode(), c) for a, b, c in shuffle] == order


def test_an_abandoned_iteration_leaves_the_next_one_whole(tmp_path):
    shuffle, order = shuffled(tmp_path / "s", 2_000)
    for _ in range(3):
        iterator = iter(shuffle)
        for _ in range(random.Random(0).randint(1, 500)):
            next(iterator)
        iterator.close()
    assert [(a, b.decode(), c) for a, b, c in shuffle] == order
