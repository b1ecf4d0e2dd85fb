"""What is damaged in a compressed file costs its member alone, and is counted once."""

import bz2
import gzip
import lzma
import random
import tracemalloc

import pytest
from backports import zstd

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part

CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS = {".gz": gzip.compress, ".zst": lambda raw: zstd.compress(raw, options=CHECKED), ".bz2": bz2.compress,
            ".xz": lambda raw: lzma.compress(raw, preset=0)}  # fmt: skip


def lines_of(first, count):
    """Lines that hardly compress, so that a cut falls among them."""
    noise = random.Random(first)
    return [f'{{"text": "{i} {noise.randbytes(40).hex()}"}}\n'.encode() for i in range(first, first + count)]


def texts(documents):
    return [int(document.text.split()[0]) for document in documents]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_members_are_read(tmp_path, read_source, suffix):
    members = [COMPRESS[suffix](b"".join(lines_of(i, 1000))) for i in (0, 1000, 2000)]
    (tmp_path / f"x.jsonl{suffix}").write_bytes(b"".join(members) + (b"\0" * 64 if suffix == ".gz" else b""))
    documents, stats = read_source(tmp_path)
    assert texts(documents) == list(range(3000))
    assert documents[2999].id == f"x.jsonl{suffix}:3000"
    assert not stats.skipped


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_member_yields_what_came_before_it_and_counts_once(tmp_path, read_source, suffix):
    members = [COMPRESS[suffix](b"".join(lines_of(i, 6000))) for i in (0, 6000)]
    (tmp_path / f"x.jsonl{suffix}").write_bytes(members[0] + members[1][: len(members[1]) // 2])
    documents, stats = read_source(tmp_path)
    assert len(documents) >= 6000 + (suffix != ".bz2") * 1000  # bzip2 and zstd give whole blocks
    assert texts(documents) == list(range(len(documents)))
    assert list(stats.skipped.values()) == [1]
    assert stats.examples[0].startswith(f"x.jsonl{suffix}:")
    assert "unreadable" in stats.examples[0]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("fault", ["cut", "flipped"])
def test_a_damaged_member_in_the_middle_costs_itself_alone(tmp_path, read_source, suffix, fault):
    members = [COMPRESS[suffix](b"".join(lines_of(i, 2000))) for i in (0, 2000, 4000)]
    middle = bytearray(members[1])
    at = len(middle) // 2
    if fault == "cut":
        del middle[at:]
    else:
        middle[at] ^= 0x10
    (tmp_path / f"x.jsonl{suffix}").write_bytes(members[0] + middle + members[2])
    documents, stats = read_source(tmp_path)
    numbers = texts(documents)
    assert numbers[:2000] == list(range(2000))
    assert numbers[-2000:] == list(range(4000, 6000))
    unreadable = sum(count for reason, count in stats.skipped.items() if "unreadable" in reason)
    assert 1 <= unreadable <= 2


def test_a_file_that_is_not_compressed_at_all(tmp_path, read_source):
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip" * 100_000)
    (tmp_path / "y.jsonl").write_text('{"text": "sound"}\n')
    documents, stats = read_source(tmp_path)
    assert [d.text for d in documents] == ["sound"]
    assert sum(stats.skipped.values()) == 1


@pytest.mark.parametrize("size", [1, 7, 64])
def test_ranges_of_lines_join_to_the_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 16)
    raw = b"a\n\nbcd\r\n" + b"long " * 20 + b"\n" + b"e\n" * 9 + b"no end"
    path = tmp_path / "x.txt"
    path.write_bytes(raw)
    joined = []
    for start in range(0, len(raw), size):
        joined += streams.lines(Part("text", "x.txt", str(path), start, min(start + size, len(raw))))
    assert joined == list(streams.lines(Part("text", "x.txt", str(path))))
    assert b"".join(line for _, line in joined) == raw
    assert all(raw[offset : offset + len(line)] == line for offset, line in joined)


def test_a_line_beyond_the_limit_is_dropped_and_named(tmp_path, monkeypatch, read_source):
    monkeypatch.setattr(base, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(streams, "CHUNK_BYTES", 64)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "' + "b" * 5000 + '"}\n{"text": "c"}\n')
    documents, stats = read_source(tmp_path)
    assert [(d.id, d.text) for d in documents] == [("x.jsonl:1", "a"), ("x.jsonl:3", "c")]
    assert list(stats.skipped.values()) == [1]
    assert "x.jsonl:2" in stats.examples[0]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_small_file_of_much_data_takes_bounded_memory(tmp_path, monkeypatch, read_source, suffix):
    monkeypatch.setattr(base, "MAX_RECORD_BYTES", 1000)
    bomb, good = b"\0" * (40 << 20) + b"\n", b'{"text": "7"}\n'
    (tmp_path / f"x.jsonl{suffix}").write_bytes(COMPRESS[suffix](good + bomb + good) + COMPRESS[suffix](good))
    del bomb
    tracemalloc.start()
    documents, stats = read_source(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [d.id for d in documents] == [f"x.jsonl{suffix}:{line}" for line in (1, 3, 4)]
    assert stats.skipped == {"record over 16 MiB": 1}
    assert peak < 32 << 20
