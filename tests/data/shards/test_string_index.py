"""The index of the text: exact beside a plain scan, damaged or half built never taken for one."""

import fcntl
import random
import re
import resource
import shutil
import threading

import pytest

from jaxlm.data.shards import build, search, string_index
from jaxlm.data.shards.string_index import open_index

BLOCKS, TOGETHER = {"small": 32 << 10, "large": 8 << 10}, 40  # smaller, so that small data has many
STEP = {size: block - string_index._OVERLAP for size, block in BLOCKS.items()}
LETTERS = "".join(map(chr, range(33, 127))) + "\näéßπдж中文字符😀🚀"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources; documents of 0 to 100 kB, each of few words of its own: a block holds many, or a document many blocks."""
    rng = random.Random(0)
    sizes = [rng.choice([0, 3, 40, 400, 2000]) for _ in range(60)] + [15_000, 12_000]

    def text(size: int) -> str:
        words = ["".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(20)]
        parts = words[:7], words[7:14], words[14:]  # no block of a long document has all of its triples
        return " ".join(" ".join(rng.choices(part, k=size // 3)) for part in parts)

    texts = {name: [text(size) for size in sizes] for name in ("a", "b")}

    def read(source, stats):
        for i, text in enumerate(texts[source.name]):
            stats.documents += 1
            yield f"{source.name}:{i}", text

    settings = build.BuildSettings(vocab_size=400, chat_tokens=False, val_fraction=0.2, block_tokens=1024)
    sources = [build.Source(name, f"test:{name}", 1.0) for name in texts]
    return build.build_data(tmp_path_factory.mktemp("data") / "d", sources, settings, read=read, log=lambda line: None)


@pytest.fixture(scope="module")
def streams(data):
    """The decoded bytes of each stream, and what each document says."""
    decode, whole, texts = data.decoder(), {}, {}
    for source, split, group, ids_N in search.texts(data):
        raw, ends = decode(ids_N)
        whole[source, split] = whole.get((source, split), b"") + raw
        for each in group:
            at = each.start - group[0].start
            texts[source, split, each.doc_id] = raw[ends[at] : ends[at + each.tokens]]
    return whole, texts


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """What is said."""
    lines = []
    monkeypatch.setattr(string_index, "_BLOCKS", BLOCKS)
    monkeypatch.setattr(string_index, "_TOGETHER", TOGETHER)
    monkeypatch.setattr(string_index, "say", lines.append)
    return lines


def needles(rng, whole: dict, count: int, step: int) -> list[bytes]:
    """Random strings of 3 to 60 bytes: half of them around the ends of blocks, some with one byte changed."""
    drawn = []
    for number in range(count):
        text = rng.choice([text for text in whole.values() if len(text) > 2 * step])
        edge = rng.randrange(1, len(text) // step) * step + rng.choice([0, string_index._OVERLAP])
        at = edge - rng.randint(1, 59) if number % 2 else rng.randrange(len(text) - 60)
        needle = bytearray(text[at : at + rng.randint(3, 60)])
        if number % 5 == 0:
            needle[rng.randrange(len(needle))] ^= 1
        drawn.append(bytes(needle))
    return drawn


def by_index(data, index, needle: bytes) -> dict:
    groups = search.texts(data, index.places(needle))
    found = search.matches(groups, data.decoder(), re.compile(re.escape(needle)), lambda done: None)
    return {(match.source, match.split, match.doc_id): match.times for match in found}


def by_scan(texts, needle: bytes) -> dict:
    return {place: text.count(needle) for place, text in texts.items() if needle in text}


@pytest.mark.parametrize("size", ["large", "small"])
def test_it_finds_what_a_plain_scan_finds(data, streams, trials, lines, monkeypatch, size):
    monkeypatch.setattr(string_index, "_SMALL", 0 if size == "large" else string_index._SMALL)
    shutil.rmtree(data.path / "index", ignore_errors=True)
    (whole, texts), index, rng = streams, open_index(data), random.Random(1)
    assert (data.path / "index" / data.sha256[:16]).is_dir()
    assert max(map(len, texts.values())) > 2 * STEP[size]
    assert size == "small" or len([*(data.path / "index").glob("*/*/")]) > 1
    empty = 0
    for needle in needles(rng, whole, trials(100), STEP[size]):
        want = by_scan(texts, needle)
        assert by_index(data, index, needle) == want, needle
        empty += not want
    assert empty  # across two documents, or changed
    text = max(texts.values(), key=len)
    for size in (1023, 1024, 1025, 5000, len(text)):
        at = rng.randrange(len(text) - size + 1)
        assert by_index(data, index, text[at : at + size]) == by_scan(texts, text[at : at + size])
    assert not lines


def test_the_index_leaves_most_text_out(data, streams):
    index = open_index(data)
    text = next(text for text in streams[1].values() if 1_000 < len(text) < 5_000)
    places = index.places(text[500:540])
    tokens = sum(stop - start for ranges in places.values() for start, stop in ranges)
    assert 0 < tokens < search.tokens_to_search(data) / 4


def test_a_flipped_bit_is_noticed(data, streams, trials, lines):
    rng, folder = random.Random(3), data.path / "index" / data.sha256[:16]
    for number in range(trials(8)):
        open_index(data)
        lines.clear()
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        path = rng.choice(files)
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.unlink()  # the index that is open still has the file in memory
        path.write_bytes(content)
        index = open_index(data)
        assert ["built again" in line for line in lines] == [True], (number, path.name)
        for needle in needles(rng, streams[0], 3, STEP["small"]):
            assert by_index(data, index, needle) == by_scan(streams[1], needle)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left"), ValueError("killed")])
def test_a_build_that_ends_early_leaves_nothing(data, monkeypatch, lines, error):
    home, blocks = data.path / "index", string_index._blocks
    shutil.rmtree(home, ignore_errors=True)

    def few(*given):
        for number, block in enumerate(blocks(*given)):
            if number == 3:
                raise error
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(string_index, "_blocks", few)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                open_index(data)
        else:
            assert open_index(data) is None
            assert f"no index in {home} ({error}): all tokens are searched" in lines
    assert [path.name for path in home.iterdir()] == [".lock"]
    (home / data.sha256[:16]).mkdir()  # of a build that was killed
    (home / data.sha256[:16] / "meta.json").write_text("{}")
    (home / "0123456789abcdef").mkdir()  # of data that was here before
    assert open_index(data)
    assert sorted(path.name for path in home.iterdir()) == sorted([".lock", data.sha256[:16]])


def test_a_full_disk_is_said_and_nothing_stays(data, lines):
    home = data.path / "index"
    shutil.rmtree(home, ignore_errors=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert open_index(data) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "all tokens are searched" in lines[-1]
    assert [path.name for path in home.iterdir()] == [".lock"]


def test_a_second_builder_waits_for_the_first(data, monkeypatch, capsys):
    home = data.path / "index"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    held = open(home / ".lock", "a")
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.3, held.close).start()
    assert open_index(data)
    assert f"another process builds an index in {home}: waiting" in capsys.readouterr().err
    monkeypatch.setattr(string_index, "_build", None)  # it stands: nobody builds
    assert open_index(data)


def test_data_that_cannot_be_written_has_its_index_in_the_cache(data, tmp_path, monkeypatch):
    shutil.rmtree(data.path / "index", ignore_errors=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(string_index.os, "access", lambda path, mode: False)
    (tmp_path / ".cache/jaxlm/index/of_other_data").mkdir(parents=True)
    assert open_index(data)
    assert not (data.path / "index").exists()
    names = {path.name for path in (tmp_path / ".cache/jaxlm/index").iterdir()}
    assert names == {".lock", "of_other_data", data.sha256[:16]}


def test_without_tantivy_it_says_what_to_install(data, monkeypatch, lines):
    monkeypatch.setattr(string_index, "tantivy", None)
    assert open_index(data) is None
    assert re.search(r"all tokens are searched: pip install -e .*\[trace\]", lines[0])
