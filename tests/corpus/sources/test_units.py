"""Units together are the whole source, whatever their size; what is damaged in a compressed file costs its member alone."""

import bz2
import gzip
import json
import lzma
import random
import tracemalloc
import typing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from jaxlm.config import ConfigError
from jaxlm.config.corpora import PrepareSourceConfig
from jaxlm.corpus.sources import base, jsonl, registry, streams, text
from jaxlm.corpus.sources.base import Part
from jaxlm.corpus.sources.units import split_source


def seen(result):
    documents, stats = result
    return [(d.id, d.text, d.metadata) for d in documents], stats.documents, stats.skipped, stats.repaired


def test_the_config_takes_each_format_that_is_read():
    assert {*typing.get_args(typing.get_type_hints(PrepareSourceConfig)["format"])} == {"auto", *registry.FORMATS}


@pytest.mark.parametrize("numbered", [True, False])
def test_a_jsonl_in_pieces_equals_the_whole(tmp_path, monkeypatch, read_source, spec, numbered):
    monkeypatch.setattr(jsonl, "NUMBERED_BYTES", 1 << 20 if numbered else 100)
    rows = [json.dumps({"text": f"é {i} " * (i % 17 + 1), "url": f"https://a.org/{i}"}) for i in range(300)]
    rows[100], rows[200] = '{"text": "cut', ""
    raw = "\n".join(rows).encode().replace(b"150 ", b"150\xff ", 1)
    (tmp_path / "x.jsonl").write_bytes(raw)
    whole = seen(read_source(tmp_path))
    assert whole[2:] == ({"malformed JSON line": 1}, {"bytes that are not UTF-8 became U+FFFD": 1})
    assert whole[1] == 298
    assert whole[0][101][0] == ("x.jsonl:103" if numbered else f"x.jsonl@{raw.index(rows[102].encode())}")
    for size in (50, 1000, 7777):
        assert len(split_source(spec(tmp_path), size)) > 1
        assert seen(read_source(tmp_path, size)) == whole


def test_a_txt_in_pieces_equals_the_whole(tmp_path, monkeypatch, read_source, spec):
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(text, "PART_BYTES", 300)
    monkeypatch.setattr(text, "GRAIN", 2048)
    content = "".join(f"paragraph é {i}\nof two lines\n\n" for i in range(500))
    (tmp_path / "x.txt").write_text(content)
    whole = seen(read_source(tmp_path))
    assert "".join(t for _, t, _ in whole[0]) == content
    for size in (1, 3000, 9000):
        assert len(split_source(spec(tmp_path), size)) > 1
        assert seen(read_source(tmp_path, size)) == whole


def test_a_parquet_in_pieces_equals_the_whole(tmp_path, read_source, spec):
    table = pa.table({"text": [f"row {i} " * 20 for i in range(1000)], "url": ["https://www.a.org/x"] * 1000})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=64, compression="none")
    whole = seen(read_source(tmp_path))
    assert whole[0][999][0] == "x.parquet:999"
    assert whole[0][0][2] == {"source": "web", "format": "text", "url": "https://www.a.org/x", "site": "a.org"}
    for size in (1000, 20_000, 60_000):
        assert len(split_source(spec(tmp_path), size)) > 1
        assert seen(read_source(tmp_path, size)) == whole


