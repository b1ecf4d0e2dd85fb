"""The data directory: how streams of tokens are stored, opened, checked and read.

Each split of a source is a stream: shuffled documents, each begun by the separator (in recipe version 2: EOS after
each), cut into records of `block_tokens` in ArrayRecord files. manifest.json, written last, names every file with its
size and sha256.
"""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python import array_record_module

from jaxlm.config import ConfigError, RunError
from jaxlm.corpus.documents import TableWriter
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards.manifest import MANIFEST, SPLITS
from jaxlm.data.shards.verify import Verifier, file_sha256
from jaxlm.data.tokenizer import coder as coders
from jaxlm.data.tokenizer.decoder import Decoder
from jaxlm.host import files

TOKEN_BYTES = "token_bytes.npy"
DOCUMENTS = "documents.parquet"
# zstd takes 38% off 16-bit tokens; random reads run at 138M tokens/s a core instead of 230M, far beyond any need.
WRITER_OPTIONS = "group_size:1,zstd:1"
_INDEX_GROUP = 65536
_AT_ONCE = 32  # files checked at a time
_INDEX_SCHEMA = pa.schema(
    [("start", pa.int64()), ("tokens", pa.int64()), ("bytes", pa.int64()), ("doc_id", pa.string())]
)


class StreamWriter:
    """Writes one split of one source. Holds in memory one record and one row group of the document index."""

    def __init__(
        self, root: pathlib.Path, split: str, source: str, *, dtype: str, block_tokens: int, shard_blocks: int
    ):
        self._root, self._folder = root, root / split / source
        self._folder.mkdir(parents=True, exist_ok=True)
        self._dtype, self._block_tokens, self._shard_blocks = dtype, block_tokens, shard_blocks
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._shards: list[dict] = []
        self._writer = self._tmp = None
        self._in_shard = 0
        self._tokens = self._bytes = self._documents = 0
        self._starts: list[int] = []
        self._index_tmp = self._folder / (DOCUMENTS + ".tmp")
        self._index = TableWriter(self._index_tmp, _INDEX_SCHEMA, _INDEX_GROUP)

    def add(self, doc_id: str, ids: np.ndarray, n_bytes: int) -> None:
        """Appends a document: its ids from `ids.training_documents`, int[n], and the number of bytes of its text."""
        self._index.add((self._tokens, len(ids), n_bytes, doc_id))
        self._starts.append(self._tokens)
        self._pending.append(np.asarray(ids, self._dtype))
        self._pending_tokens += len(ids)
        self._tokens += len(ids)
        self._bytes += n_bytes
        self._documents += 1
        if self._pending_tokens >= self._block_tokens:
            self._flush_blocks(last=False)

    def _flush_blocks(self, last: bool) -> None:
        tokens = np.concatenate(self._pending) if self._pending else np.empty(0, self._dtype)
        end = len(tokens) if last else len(tokens) - len(tokens) % self._block_tokens
        for start in range(0, end, self._block_tokens):
            self._write_block(tokens[start : min(end, start + self._block_tokens)])
        self._pending, self._pending_tokens = [tokens[end:]], len(tokens) - end

    def _write_block(self, block: np.ndarray) -> None:
        if self._writer is None:
            self._tmp = self._folder / f"{len(self._shards):05d}.array_record.tmp"
            self._writer = array_record_module.ArrayRecordWriter(str(self._tmp), WRITER_OPTIONS)
            self._in_shard, self._shard_tokens = 0, 0
        with self._told():
            self._writer.write(block.tobytes())
        self._in_shard += 1
        self._shard_tokens += len(block)
        if self._in_shard == self._shard_blocks:
            self._close_shard()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raises RunError for what ArrayRecord raises where a file can't be written: a RuntimeError without an errno."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).partition(";")[0].removeprefix("write() failed: ")
            raise RunError(
                f"{self._tmp} can't be written ({why}): mend that, often by freeing room, and run the same command again"
            ) from None

    def _close_shard(self) -> None:
        if self._writer is None:
            return
        with self._told():
            self._writer.close()
        path = self._tmp.with_suffix("")
        files.settle(self._tmp, path)
        first = sum(shard["tokens"] for shard in self._shards)
        inside = bisect.bisect_left(self._starts, first + self._shard_tokens)
        self._shards.append(
            {**self._describe(path), "records": self._in_shard, "tokens": self._shard_tokens, "documents": inside}
        )
        self._starts = self._starts[inside:]
        self._writer = None

    def _describe(self, path: pathlib.Path) -> dict:
        name = path.relative_to(self._root).as_posix()
        return {"file": name, "size": path.stat().st_size, "sha256": file_sha256(path)}

    def finish(self) -> dict:
        """Closes everything and returns the split's entry for the manifest."""
        self._flush_blocks(last=True)
        self._close_shard()
        self._index.close()
        index = self._folder / DOCUMENTS
        files.settle(self._index_tmp, index)
        counts = {"documents": self._documents, "tokens": self._tokens, "bytes": self._bytes}
        return counts | {"index": self._describe(index), "shards": self._shards}


