"""Documents from files and TFDS; what is broken costs itself alone and is counted."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import survey
from jaxlm.corpus.sources import text as text_reader
from jaxlm.corpus.sources.base import SourceStats
from jaxlm.corpus.sources.units import iterate_documents, source_signature


def read(spec, **options):
    stats = SourceStats()
    return list(iterate_documents(str(spec), stats=stats, **options)), stats


def jsonl(*records):
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "raw"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_bytes(b"one\r\n\n two\xc3\xa9 ")
    (root / "a.jsonl").write_bytes(jsonl({"text": "first"}, {"text": "second", "x": 1}))
    (root / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(jsonl({"text": "zipped"})))
    pq.write_table(pa.table({"text": ["p0", None, "p2"], "other": ["o0", "o1", "o2"]}), root / "sub" / "d.parquet")
    (root / "ignored.csv").write_text("no")
    return root


def test_a_folder_is_read_whole_in_sorted_order(folder):
    documents, stats = read(folder)
    assert documents == [
        ("a.jsonl:1", "first"), ("a.jsonl:2", "second"), ("b.txt", "one\r\n\n twoé "), ("sub/c.jsonl.gz:1", "zipped"),
        ("sub/d.parquet:0", "p0"), ("sub/d.parquet:2", "p2"),
    ]  # fmt: skip
    assert stats.documents == 6
    assert stats.bytes == sum(len(text.encode()) for _, text in documents)
    assert stats.skipped == {"no text in field 'text'": 1}


def test_files_and_globs(folder):
    assert [i for i, _ in read(folder / "b.txt")[0]] == ["b.txt"]
    assert [i for i, _ in read(folder / "**" / "*.jsonl*")[0]] == ["a.jsonl:1", "a.jsonl:2", "sub/c.jsonl.gz:1"]
    assert [t for _, t in read(folder / "sub" / "d.parquet", text_key="other")[0]] == ["o0", "o1", "o2"]


def test_links_to_files_are_files(folder, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "l.txt").symlink_to(folder / "b.txt")
    (linked / "broken.txt").symlink_to(tmp_path / "nowhere")
    assert read(linked)[0] == [("l.txt", read(folder / "b.txt")[0][0][1])]


def test_broken_records_cost_themselves_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        jsonl({"text": "good"}, '{"text": "cut', "[1]", {"body": 1}, {"text": 5}, "", {"text": " \n"})
        + b'{"text": "caf\xff"}\n{"text": "\\ud800!"}\n'
        + jsonl({"text": "last"})
    )
    documents, stats = read(path)
    assert documents == [("x.jsonl:1", "good"), ("x.jsonl:8", "caf\ufffd"), ("x.jsonl:9", "?!"), ("x.jsonl:10", "last")]
    assert stats.skipped == {"malformed JSON line": 1, "no text in field 'text'": 3, "empty": 1}
    assert stats.repaired == {"bytes that are not UTF-8 became U+FFFD": 1, "lone surrogates became '?'": 1}
    assert stats.examples[0] == "x.jsonl:2: malformed JSON line"
    assert "skipped 1: malformed JSON line" in stats.summary()


@pytest.mark.parametrize(
    ("raw", "text", "reason"),
    [
        (b"The caf\xe9 of the town \x93opens\x94 at nine o'clock \x96 bien s\xfbr.",
         "The caf\u00e9 of the town \u201copens\u201d at nine o'clock \u2013 bien s\u00fbr.", "1252"),
        ("A caf\u00e9 in UTF-8, with a byte ".encode() + b"\xe9 too", "A caf\u00e9 in UTF-8, with a byte \ufffd too",
         "U.FFFD"),
        (b"A byte \x81 that windows-1252 lacks.", "A byte \ufffd that windows-1252 lacks.", "U.FFFD"),
        (b"There is more to this story\xe2\x80", "There is more to this story\ufffd", "U.FFFD"),
        ("Two words, \u0434\u0430 \u0438 \u043d\u0435\u0442, in English text.".encode("cp1251"),
         "Two words, \ufffd\ufffd \ufffd \ufffd\ufffd\ufffd, in English text.", "U.FFFD"),
        ("\u041f\u0440\u0438\u0432\u0435\u0442".encode("cp1251"), "\ufffd" * 6, "U.FFFD"),
    ],
)  # fmt: skip
def test_what_is_not_utf8_is_read_as_windows_1252_where_that_makes_sense(tmp_path, raw, text, reason):
    (tmp_path / "a.txt").write_bytes(raw)
    documents, stats = read(tmp_path / "a.txt")
    assert documents == [("a.txt", text)]
    (told,) = stats.repaired
    assert re.search(reason, told)


@pytest.mark.parametrize("charset", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_tells_the_charset(tmp_path, charset):
    (tmp_path / "x.txt").write_bytes("Река by the town".encode(charset))
    documents, stats = read(tmp_path / "x.txt")
    assert documents == [("x.txt", "Река by the town")]
    assert not stats.repaired


def test_a_cut_gzip_gives_what_can_be_read(tmp_path):
    raw = gzip.compress(jsonl(*({"text": f"{i} {hash((i, 1))}"} for i in range(5000))))
    (tmp_path / "x.jsonl.gz").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "y.jsonl").write_bytes(jsonl({"text": "sound"}))
    documents, stats = read(tmp_path)
    assert documents[-1] == ("y.jsonl:1", "sound")
    assert len(documents) > 1000
    assert any("unreadable" in reason for reason in stats.skipped)


def test_a_broken_parquet_file_costs_itself_alone(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "y.txt").write_text("sound")
    documents, stats = read(tmp_path)
    assert documents == [("y.txt", "sound")]
    assert any("not a readable parquet file" in reason for reason in stats.skipped)


def test_a_large_txt_is_cut_at_blank_lines_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text_reader, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(text_reader, "PART_BYTES", 300)
    text = "".join(f"é paragraph {i}\nwith a second line\n\n" for i in range(60)) + "line\n" * 300 + "end"
    (tmp_path / "big.txt").write_text(text)
    documents, _ = read(tmp_path)
    assert "".join(t for _, t in documents) == text
    assert all(t.endswith("\n\n") for _, t in documents[:6])
    assert max(len(t.encode()) for _, t in documents) < 700
    raw = text.encode()
    for doc_id, part in documents:
        start = int(doc_id.removeprefix("big.txt@"))
        assert raw[start : start + len(part.encode())] == part.encode()


@pytest.mark.parametrize(
    ("make", "spec", "options", "message"),
    [
        (None, "none", {}, "no such file or folder"),
        (None, "none/*.txt", {}, "has no file ending in .txt"),
        (("x.csv", b"a"), "x.csv", {}, "is none of .txt, .jsonl"),
        (("x.html", b"a"), "", {}, "; jaxlm prepare makes text of HTML, code and others, in DATA/documents"),
        (("x.jsonl", b'{"body": "a"}\n'), "", {}, "no text in field 'text'; its fields are body: set text_key"),
        (("x.jsonl", b"{\n"), "", {}, "gave no document .*malformed JSON line"),
        (("x.txt", b" \n"), "", {}, "gave no document .*empty"),
    ],
)
def test_clear_errors_for_paths(tmp_path, make, spec, options, message):
    if make:
        (tmp_path / make[0]).write_bytes(make[1])
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / spec, **options)


def test_a_file_without_the_field_costs_itself_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "good"}))
    (tmp_path / "b.jsonl").write_bytes(jsonl({"error": "x"}, {"status": 404}))
    pq.write_table(pa.table({"body": ["a"] * 3}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "d.parquet")
    documents, stats = read(tmp_path)
    assert documents == [("a.jsonl:1", "good")]
    assert stats.skipped == {"no text in field 'text'": 7}
    assert stats.examples == [
        f"{i}: no text in field 'text'" for i in ("b.jsonl:1", "b.jsonl:2", "c.parquet:0", "d.parquet:0")
    ]
    assert (
        stats.no_field == f"{tmp_path}/b.jsonl has no text in field 'text'; its fields are error, status: set text_key "
        "(--config.prepare.sources.SOURCE.text_key=FIELD, or --config.data.text_key=FIELD for data.path)"
    )
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"gave no document .*; .*b.jsonl has no text .* its fields are error, status"
    ):
        read(tmp_path)


def test_clear_errors_for_parquet_columns(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="no text in field 'text'; its fields are body, n: set text_key"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"'n' of .* holds int64, not strings"):
        read(tmp_path, text_key="n")


def test_signature_sees_names_and_sizes(folder):
    first = source_signature(str(folder))
    assert first == source_signature(str(folder))
    (folder / "b.txt").write_text("other")
    assert source_signature(str(folder)) != first
    assert source_signature("embedded:prose") == ""


def test_markup_is_for_prepare_alone(folder, read_source):
    """A run on a folder goes on with what it began with."""
    documents, signature = read(folder)[0], source_signature(str(folder))
    (folder / "a.rst").write_text("Title\n=====\n")
    (folder / "b.adoc.gz").write_bytes(gzip.compress(b"= Title\n"))
    assert (read(folder)[0], source_signature(str(folder))) == (documents, signature)
    found, _ = read_source(folder, format="markup")
    assert [(d.id, d.text, d.metadata["format"]) for d in found] == [
        ("a.rst", "Title\n=====\n", "text"),
        ("b.adoc.gz", "= Title\n", "text"),
    ]
    assert {d.id for d in read_source(folder)[0]} >= {"a.rst", "b.adoc.gz"}


@pytest.fixture
def tfds_dir(tmp_path):
    """A prepared TFDS dataset in ArrayRecord form, made without TensorFlow: two shards, a text and a label."""
    home = tmp_path / "tiny" / "1.0.0"
    home.mkdir(parents=True)
    features = {
        "text": tfds.features.Text(),
        "title": tfds.features.Text(),
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    tfds.features.FeaturesDict(features).save_config(home)
    sizes, total = [3, 2], 0
    for shard, size in enumerate(sizes):
        path = home / f"tiny-train.array_record-{shard:05d}-of-00002"
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for i in range(size):
            example = tf_example_pb2.Example()
            feature = example.features.feature
            feature["text"].bytes_list.value.append(f"tëxt {shard}.{i}".encode())
            feature["title"].bytes_list.value.append(b"title")
            feature["label"].int64_list.value.append(i % 2)
            total += len(example.SerializeToString())
            writer.write(example.SerializeToString())
        writer.close()
    split = {
        "name": "train",
        "shardLengths": [str(size) for size in sizes],
        "numBytes": str(total),
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {"name": "tiny", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (home / "dataset_info.json").write_text(json.dumps(info))
    return str(tmp_path)


def test_tfds_without_tensorflow(tfds_dir):
    documents, stats = read("tfds:tiny", tfds_dir=tfds_dir)
    assert documents[0] == ("tfds:tiny/train/0", "tëxt 0.0")
    assert documents[4] == ("tfds:tiny/train/4", "tëxt 1.1")
    assert stats.documents == 5
    assert [t for _, t in read("tfds:tiny:train[1:3]", tfds_dir=tfds_dir)[0]] == ["tëxt 0.1", "tëxt 0.2"]
    assert [t for _, t in read("tfds:tiny:1.0.0:train?key=title", tfds_dir=tfds_dir)[0]] == ["title"] * 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tfds:absent", "finds no such dataset"),
        ("tfds:tiny:test", "no split 'test'; prepared are train"),
        ("tfds:tiny?key=body", "no feature 'body'; it has label, text, title"),
        ("tfds:tiny?key=label", "'label' is not text"),
        ("tfds:", "not of the form"),
    ],
)
def test_clear_errors_for_tfds(tfds_dir, spec, message):
    with pytest.raises(ConfigError, match=message):
        read(spec, tfds_dir=tfds_dir)


def test_files_without_a_suffix_are_told_how_to_be_read(tmp_path):
    for name in ("PASSWD", "NOTES", "a.txt", "b.png"):
        (tmp_path / name).write_text("some words")
    found = survey.survey(str(tmp_path), ())
    assert found.files == {"text": 1}
    assert survey.unread_lines("docs", found.unread) == [
        "docs: 2 unsuffixed files are not read: name those that are text NAME.txt",
        "docs: 1 .png file is in no supported format",
    ]


def test_what_every_project_has_is_read_without_a_suffix_and_packed(tmp_path, read_source):
    import gzip

    for name in ("LICENSE", "README", "COPYING.LESSER", "LICENSE-MIT", "news.html", "readme.py", "README.Debian"):
        (tmp_path / name).write_text(f"some words of {name}")
    for name in ("NEWS.gz", "changelog.Debian.amd64.gz", "POSTER.gz"):
        (tmp_path / name).write_bytes(gzip.compress(f"some words of {name}".encode()))
    found = survey.survey(str(tmp_path), ())
    assert (found.files, found.unread) == ({"readme": 6, "html": 1, "code": 1}, {".gz": 1, ".lesser": 1})
    assert len(read_source(tmp_path, format="auto")[0]) == 1  # finished data sees no new files in its folder
    texts, _ = read_source(tmp_path, format="readme")
    names = ["LICENSE", "LICENSE-MIT", "NEWS.gz", "README", "README.Debian", "changelog.Debian.amd64.gz"]
    assert [text.text for text in texts] == [f"some words of {name}" for name in names]
