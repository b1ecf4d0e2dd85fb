"""Writing, opening, checking and reading token streams."""

import json
import shutil

import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.data.shards import shards, verify
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
    stream = shards.TokenStream(tmp_path, entry, dtype=dtype, block_tokens=16, label="a", verifier=Verifier(tmp_path))
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


def test_document_index_reads_only_the_groups_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_INDEX_GROUP", 8)
    entry = write(tmp_path, random_documents())
    data = shards.DataDir(
        tmp_path, {"tokenizer": {"eos_id": EOS, "vocab_size": 9}, "mixture": {}, "sources": {"a": {"train": entry}}}, ""
    )
    read, original = [], shards.pq.ParquetFile.read_row_group
    monkeypatch.setattr(shards.pq.ParquetFile, "read_row_group", lambda self, i: read.append(i) or original(self, i))
    everything = data.documents("a", "train", 0, entry["tokens"])
    assert [d.doc_id for d in everything] == [f"doc{i}" for i in range(60)]
    assert read == list(range(8))
    read.clear()
    wanted = everything[33]
    assert data.documents("a", "train", wanted.start, wanted.start + 1) == [wanted]
    assert read == [4]


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


def test_a_shard_of_the_right_size_without_its_index_is_refused(copy):
    """As a crash can leave it: the file system gave the length but not the end of the data."""
    shard = next((copy / "train" / "prose").glob("*.array_record"))
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[: size // 2].ljust(size, b"\0"))
    with pytest.raises(ConfigError, match=r"array_record is damaged"):
        shards.open_data(copy)


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


def test_token_dtype():
    assert [shards.token_dtype(v) for v in (325, 65536, 65537)] == ["<u2", "<u2", "<u4"]