def clear_leftovers(root: pathlib.Path) -> None:
    """Removes the files of an interrupted build, found by their names. For folders without a manifest only."""
    for split in SPLITS:
        for pattern in ("*.array_record", "*.array_record.tmp", DOCUMENTS, DOCUMENTS + ".tmp"):
            for path in (root / split).glob(f"*/{pattern}"):
                path.unlink()


def token_dtype(vocab_size: int) -> str:
    """Returns the narrowest little-endian integer type that holds ids below `vocab_size`."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class TokenStream:
    """Reads one split of one source at any place. Thread-safe."""

    def __init__(self, data: "DataDir", source: str, split: str):
        self._data, self._label, entry = data, f"{data.path / split / source}", data.entry(source, split)
        self._dtype, self._block_tokens = data.manifest["dtype"], data.manifest["block_tokens"]
        self.tokens: int = entry["tokens"]
        self._shards, self.verifier = entry["shards"], data.verifier
        self._ends = list(itertools.accumulate(shard["records"] for shard in self._shards))
        self._readers: dict[str, array_record_module.ArrayRecordReader] = {}  # of files that are open

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) in the stored type.

        Raises IndexError beyond the stream; RunError if a file can't be read; DamagedData if it differs from the manifest.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self._label}, which has {self.tokens}")
        if start == stop:
            return np.empty(0, self._dtype)
        first, last = start // self._block_tokens, (stop - 1) // self._block_tokens
        blocks = [self._block(i) for i in range(first, last + 1)]
        offset = first * self._block_tokens
        tokens = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return tokens[start - offset : stop - offset]

    def shard(self, token: int) -> dict:
        return self._shards[bisect.bisect_right(self._ends, token // self._block_tokens)]

    def _block(self, i: int) -> np.ndarray:
        number = bisect.bisect_right(self._ends, i)
        shard = self._shards[number]
        position = i - self._ends[number] + shard["records"]

        def attempt() -> bytes:
            try:
                self.verifier.first_read(shard)
                return self._reader(shard).read([position])[0]
            except Exception:
                # A reader that failed once fails for ever.
                self._readers.pop(shard["file"], None)
                raise

        block = np.frombuffer(self.verifier.read(shard, f"record {i}", attempt), self._dtype)
        expected = min(self._block_tokens, self.tokens - i * self._block_tokens)
        if len(block) != expected:
            raise self.verifier.damaged(shard, f"record {i} holds {len(block)} tokens instead of {expected}")
        return block

    def _reader(self, shard: dict) -> array_record_module.ArrayRecordReader:
        reader = self._readers.get(shard["file"])
        if not reader:  # two threads may open two: one is dropped
            path = str(self._data.path / shard["file"])
            options = {
                "options": "readahead_buffer_size:0",
                "file_reader_buffer_size": 32 << 10,
            }  # records are far apart
            reader = self._readers[shard["file"]] = array_record_module.ArrayRecordReader(path, **options)
        return reader


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's place in its stream. `tokens` counts its separator too; `n_bytes` is the length of its text in UTF-8."""

    doc_id: str
    start: int
    tokens: int
    n_bytes: int