def test_a_damaged_row_group_costs_itself_alone(tmp_path, read_source):
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"text": [f"{i} " * 50 for i in range(100)]}),
        path,
        row_group_size=10,
        compression="snappy",
        use_dictionary=False,
    )
    column = pq.ParquetFile(path).metadata.row_group(3).column(0)
    raw = bytearray(path.read_bytes())
    at = column.data_page_offset
    raw[at : at + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(raw)
    documents, stats = read_source(path)
    assert [int(d.id.split(":")[1]) for d in documents] == [*range(30), *range(40, 100)]
    assert list(stats.skipped.values()) == [10]


def test_a_bad_byte_in_parquet_costs_its_row_alone(tmp_path, read_source):
    column = pa.array([b"good", b"caf\xe9", b"after"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    documents, stats = read_source(tmp_path)
    assert [d.text for d in documents] == ["good", "caf\ufffd", "after"]
    assert sum(stats.repaired.values()) == 1


def test_a_file_that_must_not_be_read_costs_itself_alone(tmp_path, monkeypatch, read_source):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    opened = open

    def refuse(url, mode):
        if url.endswith("b.txt"):
            raise PermissionError(13, "Permission denied", url)
        return opened(url, mode)

    monkeypatch.setattr("jaxlm.corpus.sources.streams.open_file", lambda url: refuse(url, "rb"))
    documents, stats = read_source(str(tmp_path))
    assert [document.id for document in documents] == ["a.txt", "c.txt"]
    assert stats.skipped == {"no permission to read it": 1}


def test_small_files_share_a_unit_and_large_ones_are_cut(tmp_path, spec):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
        (tmp_path / f"{i}.empty.txt").write_text("")
    (tmp_path / "big.jsonl").write_text('{"text": "0123456789"}\n' * 100)
    made = split_source(spec(tmp_path), 500)
    names = [[p.name for p in unit.parts if p.size] for unit in made]
    assert names[:2] == [[f"{i}.txt" for i in range(5)], [f"{i}.txt" for i in range(5, 10)]]
    assert sum(len(unit.parts) for unit in made[:2]) == 20
    assert {p.name for unit in made[2:] for p in unit.parts} == {"big.jsonl"}
    assert made == split_source(spec(tmp_path), 500)


def test_max_bytes_is_shared_by_units_over_the_whole_source(tmp_path, read_source, spec):
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_text('{"text": "0123456789"}\n' * 1000)  # 10 kB of text, 23 of input
    documents, stats = read_source(tmp_path, 23_000, max_bytes=20_000)
    assert 19_000 < stats.bytes <= 20_000
    names = {d.id.split(":")[0] for d in documents}
    assert len(names) == 14  # 16 times the text that is wanted, in units of 23 kB
    assert max(names) > "35.jsonl"
    assert read_source(tmp_path, 23_000, max_bytes=10**9)[1].documents == 40_000


def test_any_fsspec_url(tmp_path, read_source):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a/x.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    memory.pipe("/bucket/b.txt", b"three")
    memory.pipe("/bucket/tree/m.py", b"x = 1\n")
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "t.parquet")
    memory.pipe("/bucket/t.parquet", (tmp_path / "t.parquet").read_bytes())
    try:
        documents, _ = read_source("memory://bucket", 16)
        assert [(d.id, d.text) for d in documents] == [
            ("a/x.jsonl:1", "one"), ("a/x.jsonl:2", "two"), ("b.txt", "three"), ("t.parquet:0", "four"),
        ]  # fmt: skip
        assert [d.id for d in read_source("memory://bucket/**/*.jsonl")[0]] == ["a/x.jsonl:1", "a/x.jsonl:2"]
        assert [d.id for d in read_source("memory://bucket/b.txt")[0]] == ["b.txt"]
        assert [d.id for d in read_source("memory://bucket/tree", format="code")[0]] == ["m.py"]
        with pytest.raises(ConfigError, match="no such file"):
            read_source("memory://nowhere")
    finally:
        memory.rm("/bucket", recursive=True)


def test_clear_errors(tmp_path, read_source):
    (tmp_path / "x.txt").write_text("x")
    for path, keys, message in [
        ("nosuch://x", {}, "nosuch"),
        ("zip://a::b.zip", {}, "chained"),
        (tmp_path, {"format": "code"}, "no file in a known programming language"),
        ("embedded:poems", {}, "no embedded source 'poems'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_source(path, **keys)


def test_rows_bring_their_metadata(tmp_path, read_source):
    row = {
        "text": "x = 1", "path": "a/b.PY", "license": ["MIT", "Apache-2.0"], "timestamp": "2020", "title": "T",
        "format": "pdf",
    }  # fmt: skip
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + '\n{"text": "t", "format": "markdown", "language": "en"}\n')
    (first, second), _ = read_source(tmp_path)
    assert first.metadata == {
        "source": "web", "site": "web", "format": "code", "language": "python", "path": "a/b.PY",
        "licence": "MIT OR Apache-2.0", "date": "2020", "title": "T",
    }  # fmt: skip
    assert second.metadata == {"source": "web", "site": "web", "format": "markdown", "language": "en"}
    (tmp_path / "x.jsonl").write_text('{"raw_html": "<p>t"}\n')
    assert read_source(tmp_path, text_key="raw_html")[0][0].metadata["format"] == "html"


def test_markdown_front_matter(tmp_path, read_source):
    (tmp_path / "a.md").write_text("---\ntitle: A b\ndate: 2020-01-02\ntags: [x]\n---\n# Head\n")
    (tmp_path / "b.md").write_text('+++\ntitle = "B"\n+++\ntext\n')
    (tmp_path / "c.md").write_text("---\nA rule above, and one below\n\n---\ntext\n")
    (tmp_path / "d.md").write_text("---\ntitle: [broken\n---\ntext\n")
    a, b, c, d = read_source(tmp_path)[0]
    assert (a.text, a.metadata["title"], a.metadata["date"], a.metadata["format"]) == (
        "# Head\n",
        "A b",
        "2020-01-02",
        "markdown",
    )
    assert (b.text, b.metadata["title"]) == ("text\n", "B")
    assert c.text.startswith("---\nA rule")
    assert d.text.startswith("---\ntitle")


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
    assert stats.skipped == {"record over 16 MiB: split it": 1}
    assert peak < 32 << 20
