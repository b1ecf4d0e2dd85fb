"""An index of a data directory's text: in which documents a string may be. Needs tantivy, the extra `trace`.

The decoded text of each stream is cut into blocks that overlap, and tantivy indexes each block's byte triples. A block that
has all triples of a string may hold the string; `search` then looks. tantivy does not check its files, so `_DIGESTS` has the
sha256 of each, compared when the index is opened. It is written last: a folder without it is no index.
"""

import bisect
import contextlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from jaxlm.data.shards import search
from jaxlm.data.shards.shards import DataDir
from jaxlm.data.shards.verify import file_sha256
from jaxlm.host import files
from jaxlm.host.console import Tell, say, working
from jaxlm.host.errors import pip_install

try:
    import tantivy
except ImportError:  # the extra `trace` is not installed, or its wheel is another machine's
    tantivy = None

SHORTEST = 3  # bytes of a string that can be looked up
# Bytes. Small data has few blocks, and a list of all its triples takes as much as they do.
_BLOCKS = {"small": 128 << 10, "large": 48 << 10}
_OVERLAP = 1 << 10  # bytes of two blocks; of a longer string the first `_OVERLAP` bytes are looked up
_PLACE = ("stream", "first", "stop")  # of a block: its stream's number, the range of tokens of its documents
_DIGESTS = "sha256.json"
_FORMAT = (
    2  # raised when folding, decoding or `_OVERLAP` changes: older indexes are built again; blocks may be of any size
)
_CACHE = "~/.cache/jaxlm/index"  # for data that others own, or that can't be written
_TOGETHER = 1365  # blocks of one of tantivy's indexes: it holds them in memory, and merging its files would take more
_HEAP = 64_000_000  # bytes of tantivy's writer
# Tokens: of fewer, a list of all triples is large beside the rest; so one list, folded, of larger blocks.
_SMALL = 16 << 20
_WAIT_S = 3600.0  # for another process that builds the same index


class StringIndex:
    def __init__(self, data: DataDir, folder: pathlib.Path):
        self._streams, self._searchers, self._folds = search.streams(data), [], _small(data)
        for part in sorted(folder.glob("*/")):
            index = tantivy.Index.open(str(part))
            index.config_reader("manual")  # by default a thread of each watches its folder
            self._searchers.append(index.searcher())

    def places(self, needle: bytes) -> search.Places:
        """Returns the places of the documents that may hold a string of at least `SHORTEST` bytes."""
        text = (needle.lower() if self._folds else needle)[:_OVERLAP].decode("latin-1")
        triples = {text[at : at + SHORTEST] for at in range(len(text) - SHORTEST + 1)}
        terms = [(tantivy.Occur.Must, tantivy.Query.term_query(_schema(), "text", triple)) for triple in triples]
        query, found = tantivy.Query.boolean_query(terms), []
        for searcher in self._searchers:
            # In the order of a field no block is scored.
            hits = searcher.search(query, limit=searcher.num_docs, count=False, order_by_field="first").hits
            blocks = [block for _, block in hits]
            found += zip(*(searcher.fast_field_values(name, blocks) for name in _PLACE), strict=True)
        places: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for stream, first, stop in sorted(found):
            ranges = places.setdefault(self._streams[stream], [])
            if ranges and first <= ranges[-1][1]:  # neighbours share documents
                first, stop = ranges[-1][0], max(stop, ranges.pop()[1])
            ranges.append((first, stop))
        return places


def _small(data: DataDir) -> bool:
    return search.tokens_to_search(data) < _SMALL


def _schema() -> "tantivy.Schema":
    schema = tantivy.SchemaBuilder().add_text_field("text", tokenizer_name="triples", index_option="basic")
    for name in _PLACE:
        schema.add_integer_field(name, fast=True)
    return schema.build()