class DataDir:
    """An opened data directory. `separator_id` begins each document, and so each segment of a row."""

    as_before = ""  # see `coder.Encoded`

    def __init__(self, path: pathlib.Path, manifest: dict, sha256: str):
        self.path, self.manifest, self.sha256 = path, manifest, sha256
        self.eos_id: int = manifest["tokenizer"]["eos_id"]
        self.separator_id: int = manifest["tokenizer"].get("separator_id", self.eos_id)
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.sources: tuple[str, ...] = tuple(manifest["sources"])
        self.mixture: dict[str, float] = dict(manifest["mixture"])
        self.verifier = Verifier(path)

    def token_counts(self, split: str = "train") -> dict[str, int]:
        return {name: self.entry(name, split)["tokens"] for name in self.sources}

    def entry(self, source: str, split: str) -> dict:
        """Returns the manifest's entry of one split of one source. Raises ConfigError if there is no such source."""
        if source not in self.manifest["sources"]:
            raise ConfigError(f"{self.path} has no source '{source}'; it has {', '.join(self.sources)}")
        return self.manifest["sources"][source][split]

    def stream(self, source: str, split: str = "train") -> TokenStream:
        """Returns a reader of the source's tokens."""
        return TokenStream(self, source, split)

    def tokenizer(self) -> coders.Coder:
        """Returns the tokenizer that encoded the texts. Raises DamagedData if one of its files differs from the manifest."""
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> coders.Coder:
        names = coders.names(entry["file"] for entry in self.manifest["files"])
        if not {coders.JSON, coders.MODEL} & set(names):
            names.append(coders.MODEL)  # `content` says that it is not listed
        return coders.read({name: self.content(name) for name in names}, self.path)

    def decoder(self) -> Decoder:
        return Decoder(self.tokenizer().piece_bytes())

    def token_bytes(self) -> np.ndarray:
        """Returns each id's number of raw bytes, int32[vocab_size]; 0 for control tokens. Raises DamagedData."""
        lengths = np.load(io.BytesIO(self.content(TOKEN_BYTES)))
        if lengths.shape != (self.vocab_size,):
            raise ConfigError(
                f"{self.path / TOKEN_BYTES} has the shape {lengths.shape}, but {MANIFEST} a vocabulary of "
                f"{self.vocab_size}; copy both again or rebuild the data directory"
            )
        return lengths

    def content(self, name: str) -> bytes:
        """Returns the verified content of a file at the top of the directory."""
        entry = next((entry for entry in self.manifest["files"] if entry["file"] == name), None)
        if entry is None:
            raise ConfigError(f"{self.path / MANIFEST} does not list {name}; copy it again or rebuild it")
        return self.verifier.content(entry)

    def documents(self, source: str, split: str, start: int, stop: int) -> list[Document]:
        """Returns the documents that tokens [start, stop) belong to. Verifies the index first, or raises DamagedData."""
        entry = self.entry(source, split)["index"]
        if start >= stop:
            return []
        self.verifier.first_read(entry, always=True)
        file = str(self.path / entry["file"]), entry["sha256"]
        groups = _row_groups(*file)
        wanted = range(max(0, bisect.bisect_right(groups, start) - 1), bisect.bisect_left(groups, stop))
        documents: list[Document] = []
        for rows, starts in (_row_group(*file, group) for group in wanted):
            first, last = max(0, bisect.bisect_right(starts, start) - 1), bisect.bisect_left(starts, stop)
            columns = rows.slice(first, last - first).to_pydict()
            at_tokens_bytes_id = zip(*(columns[name] for name in _INDEX_SCHEMA.names), strict=True)
            documents += [Document(doc_id, at, tokens, size) for at, tokens, size, doc_id in at_tokens_bytes_id]
        return documents

    def named(self, source: str, split: str, doc_ids: Iterable[str]) -> Iterator[Document]:
        """Yields the documents with these ids, in their order. Verifies the index first, or raises DamagedData."""
        from pyarrow import compute  # here, because it takes a while to import

        entry, wanted = self.entry(source, split)["index"], pa.array(sorted(doc_ids), pa.string())
        self.verifier.first_read(entry, always=True)
        for rows in pq.ParquetFile(self.path / entry["file"]).iter_batches():
            for row in rows.filter(compute.is_in(rows["doc_id"], wanted)).to_pylist():
                yield Document(row["doc_id"], row["start"], row["tokens"], row["bytes"])

    def held_out_texts(self) -> dict[str, str]:
        """Returns source -> the sha256 of its held-out text, which older data gets once, in a file next to the manifest."""
        if manifests.HELD_OUT in self.manifest:
            return self.manifest[manifests.HELD_OUT]
        path = self.path / f"{manifests.HELD_OUT}.json"
        stored = files.json_there(path)
        if stored.get("manifest") == self.sha256 and isinstance(stored.get("texts"), dict):
            return stored["texts"]
        texts = {source: self._held_out_text(source) for source in self.sources}
        with contextlib.suppress(OSError):  # a read-only disk
            files.write_atomically(path, json.dumps({"manifest": self.sha256, "texts": texts}).encode())
        return texts

    def _held_out_text(self, source: str) -> str:
        decode, stream = self.decoder(), self.stream(source, "val")
        documents = self.documents(source, "val", 0, stream.tokens)
        digest = hashlib.sha256()
        for each in documents:
            raw, _ = decode(stream.read(each.start, each.start + each.tokens))
            if len(raw) != each.n_bytes:
                return ""
            manifests.add_text(digest, raw)
        return digest.hexdigest()

    def files(self) -> Iterable[dict]:
        """Yields the manifest's entry of every file: `file`, `size`, `sha256`, and for shards `records`."""
        yield from self.manifest["files"]
        for source in self.manifest["sources"].values():
            for split in SPLITS:
                yield source[split]["index"]
                yield from source[split]["shards"]


