"""Finding strings in shards, taking the documents out, and the new data that is left."""

import hashlib
import itertools
import json
import random
import re
import shutil

import numpy as np
import pytest
import tiny_data

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.corpus import lists
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import make_data
from jaxlm.data.shards import build, removal, search, shards
from jaxlm.data.shards.manifest import PARENT
from jaxlm.data.shards.mixture import Final


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 3.0, "b": 1.0})


def texts(data) -> dict[tuple[str, str, str], bytes]:
    """(source, split, doc_id) -> the document's text, decoded one by one."""
    coder, out = data.tokenizer(), {}
    for split in shards.SPLITS:
        for source in data.sources:
            stream = data.stream(source, split)
            for each in data.documents(source, split, 0, stream.tokens):
                ids = stream.read(each.start, each.start + each.tokens).tolist()
                out[source, split, each.doc_id] = coder.decode([i for i in ids if i != data.separator_id]).encode()
    return out


def find(data, pattern: bytes | str) -> list[search.Match]:
    return list(search.matches(search.texts(data), data.decoder(), re.compile(pattern), lambda done: None))


def copies(data, text: bytes) -> list[search.Copy]:
    return search.copies(search.texts(data), data.decoder(), text, lambda done: None)


@pytest.mark.parametrize("at_once", [1 << 22, 100])
def test_it_finds_what_a_plain_scan_finds(data, monkeypatch, at_once):
    monkeypatch.setattr(search, "_AT_ONCE", at_once)
    everything, rng = texts(data), random.Random(0)
    for _ in range(60):
        text = rng.choice(list(everything.values()))
        begin = rng.randrange(len(text) - 3)
        needle = text[begin : begin + rng.randint(3, 40)]  # most begin and end inside a token
        want = {key: text.count(needle) for key, text in everything.items() if needle in text}
        found = {(m.source, m.split, m.doc_id): m.times for m in find(data, re.escape(needle))}
        assert found == want


@pytest.mark.parametrize("pattern", ["^[a-z]+", r"[a-z.]+$", r"(?<=\.)[a-z]", r"(?<![a-z.])s", r"\bsea\b", "[é]|moon"])
def test_a_pattern_sees_one_document_alone(data, pattern):
    want = {key for key, text in texts(data).items() if re.search(pattern, text.decode())}
    assert {(m.source, m.split, m.doc_id) for m in find(data, pattern)} == want


def test_nothing_is_found_across_two_documents(data):
    texts_of_a = [text for key, text in texts(data).items() if key[:2] == ("a", "train")]
    joined = [(one[-12:] + two[:12]) for one, two in itertools.pairwise(texts_of_a)]
    assert not any(find(data, re.escape(needle)) for needle in joined if not any(needle in text for text in texts_of_a))


