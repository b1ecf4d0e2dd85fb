"""Writing, opening, checking and reading token streams; a mangled manifest; files that are compared with it."""

import hashlib
import json
import operator
import pathlib
import shutil
import threading
import time
import types

import numpy as np
import pytest

from jaxlm.config import ConfigError, RunError
from jaxlm.data.shards import manifest, shards, verify
from jaxlm.data.shards.verify import Verifier

EOS = 2


def write(root, documents, *, block_tokens=16, shard_blocks=4, dtype="<u2"):
    writer = shards.StreamWriter(root, "train", "a", dtype=dtype, block_tokens=block_tokens, shard_blocks=shard_blocks)
    for i, ids in enumerate(documents):
        writer.add(f"doc{i}", np.asarray([EOS, *ids]), 3 * len(ids))
    return writer.finish()


def random_documents(n=60, longest=40, top=1000):
    rng = np.random.default_rng(0)
    return [rng.integers(3, top, rng.integers(1, longest)) for _ in range(n)]


@pytest.mark.parametrize(("dtype", "top"), [("<u2", 1 << 16), ("<u4", 1 << 18)])
def test_stream_is_the_documents_one_after_the_other(tmp_path, dtype, top):
    documents = random_documents(top=top)
    entry = write(tmp_path, documents, dtype=dtype)
    expected = np.concatenate([np.append(EOS, ids) for ids in documents])
    manifest, verifier = {"dtype": dtype, "block_tokens": 16}, Verifier(tmp_path)
    data = types.SimpleNamespace(path=tmp_path, entry=lambda *_: entry, manifest=manifest, verifier=verifier)
    stream = shards.TokenStream(data, "a", "train")
    assert entry["tokens"] == stream.tokens == len(expected)
    assert entry["documents"] == sum(s["documents"] for s in entry["shards"]) == 60
    assert entry["bytes"] == sum(3 * len(ids) for ids in documents)
    assert sum(s["tokens"] for s in entry["shards"]) == len(expected)
    assert {s["records"] for s in entry["shards"][:-1]} == {4}
    rng = np.random.default_rng(1)
    for start, stop in np.sort(rng.integers(0, len(expected) + 1, (50, 2)), axis=1).tolist():
        assert np.array_equal(stream.read(start, stop), expected[start:stop])
    for start, stop in ((-1, 3), (0, len(expected) + 1), (5, 4)):
        with pytest.raises(IndexError):
            stream.read(start, stop)


def test_document_index_finds_the_owners_of_any_range(data):
    total = data.token_counts()["prose"]
    everything = data.documents("prose", "train", 0, total)
    assert [d.start for d in everything] == np.cumsum([0] + [d.tokens for d in everything[:-1]]).tolist()
    assert sum(d.tokens for d in everything) == total
    stream = data.stream("prose")
    for document in everything[::20]:
        found = stream.read(document.start, document.start + document.tokens).tolist()
        assert (found[0], found.count(EOS)) == (EOS, 1)
    for start in range(0, total - 40, 97):
        owners = [d for d in everything if d.start < start + 40 and d.start + d.tokens > start]
        assert data.documents("prose", "train", start, start + 40) == owners


@pytest.fixture
def copy(data, tmp_path):
    return shutil.copytree(data.path, tmp_path / "copy")


def test_a_source_that_is_not_there_a_truncated_shard_and_a_missing_file_are_refused(copy):
    with pytest.raises(ConfigError, match="no source 'poems'; it has prose, math, code"):
        shards.open_data(copy).stream("poems")
    shard = next((copy / "train" / "prose").glob("*.array_record"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"array_record is damaged \(it is [\d,]+ bytes instead of [\d,]+\): copy"):
        shards.open_data(copy)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"array_record is damaged \(it is missing\)"):
        shards.open_data(copy)