@functools.lru_cache(8)
def _row_groups(path: str, sha256: str) -> list[int]:
    """Returns the first token of each row group of an index of documents."""
    index = pq.ParquetFile(path).metadata
    return [index.row_group(g).column(0).statistics.min for g in range(index.num_row_groups)]


@functools.lru_cache(8)
def _row_group(path: str, sha256: str, group: int) -> tuple[pa.Table, list[int]]:
    """Returns (a row group of an index of documents, the first token of each)."""
    rows = pq.ParquetFile(path).read_row_group(group)
    return rows, rows.column(0).to_pylist()  # `to_numpy` imports pandas


def open_data(path: str | os.PathLike, check: bool = True) -> DataDir:
    """Opens a data directory. Checks sizes and numbers of records: a truncated ArrayRecord opens as an empty one.

    check: False to leave the shards to whoever reads them, where another process or a later call checks them all.

    Raises ConfigError if the manifest is missing or damaged; DamagedData if a file differs from it; RunError if one
    can't be read.
    """
    root = pathlib.Path(path)
    data = DataDir(root, *manifests.read(root))
    if check:
        _check_files(data)
    _check_tokenizer(data)
    return data


def _check_files(data: DataDir) -> None:
    """Checks files 32 at a time: one after the other, tens of thousands on a store far away take minutes.

    Raises the error of the first file in order.
    """
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda entry: _check_file(data, entry), data.files()):
            pass


def _check_tokenizer(data: DataDir) -> None:
    """Verifies the tokenizer and the lengths of its tokens, and that both agree with the manifest."""
    coder = data.tokenizer()
    stated = (data.vocab_size, data.eos_id, data.separator_id, data.manifest["dtype"])
    data.token_bytes()
    if (actual := (coder.vocab_size, coder.eos_id, coder.separator_id, token_dtype(coder.vocab_size))) != stated:
        raise ConfigError(
            f"{data.path / MANIFEST} is damaged: its vocab_size, eos_id, separator_id, dtype are {stated}, those of "
            f"its tokenizer {actual}; copy it again or rebuild the data directory"
        )


def _check_file(data: DataDir, entry: dict) -> None:
    path, damaged = data.path / entry["file"], data.verifier.damaged
    if not path.is_file():
        raise damaged(entry, "it is missing")
    if path.stat().st_size != entry["size"]:
        raise damaged(entry, f"it is {path.stat().st_size:,} bytes instead of {entry['size']:,}")
    if "records" in entry:
        records = data.verifier.read(entry, "the index", lambda: _count_records(path))
        if records != entry["records"]:
            raise damaged(entry, f"it has {records} records instead of {entry['records']}")


def _count_records(path: pathlib.Path) -> int:
    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        return reader.num_records()
    finally:
        reader.close()
