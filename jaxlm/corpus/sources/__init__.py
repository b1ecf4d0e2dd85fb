"""Documents of a source: `(doc_id, text)` pairs, from files, a TFDS dataset or the embedded corpus.

A source is named by one string:

- `embedded:prose`, `embedded:math`, `embedded:code`: what every installation has (see `embedded.py`);
- `tfds:NAME` or `tfds:NAME:SPLIT`, with `?key=FEATURE` when the text is not in `text`: a prepared TFDS dataset in
  ArrayRecord form;
- anything else is a path: a file, a folder (read recursively) or a glob of .txt, .jsonl, .jsonl.gz and .parquet.

The doc_id leads back to the source: `a/b.jsonl:LINE` (from 1), `b.parquet:ROW` (from 0), `notes.txt`, `notes.txt@BYTE`,
`tfds:name/split/INDEX`, `numpy.linalg.norm`.
"""

import dataclasses
import glob
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import embedded

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
TXT_WHOLE_BYTES = 1 << 18
TXT_PART_BYTES = 1 << 16
_EXAMPLES = 5


@dataclasses.dataclass
class SourceStats:
    """What reading a source met. `skipped` counts lost records by reason; `examples` names the first few."""

    documents: int = 0
    bytes: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    repaired: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list)

    def skip(self, reason: str, doc_id: str) -> None:
        """Counts a record that is left out."""
        self._note(self.skipped, reason, doc_id)

    def repair(self, reason: str, doc_id: str) -> None:
        """Counts a record that is kept in a changed form."""
        self._note(self.repaired, reason, doc_id)

    def _note(self, counts: dict[str, int], reason: str, doc_id: str) -> None:
        counts[reason] = counts.get(reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{doc_id}: {reason}")

    def summary(self) -> str:
        """One line for people."""
        line = f"{self.documents:,} documents, {self.bytes / 1e6:.1f} MB"
        for verb, counts in (("skipped", self.skipped), ("repaired", self.repaired)):
            for reason, count in counts.items():
                line += f"; {verb} {count:,}: {reason}"
        return line + (f" (first: {self.examples[0]})" if self.examples else "")


def iterate_documents(
    spec: str,
    *,
    text_key: str = "text",
    tfds_dir: str | None = None,
    max_bytes: int | None = None,
    stats: SourceStats | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (doc_id, text) of a source in a fixed order. The text is non-empty and encodes as UTF-8.

    Args:
      spec: the source, as in this module's docstring.
      text_key: field of .jsonl and .parquet records that holds the text.
      tfds_dir: TFDS's data_dir (default: TFDS's own).
      max_bytes: stop after this many bytes of text (embedded sources have a default of their own).
      stats: filled while reading; a broken record costs itself alone and is counted here.

    Raises ConfigError for a source that does not exist, holds no such field or yields no document.
    """
    stats = SourceStats() if stats is None else stats
    if spec.startswith("embedded:"):
        documents = embedded.iterate_embedded(spec.removeprefix("embedded:"), max_bytes)
    elif spec.startswith("tfds:"):
        documents = _iterate_tfds(spec, tfds_dir)
    else:
        documents = _iterate_files(spec, text_key, stats)
    for doc_id, text in documents:
        if not text.isascii():
            clean = text.encode("utf-8", "replace").decode()
            if clean != text:
                stats.repair("lone surrogates became '?'", doc_id)
            text = clean
        if not text.strip():
            stats.skip("empty", doc_id)
            continue
        n_bytes = len(text) if text.isascii() else len(text.encode())
        if max_bytes is not None and stats.bytes + n_bytes > max_bytes and stats.documents:
            return
        stats.documents += 1
        stats.bytes += n_bytes
        yield doc_id, text
    if not stats.documents:
        raise ConfigError(f"source '{spec}' gave no document ({stats.summary()}); check the path and text_key")


def source_signature(spec: str) -> str:
    """What a rebuild compares to see whether a source's files changed: names and sizes, one line; empty if not files.

    An edit that keeps a file's size goes unseen.
    """
    if spec.startswith(("embedded:", "tfds:")):
        return ""
    listing = [f"{name}={path.stat().st_size}" for name, path in find_files(spec)]
    return f"crc32 {zlib.crc32(';'.join(listing).encode()):08x} of {len(listing)} file names and sizes"


def find_files(spec: str) -> list[tuple[str, pathlib.Path]]:
    """The files of a path source, sorted: (name relative to the source's folder, path). ConfigError when none."""
    path = pathlib.Path(spec).expanduser()
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(
                f"source '{spec}' is none of {', '.join(SUFFIXES)}; convert it, or name a folder that holds such"
            )
        return [(path.name, path)]
    if path.is_dir():
        base, found = path, [p for p in path.rglob("*") if p.is_file()]
    elif glob.has_magic(spec):
        found = [pathlib.Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
        fixed = [part for part in path.parts[: next(i for i, p in enumerate(path.parts) if glob.has_magic(p))]]
        base = pathlib.Path(*fixed) if fixed else pathlib.Path()
    else:
        raise ConfigError(f"source '{spec}': no such file or folder; give a path, a glob, embedded:NAME or tfds:NAME")
    named = sorted((p.relative_to(base).as_posix(), p) for p in found if p.name.endswith(SUFFIXES))
    if not named:
        raise ConfigError(f"source '{spec}' has no file ending in {', '.join(SUFFIXES)}")
    return named


def _iterate_files(spec: str, text_key: str, stats: SourceStats) -> Iterator[tuple[str, str]]:
    for name, path in find_files(spec):
        if name.endswith(".txt"):
            yield from _iterate_txt(name, path, stats)
        elif name.endswith(".parquet"):
            yield from _iterate_parquet(name, path, text_key, stats)
        else:
            yield from _iterate_jsonl(name, path, text_key, stats)


def _iterate_txt(name: str, path: pathlib.Path, stats: SourceStats) -> Iterator[tuple[str, str]]:
    """One document a file; past 256 KiB it is cut at the first blank line after each 64 KiB, or line end after 128."""
    if path.stat().st_size <= TXT_WHOLE_BYTES:
        yield name, _to_text(path.read_bytes(), name, stats)
        return
    with path.open("rb") as f:
        start, part = 0, bytearray()
        for line in f:
            part += line
            blank = not line.strip() and len(part) >= TXT_PART_BYTES
            if blank or len(part) >= 2 * TXT_PART_BYTES:
                yield f"{name}@{start}", _to_text(bytes(part), f"{name}@{start}", stats)
                start, part = start + len(part), bytearray()
        if part:
            yield f"{name}@{start}", _to_text(bytes(part), f"{name}@{start}", stats)


def _to_text(raw: bytes, doc_id: str, stats: SourceStats) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        stats.repair("bytes that are not UTF-8 became U+FFFD", doc_id)
        return raw.decode("utf-8", "replace")


def _iterate_jsonl(name: str, path: pathlib.Path, key: str, stats: SourceStats) -> Iterator[tuple[str, str]]:
    records, seen_keys = 0, set()
    with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as f:
        lines = enumerate(f, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                break
            except (OSError, EOFError, zlib.error) as e:
                stats.skip(f"rest of the file unreadable ({e})", name)
                break
            doc_id = f"{name}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(_to_text(line, doc_id, stats))
            except (ValueError, RecursionError):
                stats.skip("malformed JSON line", doc_id)
                continue
            if not isinstance(record, dict) or not isinstance(record.get(key), str):
                stats.skip(f"no text in field '{key}'", doc_id)
                seen_keys.update(record if isinstance(record, dict) else ())
                continue
            records += 1
            yield doc_id, record[key]
    if not records and seen_keys:
        fields = ", ".join(sorted(map(str, seen_keys))[:10])
        raise ConfigError(f"{path} has no text in field '{key}'; its fields are {fields}: set text_key")


def _iterate_parquet(name: str, path: pathlib.Path, key: str, stats: SourceStats) -> Iterator[tuple[str, str]]:
    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        stats.skip(f"not a readable parquet file ({str(e).splitlines()[0]})", name)
        return
    if key not in table.schema_arrow.names:
        raise ConfigError(
            f"{path} has no column '{key}'; its columns are {', '.join(table.schema_arrow.names[:10])}: set text_key"
        )
    kind = table.schema_arrow.field(key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ConfigError(f"column '{key}' of {path} holds {kind}, not strings: set text_key")
    row = 0
    for batch in table.iter_batches(batch_size=1024, columns=[key]):
        for text in batch.column(0).to_pylist():
            if text is None:
                stats.skip(f"no text in field '{key}'", f"{name}:{row}")
            else:
                yield f"{name}:{row}", text
            row += 1


def _parse_tfds(spec: str) -> tuple[str, str, str]:
    """(name with config and version, split, feature) of `tfds:NAME[:VERSION][:SPLIT][?key=FEATURE]`."""
    match = re.fullmatch(r"tfds:([^:?]+(?::\d+\.\d+\.\d+)?)(?::([^?]+))?(?:\?key=(.+))?", spec)
    if not match:
        raise ConfigError(f"source '{spec}' is not of the form tfds:NAME[:SPLIT][?key=FEATURE]")
    return match[1], match[2] or "train", match[3] or "text"


def _iterate_tfds(spec: str, tfds_dir: str | None) -> Iterator[tuple[str, str]]:
    name, split, key = _parse_tfds(spec)
    import tensorflow_datasets as tfds  # slow to import, and most runs have no such source

    try:
        builder = tfds.builder(name, data_dir=tfds_dir, try_gcs=False)
    except Exception as e:
        reason = str(e).strip().splitlines()[0]
        raise ConfigError(
            f"source '{spec}': TFDS finds no such dataset in {tfds_dir or 'its data_dir'} ({reason})"
        ) from None
    if split.split("[")[0] not in builder.info.splits:
        have = (
            ", ".join(builder.info.splits)
            or "none: it is not prepared, run its download_and_prepare with file_format='array_record'"
        )
        raise ConfigError(f"source '{spec}': no split '{split}'; prepared are {have}")
    if key not in builder.info.features:
        raise ConfigError(
            f"source '{spec}': no feature '{key}'; it has {', '.join(sorted(builder.info.features))}: add ?key=NAME"
        )
    try:
        records = builder.as_data_source(split=split)
    except Exception as e:
        reason = str(e).strip().splitlines()[0]
        raise ConfigError(
            f"source '{spec}' cannot be read at random ({reason}); prepare it with file_format='array_record'"
        ) from None
    for i in range(len(records)):
        text = records[i][key]
        if not isinstance(text, bytes | str):
            raise ConfigError(f"source '{spec}': feature '{key}' is not text; add ?key=NAME")
        yield f"tfds:{name}/{split}/{i}", text.decode("utf-8", "replace") if isinstance(text, bytes) else text