def test_many_files_are_checked_at_once_and_the_first_that_is_damaged_is_named(copy, monkeypatch):
    whole = json.loads((copy / "manifest.json").read_text())
    shard = whole["sources"]["prose"]["train"]["shards"][0]
    copies = [shard | {"file": f"train/prose/copy-{i}.array_record"} for i in range(160)]
    for entry in copies:
        (copy / entry["file"]).hardlink_to(copy / shard["file"])
    whole["files"] += copies
    data = shards.DataDir(copy, whole, "")
    shards._check_files(data)
    records = {str(copy / entry["file"]): entry.get("records") for entry in data.files()}
    monkeypatch.setattr(shards, "_count_records", lambda path: time.sleep(0.05) or records[str(path)])
    began = time.monotonic()
    shards._check_files(data)
    assert time.monotonic() - began < 160 * 0.05 / 4
    for i in (150, 77, 80):
        (copy / copies[i]["file"]).unlink()
    with pytest.raises(ConfigError, match=r"copy-77.array_record is damaged \(it is missing\)"):
        shards._check_files(data)


def test_a_shard_of_the_right_size_without_its_index_is_refused(copy):
    """As a crash can leave it: the file system gave the length but not the end of the data."""
    shard = next((copy / "train" / "prose").glob("*.array_record"))
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2].ljust(size, b"\0"))
    with pytest.raises(ConfigError, match=r"array_record is damaged"):
        shards.open_data(copy)


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("damage", ["missing", "cut", "without its index"])
def test_a_shard_that_was_not_checked_at_the_start_is_refused_by_its_reader(copy, data, monkeypatch, damage, hashed):
    monkeypatch.setattr(verify, "RETRY_SECONDS", (0.0, 0.0))
    if not hashed:
        monkeypatch.setattr(verify, "FIRST_READ_SECONDS", -1.0)
    shard = next((copy / "train" / "prose").glob("*.array_record"))
    half, size = shard.read_bytes()[: shard.stat().st_size // 2], shard.stat().st_size
    shard.unlink()
    if damage != "missing":
        shard.write_bytes(half if damage == "cut" else half.ljust(size, b"\0"))
    opened = shards.open_data(copy, check=False)
    with pytest.raises((verify.DamagedData, RunError), match=str(shard)):
        opened.stream("prose").read(0, data.token_counts()["prose"])


def flip(path, at, bit=16):
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])


def test_flipped_bits_of_a_shard_are_never_read(copy, data, monkeypatch):
    """ArrayRecord finds what it reads, the sha256 all; what is raised names the file and says how to mend it."""
    shard = next((copy / "train" / "math").glob("*.array_record"))
    raw, by_record, total = shard.read_bytes(), 0, data.token_counts()["math"]
    sound = data.stream("math").read(0, total)
    used = np.flatnonzero(np.frombuffer(raw, np.uint8))  # the rest is padding
    for at in used[:: len(used) // 20].tolist():
        flip(shard, at)
        with pytest.raises(verify.DamagedData, match=f"{shard} is damaged .* copy it again"):
            shards.open_data(copy).stream("math").read(0, total)
        with monkeypatch.context() as patch:
            patch.setattr(verify, "FIRST_READ_SECONDS", -1.0)  # without the sha256
            try:
                assert np.array_equal(shards.open_data(copy).stream("math").read(0, total), sound)
            except verify.DamagedData:
                by_record += 1
        shard.write_bytes(raw)
    assert by_record > 10


def test_flipped_bits_of_small_files_are_found_before_they_are_used(copy, data):
    """Today's silent ones: other ids, other bits per byte, other documents in a trace."""
    index = copy / "train" / "prose" / shards.DOCUMENTS
    for path in (copy / "tokenizer.model", copy / shards.TOKEN_BYTES, index):
        raw = path.read_bytes()
        for at in range(0, len(raw), len(raw) // 10):
            flip(path, at)
            with pytest.raises(verify.DamagedData, match=f"{path} is damaged"):
                shards.open_data(copy).documents("prose", "train", 0, 10)
            path.write_bytes(raw)
    assert shards.open_data(copy).documents("prose", "train", 0, 10) == data.documents("prose", "train", 0, 10)


@pytest.mark.parametrize("content", [b"\0", b"\x93NUMPY\x01\0", None])
def test_token_bytes_that_are_no_array_are_refused_at_the_start(copy, content):
    path = copy / shards.TOKEN_BYTES
    if content is None:
        with open(path, "r+b") as file:
            np.save(file, np.zeros((5, 65), np.int32))
    else:
        path.write_bytes(content.ljust(path.stat().st_size, b"\0"))
    with pytest.raises(ConfigError, match=r"token_bytes\.npy is damaged"):
        shards.open_data(copy)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 326), ("eos_id", 3), ("separator_id", 3)])