@pytest.mark.parametrize("passed_over", [(), ((2, 3), (7, 7))])
@pytest.mark.parametrize("final", [None, Final({"a": 1.0, "b": 3.0}, 0.4, 50)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_steps_are_those_of_a_walk(data, passed_over, final, batch_size):
    order = document_rows.Rows(data, data.mixture, 5, 16, batch_size, passed_over, final)
    done = 50
    seen: dict[tuple[str, str], set[int]] = {}
    for step in range(1, done + 1):
        for row in document_rows.describe_batch(order, step - 1, 0):
            seen.setdefault((row.source, row.document), set()).add(step)
    assert max(len(steps) for steps in seen.values()) > 2  # several rows, or epochs
    for source in data.sources:
        for each in data.documents(source, "train", 0, data.stream(source).tokens):
            steps = document_rows.steps_of(order, source, each.start, each.tokens, done)
            assert steps == sorted(seen.get((source, each.doc_id), ()))


def test_the_inverse_of_a_permutation():
    for n in (2, 3, 17, 1000):
        positions = np.arange(n)
        assert np.array_equal(
            document_rows.permute(document_rows.permute(positions, n, "k"), n, "k", inverse=True), positions
        )


def test_without_a_list_all_others_stay_in_their_order(data, tmp_path):
    found = find(data, rb"red green|sea sea")
    assert {match.split for match in found} == {"train", "val"}
    removal.write(tmp_path / "list.jsonl", found, "red green")
    said = []
    removal.without(data, tmp_path / "list.jsonl", tmp_path / "new", False, lambda done: None, said.append)
    assert re.match(r"kept: \d held-out document", said[0])
    new = shards.open_data(tmp_path / "new")
    gone = {(match.source, match.split, match.doc_id) for match in found if match.split == "train"}
    assert gone
    assert texts(new) == {key: text for key, text in texts(data).items() if key not in gone}
    assert list(texts(new)) == [key for key in texts(data) if key not in gone]
    for name in ("tokenizer.model", "token_bytes.npy"):
        assert (new.path / name).read_bytes() == (data.path / name).read_bytes()
    assert new.manifest["recipe"] == data.manifest["recipe"]
    assert new.held_out_texts() == data.held_out_texts()
    listed = hashlib.sha256((tmp_path / "list.jsonl").read_bytes()).hexdigest()
    assert new.manifest[PARENT] == {"sha256": data.sha256, "without": len(gone), "list": listed}
    assert (new.path / removal.LIST).read_bytes() == (tmp_path / "list.jsonl").read_bytes()
    assert {match.split for match in find(new, rb"red green|sea sea")} == {"val"}
    with pytest.raises(ConfigError, match="no version is overwritten"):
        removal.without(data, tmp_path / "list.jsonl", tmp_path / "new", False, lambda done: None, said.append)
    removal.without(data, tmp_path / "list.jsonl", tmp_path / "less", True, lambda done: None, said.append)
    less = shards.open_data(tmp_path / "less")
    assert not find(less, rb"red green|sea sea")
    assert less.held_out_texts() != data.held_out_texts()


def test_a_list_of_other_data_removes_nothing(data, tmp_path):
    path = tmp_path / "list.jsonl"
    removal.write(path, find(data, b"red green"), "red green")
    with pytest.raises(ConfigError, match="exists: name another file"):
        removal.write(path, [], "")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["sha256"] = "0" * 64
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=rf"not in .*: 1 of the list's {len(rows)} documents, .*nothing was removed"):
        removal.without(data, path, tmp_path / "new", False, lambda done: None, lambda line: None)
    assert not (tmp_path / "new").exists()
    path.write_text(json.dumps({"source": "a"}) + "\n")
    with pytest.raises(ConfigError, match="line 1, is no JSON object with source, split"):
        lists.read(path, "--without")


@pytest.mark.parametrize(
    ("split", "held_out", "message"),
    [
        ("train", False, "takes all training documents of b: take its lines out"),
        ("val", True, "takes all held-out documents of b"),
        ("val", False, "are held out: none would go"),
    ],
)
def test_a_list_that_leaves_or_takes_nothing_is_refused(data, tmp_path, split, held_out, message):
    of_b = [match for match in find(data, b".") if (match.source, match.split) == ("b", split)]
    removal.write(tmp_path / "all.jsonl", of_b, "all")
    with pytest.raises(ConfigError, match=message):
        removal.without(data, tmp_path / "all.jsonl", tmp_path / "new", held_out, lambda done: None, lambda line: None)
    assert not (tmp_path / "new").exists()


def test_of_equal_ids_only_the_listed_text_goes_and_all_its_copies(tmp_path):
    rng = random.Random(0)
    plain = [" ".join(rng.choices(tiny_data.WORDS.split(), k=20)) for _ in range(80)]

    def read(source, stats):
        stats.documents += 1
        yield from ((f"plain:{i}", text) for i, text in enumerate(plain))
        yield from (("same", f"zebra {kind} is one") for kind in ["red", "blue", "green", "red"])

    settings = build.BuildSettings(vocab_size=300, chat_tokens=False, val_fraction=0.01, block_tokens=16)
    made = build.build_data(
        tmp_path / "d", [build.Source("s", "test:s", 1.0)], settings, read=read, log=lambda line: None
    )
    red = find(made, b"zebra red")
    assert [match.split for match in red] == ["train"] * 2
    removal.write(tmp_path / "list.jsonl", red[:1], "red")
    removal.without(made, tmp_path / "list.jsonl", tmp_path / "new", False, lambda done: None, lambda line: None)
    new = shards.open_data(tmp_path / "new")
    assert sorted(match.excerpt for match in find(new, b"zebra [a-z]+")) == ["zebra blue is one", "zebra green is one"]
    assert new.manifest[PARENT]["without"] == 2
    assert new.entry("s", "train")["documents"] == made.entry("s", "train")["documents"] - 2


def test_an_unfinished_folder_is_never_filled_from_the_sources(data, tmp_path):
    removal.write(tmp_path / "list.jsonl", find(data, b"red green"), "red green")

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        removal.without(data, tmp_path / "list.jsonl", tmp_path / "new", False, stop, lambda line: None)
    c = config.resolve(config_files.load("quickstart", [f"data.dir={tmp_path / 'new'}"]))
    with pytest.raises(ConfigError, match="new is unfinished: run the same jaxlm tokenize --without again"):
        make_data(c.data, c.prepare, c.engine, 0, print)
    removal.without(data, tmp_path / "list.jsonl", tmp_path / "new", False, lambda done: None, lambda line: None)
    said = []
    make_data(c.data, c.prepare, c.engine, 0, said.append)
    assert "is complete: another folder's without" in said[0]
    shard = next((tmp_path / "new/train/a").glob("*.array_record"))
    shard.unlink()
    with pytest.raises(
        ConfigError, match=r"delete .*new and make it again: jaxlm tokenize its parent's folder --without"
    ):
        shards.open_data(tmp_path / "new")


def test_a_list_edited_by_hand(data, tmp_path):
    found = find(data, b"red green")
    removal.write(tmp_path / "plain", found, "red green")
    raw, path = (tmp_path / "plain").read_bytes(), tmp_path / "list.jsonl"
    lines = raw.splitlines()
    other_keys = b"".join(line[:-1] + b', "mine": [1]}\n' for line in lines)
    for edited in (b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), raw + b"\n \n" + raw, raw[:-1], other_keys):
        path.write_bytes(edited)
        assert lists.read(path, "--without") == lists.read(tmp_path / "plain", "--without")
    for edited in (b"", b"\n\n", b"\xef\xbb\xbf"):
        path.write_bytes(edited)
        with pytest.raises(ConfigError, match=r"list.jsonl names no document"):
            lists.read(path, "--without")
    no_hash = lines[1].replace(b'"sha256"', b'"sha"')
    for edited in (b"# mine", b"[" + lines[1] + b"]", lines[1][:-9], no_hash):
        path.write_bytes(lines[0] + b"\n" + edited)
        with pytest.raises(ConfigError, match=r"line 2, is no JSON object with source, split, doc_id, sha256: make"):
            lists.read(path, "--without")