def open_index(data: DataDir) -> StringIndex | None:
    """Opens the index of the data, or builds it. None, with a line that says why, if there can be none."""
    if not tantivy:
        say(f"all tokens are searched: {pip_install('trace')} adds an index, by which this takes a moment")
        return None
    mine = data.path.stat().st_uid == os.geteuid() and os.access(data.path, os.W_OK)
    home = data.path / "index" if mine else pathlib.Path(_CACHE).expanduser()
    folder = home / data.sha256[:16]
    try:
        if not _sound(folder):
            home.mkdir(parents=True, exist_ok=True)
            with files.lock(home, "builds an index in", "data", wait_s=_WAIT_S):
                if not _sound(folder):
                    _build(data, folder)
        return StringIndex(data, folder)
    except (OSError, ValueError) as error:  # ValueError: tantivy's
        say(f"no index in {home} ({error}): all tokens are searched")
        return None


def _made_by() -> str:
    return f"{_FORMAT}, tantivy {tantivy.__version__}"


def _sound(folder: pathlib.Path) -> bool:
    """True if all files of an index are as they were written."""
    stored = files.json_there(folder / _DIGESTS)
    with contextlib.suppress(OSError, *files.MANGLED), ThreadPoolExecutor(files.threads()) as pool:
        digests = pool.map(file_sha256, (folder / name for name in stored["files"]))
        return stored == {"by": _made_by(), "files": dict(zip(stored["files"], digests, strict=True))}
    return False


def _build(data: DataDir, folder: pathlib.Path) -> None:
    """Builds the index in `folder`, in place of those of older data beside it. Removes what can't be finished.

    Raises OSError or, as tantivy does, ValueError if a file can't be written.
    """
    if folder.exists():
        say(f"the index {folder} is damaged, unfinished or of another version: it is built again")
    for old in folder.parent.iterdir() if folder.parent.parent == data.path else [folder]:
        shutil.rmtree(old, ignore_errors=True)
    tokens = search.tokens_to_search(data)
    threads = 1 if _small(data) else min(2, files.cores())
    try:
        with working("building an index of the text", tokens, "tokens") as tell:
            blocks = _blocks(data, tell)
            for number, first in enumerate(blocks):
                together = itertools.chain([first], itertools.islice(blocks, _TOGETHER - 1))
                _write(folder / f"{number:06d}", together, threads)
        names = [path.relative_to(folder).as_posix() for path in folder.glob("*/*") if path.suffix != ".lock"]
        stored = {"by": _made_by(), "files": {name: file_sha256(folder / name) for name in names}}
        files.write_atomically(folder / _DIGESTS, json.dumps(stored).encode())
    except BaseException:  # ctrl-C too
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(part: pathlib.Path, blocks: Iterable[dict[str, str | int]], threads: int) -> None:
    """Writes an index of these blocks."""
    part.mkdir(parents=True)
    index = tantivy.Index(_schema(), str(part))
    triples = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.ngram(SHORTEST, SHORTEST)).build()
    index.register_tokenizer("triples", triples)
    writer = index.writer(_HEAP, threads)
    try:
        for block in blocks:
            writer.add_document(tantivy.Document(**block))
        writer.commit()
    finally:
        del writer  # waits for its threads, which write into the folder
        files.trim_memory()  # glibc keeps what each thread freed: 120 MB in a gigabyte


def _blocks(data: DataDir, tell: Tell) -> Iterator[dict[str, str | int]]:
    """Yields the blocks of all streams: the `text` as latin-1, a character a byte, and `_PLACE`."""
    decode, done, small = data.decoder(), 0, _small(data)
    size = _BLOCKS["small" if small else "large"]
    for number, stream in enumerate(search.streams(data)):
        for *_, group, ids_N in search.documents(data, *stream):
            raw, ends_N1 = decode(ids_N)
            text = (raw.lower() if small else raw).decode("latin-1")
            begins = ends_N1[[each.start - group[0].start for each in group]].tolist()
            for begin in range(0, len(raw), size - _OVERLAP):
                first = group[bisect.bisect_right(begins, begin) - 1].start
                last = group[bisect.bisect_left(begins, begin + size) - 1]
                place = {"stream": number, "first": first, "stop": last.start + last.tokens}
                yield place | {"text": text[begin : begin + size]}
            tell(done := done + len(ids_N))