def test_a_manifest_that_does_not_fit_to_the_tokenizer_is_refused(copy, key, value):
    path = copy / shards.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["tokenizer"][key] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        ConfigError, match=r"vocabulary of 326; copy both again|its vocab_size, eos_id, separator_id, dtype are"
    ):
        shards.open_data(copy)


def change(data, tmp_path, path, value):
    """A manifest of `data` in which the item at `path` is `value`; without the item if `value` is `del`."""
    found = json.loads((data.path / manifest.MANIFEST).read_text())
    *above, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    inner = found
    for key in above:
        inner = inner[key]
    if value == "del":
        operator.delitem(inner, last)
    else:
        inner[last] = value
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(found))
    return tmp_path


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    """ArrayRecord raises a RuntimeError without an errno."""
    why = "write() failed: No space left on device; writing 00000.array_record.tmp; at byte 32768"

    class Full:
        def __init__(self, path, options):
            pathlib.Path(path).write_bytes(b"")

        def write(self, block):
            pass

        def close(self):
            raise RuntimeError(why)

    monkeypatch.setattr(shards.array_record_module, "ArrayRecordWriter", Full)
    writer = shards.StreamWriter(tmp_path, "train", "a", dtype="<u2", block_tokens=4, shard_blocks=2)
    writer.add("x", np.arange(5), 9)
    with pytest.raises(
        RunError, match=r"00000\.array_record\.tmp can't be written \(No space left on device\): .* run the same"
    ):
        writer.finish()


def test_token_dtype():
    assert [shards.token_dtype(v) for v in (325, 65536, 65537)] == ["<u2", "<u2", "<u4"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("dtype", "del", "dtype is missing"),
        ("block_tokens", "del", "block_tokens is missing"),
        ("block_tokens", 0, "block_tokens is 0 instead of a whole number of at least 1"),
        ("block_tokens", 65, r"sources.prose.train has [\d,]+ tokens, but its shards have [\d,]+ in \d+ records of 65"),
        ("recipe", "del", "recipe is missing"),
        ("recipe", [], r"recipe is \[\] instead of an object"),
        ("sources/prose/train/tokens", "del", "sources.prose.train.tokens is missing"),
        ("sources/prose/train/tokens", True, "sources.prose.train.tokens is true instead of a whole number"),
        ("sources/prose/train", None, "sources.prose.train is null instead of an object"),
        ("sources", [], r"sources is \[\] instead of an object"),
        ("sources", {}, "sources is empty"),
        ("sources/prose/val/shards/0/size", "y",
         r'sources.prose.val.shards\[0\].size is "y" instead of a whole number'),
        ("sources/prose/val/shards/0/file", None, r"shards\[0\].file is null instead of a path in the data directory"),
        ("sources/prose/val/shards/0/file", "../x", r"file is \"../x\" instead of a path in the data directory"),
        ("sources/prose/val/shards/0/sha256", "AB", "instead of a sha256 in hex"),
        ("sources/prose/train/index", "del", "sources.prose.train.index is missing"),
        ("mixture", {"poems": 1}, "mixture names 'poems', which is no source"),
        ("mixture/prose", -1, "mixture.prose is -1 instead of a number of at least 0"),
        ("tokenizer", "del", "tokenizer is missing"),
        ("tokenizer/eos_id", 325, "tokenizer.eos_id is 325, but tokenizer.vocab_size 325"),
        ("tokenizer/separator_id", 325, "tokenizer.separator_id is 325, but tokenizer.vocab_size 325"),
        ("tokenizer/separator_id", "2", 'tokenizer.separator_id is "2", but tokenizer.vocab_size 325'),
        ("tokenizer/chat_tokens", "no", 'tokenizer.chat_tokens is "no" instead of true or false'),
        ("files", "del", "files is missing"),
    ],
)  # fmt: skip
def test_each_mangled_value_is_named(data, tmp_path, path, value, message):
    with pytest.raises(ConfigError, match=rf"manifest.json is damaged: .*{message}.*; copy it again or rebuild"):
        shards.open_data(change(data, tmp_path, path, value))