def test_a_folder_with_other_files_is_refused(data, tmp_path):
    removal.write(tmp_path / "list.jsonl", find(data, b"red green"), "red green")
    arguments = data, tmp_path / "list.jsonl", tmp_path / "out", False, lambda done: None, lambda line: None
    for names in (["config.json", removal.LIST], ["notes.txt"], ["train"]):
        for name in names:
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / name).touch()
        with pytest.raises(ConfigError, match=f"out holds other files, such as {names[0]}: name a new folder by --out"):
            removal.without(*arguments)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {*names}
        shutil.rmtree(tmp_path / "out")
    (tmp_path / "out/train/a").mkdir(parents=True)  # as a kill leaves it
    (tmp_path / "out/train/a/00000.array_record.tmp").touch()
    (tmp_path / "out" / removal.LIST).touch()
    removal.without(*arguments)
    assert shards.open_data(tmp_path / "out").sources == data.sources
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_data_that_another_process_finished_meanwhile_stays(data, tmp_path, monkeypatch):
    removal.write(tmp_path / "list.jsonl", find(data, b"red green"), "red green")
    arguments = data, tmp_path / "list.jsonl", tmp_path / "new", False, lambda done: None, lambda line: None
    places = removal.places
    removal.without(*arguments)
    (tmp_path / "new").rename(tmp_path / "made")
    monkeypatch.setattr(
        removal, "places", lambda *given: (tmp_path / "made").rename(tmp_path / "new") and places(*given)
    )
    with pytest.raises(ConfigError, match="new holds data"):
        removal.without(*arguments)
    assert shards.open_data(tmp_path / "new").sources == data.sources


@pytest.mark.parametrize("at_once", [1 << 22, 100])
def test_what_a_text_copies_is_found_exactly(data, monkeypatch, at_once):
    monkeypatch.setattr(search, "_AT_ONCE", at_once)
    everything, rng = texts(data), random.Random(1)
    for _ in range(20):
        document = rng.choice([content for content in everything.values() if len(content) > 90])
        begin = rng.randrange(len(document) - 64)
        length = rng.choice([63, 64, 80, len(document) - begin])
        stretch = document[begin : begin + length]
        text = b"#" * rng.randint(0, 40) + stretch + b"#" * 90
        found = copies(data, text)
        holders = {other for other, content in everything.items() if stretch in content}
        if len(stretch) < 64:
            assert not found
            continue
        assert (text[found[0].start :][: found[0].length], found[0].documents) == (stretch, len(holders))
        assert (found[0].source, found[0].split, found[0].doc_id) in holders
        assert len(found) == 1
    dashes = b"-" * 4000 + b" end"  # in quadratic time it would take minutes
    assert copies(data, dashes) == []
    joined = b"".join(list(everything.values())[:2])  # two documents are two copies
    assert [copy.length for copy in copies(data, joined)] == sorted(
        (len(text) for text in list(everything.values())[:2] if len(text) >= 64), reverse=True
    )


def test_texts_looked_up_together_are_found_as_each_alone(data):
    long = [text for text in texts(data).values() if len(text) > 100]
    apart = [long[0][:40] * 100 + long[0], b"", long[0][:40] * 100 + long[1] + long[0], long[2][:63], long[1], long[0]]
    together, begin = copies(data, search.BETWEEN.join(apart)), 0
    for text in apart:
        own = [copy for copy in together if begin <= copy.start and copy.end <= begin + len(text)]
        alone = copies(data, text)
        assert [(copy.start - begin, copy.length, copy.documents) for copy in own] == [
            (copy.start, copy.length, copy.documents) for copy in alone
        ]
        begin += len(text) + 1
    assert sum(map(len, map(copies, [data] * len(apart), apart))) == len(together) > 4
