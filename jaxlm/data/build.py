"""From sources to a finished data directory: read, hold out, train the tokenizer, shuffle, encode, write.

Every source is read once, into a spill file beside the result; everything after works from the spill, in a shuffled
order. Memory: 28 bytes a document, one batch of texts (about 4 MB), and the tokenizer's training sample. Disk: the
text once more while building. The bytes of all files depend only on the texts and the settings.
"""

import array
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus import sources
from jaxlm.data import rows, shards
from jaxlm.data.tokenizer import Tokenizer, train_tokenizer

_SPILL = ".spill.tmp"
_BATCH_BYTES = 4 << 20
_VERSION = 1  # raise it when the same settings begin to give other bytes

Reader = Callable[["Source", sources.SourceStats], Iterator[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A named source: `spec` as in `sources.py`, its `weight` in the mixture, and the field that holds the text."""

    name: str
    spec: str
    weight: float
    text_key: str = "text"


@dataclasses.dataclass(frozen=True)
class BuildSettings:
    """How a data directory is made.

    Attributes:
      vocab_size: ids in all, the five ChatML tokens included when `chat_tokens`.
      seed: of the document order and of what is held out.
      val_fraction: share of each source's documents to hold out (at least one), by hash of content, so that exact
        duplicates fall on one side.
      tokenizer_path: a SentencePiece model to use instead of training one (its size must be `vocab_size`).
      tokenizer_sample_bytes: text for training the tokenizer, spread over the sources by weight.
      block_tokens: tokens a record. shard_blocks: records a file.
      max_source_bytes: cap on the text of each source; None for all of it.
      tfds_dir: TFDS's data_dir.
    """

    vocab_size: int
    chat_tokens: bool
    seed: int = 0
    val_fraction: float = 0.01
    tokenizer_path: str | None = None
    tokenizer_sample_bytes: int = 64 << 20
    block_tokens: int = 8192
    shard_blocks: int = 8192
    max_source_bytes: int | None = None
    tfds_dir: str | None = None


def build_data(
    path: str | os.PathLike,
    source_list: Sequence[Source],
    settings: BuildSettings,
    *,
    read: Reader | None = None,
    recipe_extra: Mapping[str, str] | None = None,
    log: Callable[[str], None] = print,
) -> shards.DataDir:
    """Makes a data directory and opens it; when it is already there by the same recipe, only opens it.

    Args:
      path: the directory; other files in it are left alone.
      source_list: names must differ; weights may change later without a rebuild.
      settings: see there.
      read: yields the (doc_id, text) of a source, filling its stats; a cleaning pipeline goes here. Default:
        `iterate_documents`.
      recipe_extra: what else decides the content (settings of `read`, signatures of its files), compared likewise.
      log: called with a line of progress for people.

    Raises ConfigError for bad settings or sources, for a directory built by another recipe (naming what differs), and
    when another process is building it. After a crash the next call starts anew.
    """
    _check(source_list, settings)
    root = pathlib.Path(path)
    signed = read is None

    def finished() -> shards.DataDir | None:
        if not (root / shards.MANIFEST).exists():
            return None
        data = shards.open_data(root)
        built = data.manifest["recipe"]
        _compare_recipes(root, built, _recipe(source_list, settings, signed, recipe_extra or {}, built))
        log(f"data in {root} is complete")
        return data

    if data := finished():  # without the lock: many runs may share it, and it may lie on a read-only disk
        return data
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"data.dir={root} can't be made: {e.strerror or e}") from None
    with _lock(root):
        if data := finished():
            return data
        recipe = _recipe(source_list, settings, signed, recipe_extra or {}, {})
        shards.clear_leftovers(root)
        try:
            manifest = _build(root, source_list, settings, read or _default_reader(settings), log)
        finally:
            (root / _SPILL).unlink(missing_ok=True)
        shards.write_manifest(root, {"recipe": recipe, **manifest})
    return shards.open_data(root)


def _check(source_list: Sequence[Source], settings: BuildSettings) -> None:
    names = [source.name for source in source_list]
    if not names:
        raise ConfigError("no data source is given; name at least one")
    for name in names:
        if not name or name != pathlib.PurePath(name).name or name.startswith(".") or names.count(name) > 1:
            raise ConfigError(f"source name '{name}' must be unique, and usable as the name of a folder")
    if not 0 < settings.val_fraction < 1:
        raise ConfigError(f"val_fraction is {settings.val_fraction}; it must lie between 0 and 1")
    if settings.block_tokens < 1 or settings.shard_blocks < 1:
        raise ConfigError("block_tokens and shard_blocks must be at least 1")
    rows.normalise_mixture({source.name: source.weight for source in source_list}, names)


def _recipe(
    source_list: Sequence[Source],
    settings: BuildSettings,
    signed: bool,
    extra: Mapping[str, str],
    built: Mapping[str, str],
) -> dict[str, str]:
    """What decides the bytes, the texts themselves aside; all strings. Weights are left out: they may change freely.

    With `signed`, names and sizes of the sources' files count. What is no longer here (finished data is often carried to
    another machine without its sources) counts as in `built`.
    """
    recipe = {"version": str(_VERSION)}
    for field in dataclasses.fields(settings):
        if field.name not in ("tokenizer_path", "tfds_dir"):
            recipe[field.name] = str(getattr(settings, field.name))
    recipe["tokenizer"] = "trained on these sources"
    if path := settings.tokenizer_path:
        absent = "tokenizer" in built and not os.path.exists(path)
        recipe["tokenizer"] = built["tokenizer"] if absent else Tokenizer.load(path).sha256
    for source in source_list:
        where, files = f"source {source.name}", f"files of {source.name}"
        recipe[where] = source.spec
        recipe[f"text_key of {source.name}"] = source.text_key
        if not signed:
            continue
        try:
            recipe[files] = sources.source_signature(source.spec)
        except ConfigError:
            if files not in built:
                raise
            recipe[files] = built[files]
            continue
        if recipe[files] and os.path.realpath(built.get(where, "")) == os.path.realpath(source.spec):
            recipe[where] = built[where]  # the same place, however its path is written
    return {**recipe, **{key: str(value) for key, value in extra.items()}}


def _compare_recipes(root: pathlib.Path, built: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for key in [*wanted, *(key for key in built if key not in wanted)]:
        if built.get(key) != wanted.get(key):
            raise ConfigError(
                f"the data in {root} was built with {key} = {built.get(key)}, now it is {wanted.get(key)}; "
                "set another data.dir, or delete that one to rebuild it"
            )


@contextlib.contextmanager
def _lock(root: pathlib.Path) -> Iterator[None]:
    """Keeps two processes from building the same directory; the system lets go when a process dies."""
    with open(root / ".lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is building {root}; wait for it or set another data.dir") from None
        except OSError:
            pass  # some network file systems have no locks; a single builder is safe without
        yield


def _default_reader(settings: BuildSettings) -> Reader:
    def read(source: Source, stats: sources.SourceStats) -> Iterator[tuple[str, str]]:
        return sources.iterate_documents(
            source.spec,
            text_key=source.text_key,
            tfds_dir=settings.tfds_dir,
            max_bytes=settings.max_source_bytes,
            stats=stats,
        )

    return read


class _Spill:
    """The documents of one source: text in a file, places in memory (28 bytes each)."""

    def __init__(self, file: io.BufferedRandom, documents: Iterator[tuple[str, str]], key: bytes):
        self._file = file
        self._offset, self._id_len, self._len = array.array("Q"), array.array("I"), array.array("Q")
        hashes = array.array("Q")
        file.seek(0, os.SEEK_END)
        at = file.tell()
        for doc_id, text in documents:
            raw_id, raw = doc_id.encode("utf-8", "replace"), text.encode()
            file.write(raw_id + raw)
            self._offset.append(at)
            self._id_len.append(len(raw_id))
            self._len.append(len(raw))
            # Spacing does not count, so that a re-wrapped copy of a held-out document is held out too.
            digest = hashlib.blake2b(b" ".join(raw.split()), digest_size=8, key=key).digest()
            hashes.append(struct.unpack("<Q", digest)[0])
            at += len(raw_id) + len(raw)
        file.flush()
        self.hashes = np.frombuffer(hashes, np.uint64) if len(hashes) else np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._offset)

    def length(self, i: int) -> int:
        """Bytes of text of document i."""
        return self._len[i]

    def read(self, i: int) -> tuple[str, str]:
        """(doc_id, text) of document i."""
        self._file.seek(self._offset[i])
        raw = self._file.read(self._id_len[i] + self._len[i])
        return raw[: self._id_len[i]].decode(), raw[self._id_len[i] :].decode()


def _held_out(name: str, hashes: np.ndarray, fraction: float) -> np.ndarray:
    """bool[documents]: the held-out ones, at least one and not all."""
    held_out = hashes < np.uint64(fraction * 2**64)
    if not held_out.any():
        held_out = hashes == hashes.min()
    if held_out.all():
        lowest = hashes == hashes.min()
        if lowest.all():
            raise ConfigError(
                f"source '{name}' has only one document, or copies of one; split it into several files or a "
                "jsonl, so that one can be held out"
            )
        held_out = lowest
    return held_out


def _build(
    root: pathlib.Path, source_list: Sequence[Source], settings: BuildSettings, read: Reader, log: Callable[[str], None]
) -> dict:
    """Writes all files but the manifest, and returns it."""
    with open(root / _SPILL, "wb+") as file:
        spills, stats, held_out, order = {}, {}, {}, {}
        for source in source_list:
            began, stats[source.name] = time.perf_counter(), sources.SourceStats()
            key = f"jaxlm/{settings.seed}".encode()
            spill = _Spill(file, read(source, stats[source.name]), key)
            if not len(spill):
                raise ConfigError(f"source '{source.name}' gave no document; check {source.spec}")
            spills[source.name] = spill
            held_out[source.name] = _held_out(source.name, spill.hashes, settings.val_fraction)
            order[source.name] = rows.permute(
                np.arange(len(spill)), len(spill), f"{settings.seed}/documents/{source.name}"
            )
            log(f"read {source.name}: {stats[source.name].summary()} ({time.perf_counter() - began:.1f} s)")
        began = time.perf_counter()
        shares = rows.normalise_mixture({s.name: s.weight for s in source_list}, [s.name for s in source_list])
        sample = _sample(spills, held_out, order, {name: float(share) for name, share in shares.items()}, settings)
        coder = _tokenizer(settings, sample)
        log(f"tokenizer: {coder.vocab_size:,} ids ({time.perf_counter() - began:.1f} s)")
        files = _write_tokenizer(root, coder)
        entries = {}
        for source in source_list:
            began, name = time.perf_counter(), source.name
            splits = _write_source(root, name, spills[name], held_out[name], order[name], coder, settings)
            entries[name] = {"spec": source.spec, "read": dataclasses.asdict(stats[name]), **splits}
            n_bytes, n_tokens = (splits["train"][key] + splits["val"][key] for key in ("bytes", "tokens"))
            log(
                f"wrote {name}: {splits['train']['tokens']:,} tokens to train on, {splits['val']['tokens']:,} held out;"
                f" {n_bytes / n_tokens:.2f} bytes a token ({time.perf_counter() - began:.1f} s)"
            )
    return {
        "tokenizer": {
            "sha256": coder.sha256,
            "vocab_size": coder.vocab_size,
            "eos_id": coder.eos_id,
            "chat_tokens": settings.chat_tokens,
        },
        "dtype": shards.token_dtype(coder.vocab_size),
        "block_tokens": settings.block_tokens,
        "mixture": {source.name: source.weight for source in source_list},
        "files": files,
        "sources": entries,
    }


def _sample(
    spills: Mapping[str, _Spill],
    held_out: Mapping[str, np.ndarray],
    order: Mapping[str, np.ndarray],
    shares: Mapping[str, float],
    settings: BuildSettings,
) -> Iterator[str]:
    """Texts to train the tokenizer on: of each source its share of the sample, in shuffled order, nothing held out."""
    for name, share in shares.items():
        left = int(share * settings.tokenizer_sample_bytes)
        for i in order[name].tolist():
            if left <= 0:
                break
            if not held_out[name][i]:
                yield spills[name].read(i)[1][:left]
                left -= spills[name].length(i)


def _tokenizer(settings: BuildSettings, sample: Iterator[str]) -> Tokenizer:
    if settings.tokenizer_path is None:
        return train_tokenizer(sample, vocab_size=settings.vocab_size, chat_tokens=settings.chat_tokens)
    coder = Tokenizer.load(settings.tokenizer_path)
    if coder.vocab_size != settings.vocab_size:
        raise ConfigError(
            f"{settings.tokenizer_path} has {coder.vocab_size} ids, {settings.vocab_size} are asked for: use one size"
        )
    if settings.chat_tokens:
        coder.id_of("<|im_start|>")
    return coder


def _write_tokenizer(root: pathlib.Path, coder: Tokenizer) -> list[dict]:
    lengths = io.BytesIO()
    np.save(lengths, coder.token_bytes())
    entries = []
    for name, content in ((shards.TOKENIZER, coder.model_bytes), (shards.TOKEN_BYTES, lengths.getvalue())):
        shards.write_atomically(root / name, content)
        entries.append({"file": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    return entries


def _write_source(
    root: pathlib.Path,
    name: str,
    spill: _Spill,
    held_out: np.ndarray,
    order: np.ndarray,
    coder: Tokenizer,
    settings: BuildSettings,
) -> dict[str, dict]:
    """Encodes a source in shuffled order into its two streams; returns the manifest's entries of both."""
    writers = {
        split: shards.StreamWriter(
            root,
            split,
            name,
            eos_id=coder.eos_id,
            dtype=shards.token_dtype(coder.vocab_size),
            block_tokens=settings.block_tokens,
            shard_blocks=settings.shard_blocks,
        )
        for split in shards.SPLITS
    }
    for batch in _batches(order.tolist(), spill):
        documents = [spill.read(i) for i in batch]
        coded = coder.encode_batch([text for _, text in documents])
        for i, (doc_id, _), ids in zip(batch, documents, coded, strict=True):
            writers["val" if held_out[i] else "train"].add(doc_id, ids, spill.length(i))
    return {split: writer.finish() for split, writer in writers.items()}


def _batches(order: Sequence[int], spill: _Spill) -> Iterator[list[int]]:
    batch, size = [], 0
    for i in order:
        batch.append(i)
        size += spill.length(i)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
