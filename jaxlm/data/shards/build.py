"""Makes a data directory from sources: holds documents out, trains the tokenizer, shuffles, encodes, writes.

Every source is read once, into an external shuffle: memory does not grow with the corpus, and the disk holds a second
copy of the text. The bytes of all files depend only on the texts and the settings.
"""

import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus import recipes
from jaxlm.corpus.sources.base import SourceStats
from jaxlm.corpus.sources.units import iterate_documents, source_signature
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards import shards, vocabulary
from jaxlm.data.shards.mixture import normalise_mixture
from jaxlm.data.tokenizer import coder as coders
from jaxlm.data.tokenizer import ids as ids_lib
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import train_tokenizer
from jaxlm.host import console, files
from jaxlm.host.console import Say

_BITS = 6  # 64 buckets a level
_HEADER = struct.Struct("<QQII")  # order, content hash, bytes of the id, bytes of the text
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014). It is one to one, so that no two positions have the same order."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Shuffle:
    """Yields documents in a random order, which `key` decides. Beyond `memory_bytes` of text they are on disk."""

    def __init__(self, folder: pathlib.Path, key: str, memory_bytes: int = 256 << 20, *, level: int = 0):
        self._folder, self._memory, self._level = folder, memory_bytes, level
        self._start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        self._buckets = [bytearray() for _ in range(1 << _BITS)]
        self._on_disk = [0] * (1 << _BITS)
        self._held = 0
        self.documents = 0

    def __len__(self) -> int:
        return self.documents

    def add(self, doc_id: str, text: str, content_hash: int) -> None:
        """Adds a document to the shuffle. `content_hash` (uint64) is yielded with the document later."""
        raw_id, raw = doc_id.encode("utf-8", "replace"), text.encode()
        order = _mix((self._start + self.documents * 0x9E3779B97F4A7C15) & _MASK)
        self._put(order, _HEADER.pack(order, content_hash, len(raw_id), len(raw)) + raw_id + raw)

    def _put(self, order: int, record: bytes) -> None:
        bucket = order >> (64 - _BITS * (self._level + 1)) & ((1 << _BITS) - 1)
        self._buckets[bucket] += record
        self._held += len(record)
        self.documents += 1
        if self._held > self._memory:
            self._spill()

    def _spill(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for i, bucket in enumerate(self._buckets):
            if bucket:
                with open(self._folder / f"{i:02d}", "ab") as file:
                    file.write(bucket)
                self._on_disk[i] += len(bucket)
                self._buckets[i] = bytearray()
        self._held = 0

    def __iter__(self) -> Iterator[tuple[str, bytes, int]]:
        """Yields (doc_id, text in UTF-8, content hash) of every document, in the random order."""
        if any(self._on_disk):
            self._spill()  # frees the memory for the bucket that is read
        for i, held in enumerate(self._buckets):
            if self._on_disk[i] > self._memory and _BITS * (self._level + 2) <= 64:
                yield from self._split(i)
            elif self._on_disk[i]:
                yield from _in_order((self._folder / f"{i:02d}").read_bytes())
            else:
                yield from _in_order(held)

    def _split(self, bucket: int) -> Iterator[tuple[str, bytes, int]]:
        """Yields a bucket larger than the memory, in order; first splits the bucket by the next bits of the orders."""
        inner = Shuffle(self._folder / f"{bucket:02d}.split", "", self._memory, level=self._level + 1)
        try:
            with open(self._folder / f"{bucket:02d}", "rb") as file:
                while head := file.read(_HEADER.size):
                    order, _, id_bytes, text_bytes = _HEADER.unpack(head)
                    inner._put(order, head + file.read(id_bytes + text_bytes))
            yield from inner
        finally:
            inner.close()

    def close(self) -> None:
        self._buckets = [bytearray() for _ in self._buckets]
        shutil.rmtree(self._folder, ignore_errors=True)


def _in_order(records: bytes | bytearray) -> Iterator[tuple[str, bytes, int]]:
    places, at = [], 0
    while at < len(records):
        order, content_hash, id_bytes, text_bytes = _HEADER.unpack_from(records, at)
        at += _HEADER.size
        places.append((order, at, id_bytes, text_bytes, content_hash))
        at += id_bytes + text_bytes
    places.sort()
    view = memoryview(records)
    for _, start, id_bytes, text_bytes, content_hash in places:
        middle = start + id_bytes
        yield bytes(view[start:middle]).decode(), bytes(view[middle : middle + text_bytes]), content_hash
    view.release()


_SPILL = ".spill.tmp"
_BATCH_BYTES = 4 << 20
_MEMORY = 256 << 20  # of text, over all sources
_VERSION = 4  # raise it when the same settings begin to give other bytes
# Versions of finished data that are still read. 2: EOS after each document instead of before; 3: no token joins a newline.
_READ = ("2", "3", "4")

Reader = Callable[["Source", SourceStats], Iterator[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of texts to train on."""

    name: str
    spec: str  # its path, as `jaxlm.corpus.sources` reads it
    weight: float
    text_key: str = "text"


@dataclasses.dataclass(frozen=True)
class BuildSettings:
    """Settings that decide the content of a data directory."""

    vocab_size: int  # with the five ChatML tokens of `chat_tokens`; 0: the data's, or `vocabulary.choose`
    chat_tokens: bool
    seed: int = 0  # -1: the data's, or 0
    val_fraction: float = 0.01  # of each source's documents, by a hash of the content: copies stay together
    tokenizer_path: str | None = None  # in place of training one
    tokenizer_model: str = "bpe"  # bpe or unigram
    tokenizer_sample_bytes: int = 64 << 20  # taken from the sources by weight
    block_tokens: int = 8192  # in a record
    shard_blocks: int = 8192  # records in a file
    max_source_bytes: int | None = None  # of text
    tfds_dir: str | None = None


def build_data(
    path: str | os.PathLike,
    source_list: Sequence[Source],
    settings: BuildSettings,
    *,
    read: Reader | None = None,
    recipe_extra: Mapping[str, str] | None = None,
    log: Say = print,
) -> shards.DataDir:
    """Makes a data directory and opens it; only opens it if the same recipe made it already.

    `read` yields the (doc_id, text) of a source and fills its stats. Raises ConfigError if settings are wrong, another
    recipe made the data, or another process is making it.
    """
    _check(source_list, settings)
    root = pathlib.Path(path)
    signed = read is None

    def finished() -> shards.DataDir | None:
        if not (root / shards.MANIFEST).exists():
            return None
        data = shards.open_data(root)
        built = data.manifest["recipe"]
        wanted = _recipe(source_list, settings, signed, recipe_extra or {}, built)
        told = {"made": f"the data in {root} was built", "manifest": root / shards.MANIFEST}
        recipes.check_same(built, wanted, **told, again="build it anew (what jaxlm prepare made stays)")
        log(f"data in {root} is complete")
        return data

    if data := finished():  # without the lock: many runs may share it, and it may lie on a read-only disk
        return data
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"data.dir={root} can't be made: {e.strerror or e}") from None
    with files.lock(root, "is writing", "data.dir"):
        if data := finished():
            return data
        settings = dataclasses.replace(settings, seed=max(settings.seed, 0))
        recipe = _recipe(source_list, settings, signed, recipe_extra or {}, {})
        shards.clear_leftovers(root)
        shutil.rmtree(root / _SPILL, ignore_errors=True)
        try:
            manifest = _build(root, source_list, settings, read or functools.partial(_read_plain, settings), log)
        finally:
            shutil.rmtree(root / _SPILL, ignore_errors=True)
        recipe["vocab_size"] = str(manifest["tokenizer"]["vocab_size"])
        manifests.write(root, {"recipe": recipe, **manifest})
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
    normalise_mixture({source.name: source.weight for source in source_list}, names)


def _recipe(
    source_list: Sequence[Source],
    settings: BuildSettings,
    signed: bool,
    extra: Mapping[str, str],
    built: Mapping[str, str],
) -> dict[str, str]:
    """Returns what, besides the texts, decides the bytes: no weights; if `signed`, names and sizes of the sources' files."""
    # Missing files count as in `built`: finished data is carried to other machines without its sources.
    version = built.get("version")
    recipe = {"version": version if version in _READ else str(_VERSION)}
    for field in dataclasses.fields(settings):
        if field.name not in ("tokenizer_path", "tokenizer_model", "tfds_dir"):
            recipe[field.name] = str(getattr(settings, field.name))
    recipe["vocab_size"] = str(settings.vocab_size or built.get("vocab_size", 0))
    recipe["block_tokens"] = built.get("block_tokens", str(settings.block_tokens))  # changes no token
    recipe["seed"] = str(settings.seed) if settings.seed >= 0 else built.get("seed", "0")
    kind = "" if settings.tokenizer_model == "bpe" else f"{settings.tokenizer_model} "
    recipe["tokenizer"] = f"{kind}trained on these sources"
    if path := settings.tokenizer_path:
        absent = "tokenizer" in built and not os.path.exists(path)
        recipe["tokenizer"] = built["tokenizer"] if absent else coders.load(path).sha256
    for source in source_list:
        spec_key, files_key = f"source {source.name}", f"files of {source.name}"
        recipe[spec_key] = source.spec
        recipe[f"text_key of {source.name}"] = source.text_key
        if not signed:
            continue
        try:
            recipe[files_key] = source_signature(source.spec)
        except ConfigError:
            if files_key not in built:
                raise
            recipe[files_key] = built[files_key]
            continue
        if recipe[files_key] and os.path.realpath(built.get(spec_key, "")) == os.path.realpath(source.spec):
            recipe[spec_key] = built[spec_key]  # the same place, however its path is written
    return {**recipe, **{key: str(value) for key, value in extra.items()}}


def _read_plain(settings: BuildSettings, source: Source, stats: SourceStats) -> Iterator[tuple[str, str]]:
    return iterate_documents(
        source.spec,
        text_key=source.text_key,
        tfds_dir=settings.tfds_dir,
        max_bytes=settings.max_source_bytes,
        stats=stats,
    )


class _Documents:
    """One source's documents in shuffled order, each held out or not by a hash of its content."""

    def __init__(
        self,
        place: pathlib.Path,
        source: Source,
        settings: BuildSettings,
        documents: Iterator[tuple[str, str]],
        memory_bytes: int,
    ):
        key = f"jaxlm/{settings.seed}".encode()
        self._shuffle = Shuffle(place, f"{settings.seed}/documents/{source.name}", memory_bytes)
        self._limit = int(settings.val_fraction * 2**64)
        lowest, highest = 1 << 64, -1
        for doc_id, text in documents:
            # Spacing does not count, so that a re-wrapped copy of a held-out document is held out too.
            raw = text.encode()
            content = int.from_bytes(hashlib.blake2b(b" ".join(raw.split()), digest_size=8, key=key).digest(), "little")
            self._shuffle.add(doc_id, text, content)
            lowest, highest = min(lowest, content), max(highest, content)
        if highest < 0:
            raise ConfigError(f"source '{source.name}' gave no document; check {source.spec}")
        if lowest == highest:
            raise ConfigError(
                f"source '{source.name}' has only one document, or copies of one; split it into several files or a "
                "jsonl, so that one can be held out"
            )
        if not lowest < self._limit <= highest:  # at least one, and not all
            self._limit = lowest + 1

    def __len__(self) -> int:
        return len(self._shuffle)

    def close(self) -> None:
        self._shuffle.close()

    def __iter__(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yields (doc_id, text in UTF-8, True if held out) in shuffled order; may be called again."""
        for doc_id, raw, content in self._shuffle:
            yield doc_id, raw, content < self._limit


def _build(root: pathlib.Path, source_list: Sequence[Source], settings: BuildSettings, read: Reader, log: Say) -> dict:
    """Writes all files except the manifest, and returns the manifest."""
    documents, stats = {}, {}
    for source in source_list:
        began, name = time.perf_counter(), source.name
        stats[name] = SourceStats()
        with console.working(f"reading {name}", unit="documents", end=False) as tell:
            texts = console.told(read(source, stats[name]), tell)
            documents[name] = _Documents(root / _SPILL / name, source, settings, texts, _MEMORY // len(source_list))
        log(f"read {name}: {stats[name].summary()} ({time.perf_counter() - began:.1f} s)")
    began, weights = time.perf_counter(), {s.name: s.weight for s in source_list}
    shares = normalise_mixture(weights, list(weights))
    sample = functools.partial(_sample, documents, {name: float(share) for name, share in shares.items()}, settings)
    with console.working("training the tokenizer", end=False):
        coder = _tokenizer(settings, sum(read.bytes for read in stats.values()), sample, log)
    log(f"tokenizer: {coder.vocab_size:,} ids ({time.perf_counter() - began:.1f} s)")
    files, entries, texts = _write_tokenizer(root, coder), {}, {}
    for source in source_list:
        began, name = time.perf_counter(), source.name
        with console.working(f"writing {name}", len(documents[name]), "documents", end=False) as tell:
            splits, texts[name] = _write_source(root, name, documents[name], coder, settings, tell)
        documents[name].close()
        entries[name] = {"spec": source.spec, "read": dataclasses.asdict(stats[name]), **splits}
        n_bytes, n_tokens = (splits["train"][key] + splits["val"][key] for key in ("bytes", "tokens"))
        few = splits["val"]["tokens"] < settings.val_fraction * n_tokens / 4
        log(
            f"wrote {name}: {splits['train']['tokens']:,} tokens to train on, {splits['val']['tokens']:,} held out"
            f"{', too few to judge by (a larger --config.data.val_fraction holds out more)' * few};"
            f" {n_bytes / n_tokens:.2f} bytes a token ({time.perf_counter() - began:.1f} s)"
        )
    return {
        "tokenizer": {
            "sha256": coder.sha256,
            "vocab_size": coder.vocab_size,
            "eos_id": coder.eos_id,
            "separator_id": coder.separator_id,
            "chat_tokens": settings.chat_tokens,
        },
        "dtype": shards.token_dtype(coder.vocab_size),
        "block_tokens": settings.block_tokens,
        "mixture": weights,
        "files": files,
        "sources": entries,
        manifests.HELD_OUT: texts,
    }


def _sample(documents: Mapping[str, _Documents], shares: Mapping[str, float], settings: BuildSettings) -> Iterator[str]:
    """Yields texts to train the tokenizer on: each source's share of the sample, shuffled, without held-out documents."""
    for name, share in shares.items():
        left = int(share * settings.tokenizer_sample_bytes)
        for _, raw, held_out in documents[name]:
            if left <= 0:
                break
            if not held_out:
                yield raw.decode()[:left]
                left -= len(raw)


def _tokenizer(settings: BuildSettings, n_bytes: int, sample: Callable[[], Iterator[str]], log: Say) -> Coder:
    if settings.tokenizer_path is None:
        kinds = {"chat_tokens": settings.chat_tokens, "model_type": settings.tokenizer_model}
        if settings.vocab_size:
            return train_tokenizer(sample(), vocab_size=settings.vocab_size, **kinds)
        return vocabulary.train(sample, n_bytes, log, **kinds)
    coder = coders.load(settings.tokenizer_path)
    if settings.vocab_size and coder.vocab_size != settings.vocab_size:
        raise ConfigError(
            f"{settings.tokenizer_path} has {coder.vocab_size} ids, not {settings.vocab_size}: set "
            f"--config.model.vocab_size={coder.vocab_size}, or 0 for the tokenizer's own"
        )
    if settings.chat_tokens:
        coder.id_of("<|im_start|>")
    return coder


def _write_tokenizer(root: pathlib.Path, coder: Coder) -> list[dict]:
    lengths = io.BytesIO()
    np.save(lengths, coder.token_bytes())
    entries = []
    for name, content in {**coder.files, shards.TOKEN_BYTES: lengths.getvalue()}.items():
        files.write_atomically(root / name, content)
        entries.append({"file": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    return entries


def _write_source(
    root: pathlib.Path, name: str, documents: _Documents, coder: Coder, settings: BuildSettings, tell: console.Tell
) -> tuple[dict[str, dict], str]:
    """Encodes a source in shuffled order into its streams. Returns (the manifest's entries, the held-out text's sha256)."""
    writers = {
        split: shards.StreamWriter(
            root,
            split,
            name,
            dtype=shards.token_dtype(coder.vocab_size),
            block_tokens=settings.block_tokens,
            shard_blocks=settings.shard_blocks,
        )
        for split in shards.SPLITS
    }
    done, held_out_text = 0, hashlib.sha256()
    for batch in _batches(documents):
        coded = ids_lib.training_documents(coder, [raw.decode() for _, raw, _ in batch])
        for (doc_id, raw, held_out), ids in zip(batch, coded, strict=True):
            writers["val" if held_out else "train"].add(doc_id, ids, len(raw))
            if held_out:
                manifests.add_text(held_out_text, raw)
        tell(done := done + len(batch))
    return {split: writer.finish() for split, writer in writers.items()}, held_out_text.hexdigest()


def _batches(documents: _Documents) -> Iterator[list[tuple[str, bytes, bool]]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