def test_more_keys_than_needed_are_no_problem(data, tmp_path):
    assert manifest.read(change(data, tmp_path, "sources/prose/more", [1]))[0]["dtype"] == "<u2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no manifest.json"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "is damaged: recipe is missing"),
        ("[]", "format None"),
    ],
)
def test_what_is_no_data_directory_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / manifest.MANIFEST).write_text(content)
    with pytest.raises(ConfigError, match=message):
        shards.open_data(tmp_path)


def test_a_manifest_without_the_tokenizer_is_refused(data, tmp_path):
    copy = shutil.copytree(data.path, tmp_path / "copy")
    change(data, copy, "files", [])
    with pytest.raises(ConfigError, match=r"manifest.json does not list tokenizer.model"):
        shards.open_data(copy)


@pytest.fixture
def entries(tmp_path):
    """Four sound files of 1 MB."""
    found = []
    for i in range(4):
        content = bytes([i]) * 1_000_000
        (tmp_path / f"{i}").write_bytes(content)
        found.append({"file": f"{i}", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    return found


@pytest.fixture
def verifier(tmp_path):
    return verify.Verifier(tmp_path)


def wait(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_damage_names_the_file_and_says_how_to_mend_it(verifier, entries, tmp_path):
    (tmp_path / "1").write_bytes(b"other")
    words = (
        f"{tmp_path}/1 is damaged .*: copy it again from where the data was built, or delete {tmp_path}/manifest.json"
    )
    for act in (verifier.check, verifier.first_read, verifier.content):
        act(entries[0])
        with pytest.raises(verify.DamagedData, match=words):
            act(entries[1])


def test_a_file_is_hashed_once_and_large_ones_are_left_to_the_background(verifier, entries, tmp_path, monkeypatch):
    verifier.first_read(entries[0])
    (tmp_path / "0").write_bytes(b"other")
    verifier.first_read(entries[0])  # was sound
    with pytest.raises(verify.DamagedData):
        verify.Verifier(tmp_path).first_read(entries[0])  # another process looks for itself
    (tmp_path / "1").write_bytes(b"other")
    monkeypatch.setattr(verify, "FIRST_READ_BYTES", 999_999)
    verifier.first_read(entries[1])
    with pytest.raises(verify.DamagedData):
        verifier.first_read(entries[1], always=True)


def test_the_background_is_slow_and_ends_when_told(verifier, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "BACKGROUND_BYTES_PER_SECOND", 10e6)
    began = time.monotonic()
    verifier.begin(entries)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "verify-data"]
    thread.join(10)
    assert time.monotonic() - began > 0.35  # 4 MB at 10 MB/s
    assert verifier.damage is None
    monkeypatch.setattr(verify, "BACKGROUND_BYTES_PER_SECOND", 1e3)
    again = verify.Verifier(tmp_path)
    again.begin(entries)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "verify-data"]
    again.end()
    thread.join(5)
    assert not thread.is_alive()


def test_reading_is_tried_three_times_and_damage_is_told_from_failure(verifier, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "RETRY_SECONDS", (0.0, 0.0))
    failures = []

    def act(count):
        assert verifier.oldest_read().startswith(f"{tmp_path}/2, for 0.")
        failures.append(1)
        if len(failures) <= count:
            raise OSError("Input/output error")
        return "content"

    assert verifier.read(entries[2], "record 5", lambda: act(2)) == "content"
    failures.clear()
    with pytest.raises(RunError, match=f"cannot read record 5 of {tmp_path}/2: Input/output error; check the disk"):
        verifier.read(entries[2], "record 5", lambda: act(3))
    failures.clear()
    (tmp_path / "2").write_bytes(b"other")
    with pytest.raises(verify.DamagedData):
        verifier.read(entries[2], "record 5", lambda: act(1))
    assert len(failures) == 1
    assert verifier.oldest_read() == ""
