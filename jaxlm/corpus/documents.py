"""Prepared documents on disk: parquet files with columns `id`, `text` and `meta` (JSON), in groups of bounded size."""

import bisect
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.config import ConfigError, RunError
from jaxlm.corpus.stage import Document
from jaxlm.host import files

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("meta", pa.string())])
GROUP_BYTES = 8 << 20
_BATCH_ROWS = 256  # read at a time
MIXTURE = "mixture.json"


class TableWriter:
    """Writes a parquet file row by row, in groups of `most` rows, so that a reader holds only one group in memory."""

    def __init__(self, path: pathlib.Path, schema: pa.Schema, most: int, compression: str = "zstd", **options: object):
        self._schema, self._most, self._rows = schema, most, []
        self._writer = pq.ParquetWriter(path, schema, compression=compression, **options)

    def add(self, row: tuple) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._most:
            self.flush()

    def flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(self._schema)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        self.flush()
        self._writer.close()


class DocumentWriter:
    """Writes documents to a file, which appears at `path` when `close` is called."""

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._table = TableWriter(self._part, SCHEMA, sys.maxsize, compression_level=1)
        self._bytes = 0

    def add(self, document: Document) -> None:
        """Appends a document. Drops metadata that is not a string or a number."""
        meta = {k: v for k, v in sorted(document.metadata.items()) if isinstance(v, str | int | float)}
        self._table.add((document.id, document.text, json.dumps(meta, ensure_ascii=False)))
        self._bytes += len(document.text)
        if self._bytes >= GROUP_BYTES:
            self._table.flush()
            self._bytes = 0

    def close(self) -> None:
        """Finishes the file and moves it to its path."""
        self._table.close()
        files.settle(self._part, self._path)


def read_documents(path: pathlib.Path) -> Iterator[Document]:
    """Yields the documents of one file; holds some hundreds at a time. Raises RunError if the file is damaged."""
    row = itertools.count()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                columns = (batch.column(name).to_pylist() for name in SCHEMA.names)
                for doc_id, text, meta in zip(*columns, strict=True):
                    yield Document(text, doc_id, files.json_of(meta), next(row))
    except (pa.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None):  # from the file system: Arrow's errors about damage have no errno
            raise
        raise _damaged(path, str(error).splitlines()[0]) from None


def read_rows(path: pathlib.Path, rows: Iterable[int]) -> Iterator[Document]:
    """Yields the documents of a file at `rows`, which are sorted; reads each group of rows that holds some once."""
    with pq.ParquetFile(path) as file:
        sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        firsts = list(itertools.accumulate(sizes, initial=0))
        for group, here in itertools.groupby(rows, key=lambda row: bisect.bisect_right(firsts, row) - 1):
            table = file.read_row_group(group)
            for row in here:
                values = table.slice(row - firsts[group], 1).to_pylist()[0]
                yield Document(values["text"], values["id"], files.json_of(values["meta"]), row)


def describe(path: pathlib.Path, root: pathlib.Path) -> dict[str, str | int]:
    """Returns a file's entry in the manifest: its name below `root`, size, sha256 and number of documents."""
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    entry = {"file": path.relative_to(root).as_posix(), "size": path.stat().st_size, "sha256": sha256}
    return entry | {"documents": pq.read_metadata(path).num_rows}


def verify(path: pathlib.Path, sha256: str) -> None:
    """Raises RunError if the sha256 of the file differs from `sha256`."""
    with path.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != sha256:
            raise _damaged(path, "its sha256 differs")


def _damaged(path: pathlib.Path, why: str) -> RunError:
    return RunError(f"{path} is damaged ({why}): copy it again, or delete its data.dir and prepare again")


def read_texts(paths: Iterable[pathlib.Path]) -> Iterator[tuple[str, str]]:
    return ((document.id, document.text) for path in paths for document in read_documents(path))


def within(texts: Iterable[tuple[str, str]], max_bytes: int) -> Iterator[tuple[str, str]]:
    """Yields the first (id, text) pairs that together fit in `max_bytes` of UTF-8, at least one; 0 = all."""
    n_bytes = 0
    for doc_id, text in texts:
        before, n_bytes = n_bytes, n_bytes + len(text.encode())
        if before and 0 < max_bytes < n_bytes:
            return
        yield doc_id, text


def write_mixture(root: pathlib.Path, weights: Mapping[str, float]) -> None:
    """Saves the weights of a data directory's sources, for configs that name no sources."""
    files.write_atomically(root / MIXTURE, (json.dumps(dict(weights), indent=1) + "\n").encode())


def mixture(root: pathlib.Path) -> dict[str, float]:
    """Returns the weights that `write_mixture` saved; {} if there are none."""
    path = root / MIXTURE
    try:
        weights = files.json_of(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        weights = {"": None}
    if not all(map(files.is_number, weights.values())):
        raise ConfigError(f"{path} is damaged: copy it again, or delete it and give the weights in the config")
    return weights


def find(data_dir: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns source -> its files of prepared documents in a data directory; {} if there are none."""
    folders = sorted(path for path in (data_dir / "documents").glob("*") if path.is_dir())
    return {folder.name: sorted(folder.glob("*.parquet")) for folder in folders}
