"""Makes a data directory from sources: holds documents out, trains the tokenizer, shuffles, encodes, writes.

Every source is read once, into an external shuffle: memory does not grow with the corpus, and the disk holds a second
copy of the text. Large sources are encoded by tasks, side by side; what was done before a kill stays. The bytes of all
files depend only on the texts and the settings.

DATA/.tokenize/KEY/documents/SOURCE/  shuffled documents of a large source, with `read.pickle` once all of it is read
DATA/.tokenize/KEY/plan.pickle        the tokenizer, and what each task encodes
DATA/.tokenize/KEY/encoded/           what the tasks encoded
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import pickle
import shutil
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError, RunError
from jaxlm.corpus import recipes
from jaxlm.corpus.sources.base import SourceStats
from jaxlm.corpus.sources.units import iterate_documents, source_signature
from jaxlm.data.shards import manifest as manifests
from jaxlm.data.shards import shards, vocabulary
from jaxlm.data.shards.mixture import normalise_mixture
from jaxlm.data.shards.shuffle import BUCKETS, Shuffle
from jaxlm.data.tokenizer import coder as coders
from jaxlm.data.tokenizer import ids as ids_lib
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.host import console, files

_WORK = ".tokenize"  # in the data directory, while it is made
_READ_MARK, _PLAN = "read.pickle", "plan.pickle"
_PACKAGES = ("sentencepiece", "tokenizers", "numpy", "pyarrow")  # which read, encode and hold what stays after a kill
_BATCH_BYTES = 4 << 20
_TASK_BYTES = 32 << 20  # of text; the parent encodes sources of less itself: each worker takes a second to start
_MEMORY = 256 << 20  # of text, over all sources
_FEW_TOKENS = 1000  # held out: their mean loss is off by some .1 nats
_VERSION = 4  # raise it when the same settings begin to give other bytes
# Versions of finished data that are still read. 2: EOS after each document instead of before; 3: no token joins a newline.
_READ = ("2", "3", "4")

# (doc_id, ids as shards hold them, bytes of text, the text if held out) of some documents.
Batch = list[tuple[str, np.ndarray, int, bytes | None]]
Engine = Callable[[pathlib.Path, str, str, int], None]  # see `corpus.engine.run`: folder, phase, function, tasks
Reader = Callable[["Source", SourceStats], Iterator[tuple[str, str]]]
T = typing.TypeVar("T")


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
    engine: Engine | None = None,
    log: console.Say = print,
) -> shards.DataDir:
    """Makes a data directory and opens it; only opens it if the same recipe made it already.

    `read` yields the (doc_id, text) of a source and fills its stats. `engine` runs the tasks; None: they run here, in turn.
    Raises ConfigError if all weights are 0, another recipe made the data, or another process is making it.
    """
    weights = {source.name: source.weight for source in source_list}  # decide what the tokenizer is trained on
    normalise_mixture(weights, list(weights))
    root = pathlib.Path(path)
    signed = read is None

    def finished() -> shards.DataDir | None:
        if not (root / shards.MANIFEST).exists():
            return None
        data = shards.open_data(root, check=False)  # whoever reads it checks it
        built = data.manifest["recipe"]
        wanted = _recipe(source_list, settings, signed, recipe_extra or {}, built)
        if wanted["tokenizer"] == data.manifest["tokenizer"]["sha256"]:
            wanted["tokenizer"] = built["tokenizer"]  # the data's own, as of a run that was trained on it
        told = {"made": f"the data in {root} was built", "manifest": root / shards.MANIFEST}
        recipes.check_same(built, wanted, **told, again="build it anew (what jaxlm prepare made stays)")
        log(f"data in {root} is complete")
        return data

    if data := finished():  # without the lock: many runs may share it, and it may lie on a read-only disk
        return data
    files.make_folder(root, f"data.dir={root}")
    with files.lock(root, "is writing", "config.data.dir"):
        if data := finished():
            return data
        settings = dataclasses.replace(settings, seed=max(settings.seed, 0))
        recipe = _recipe(source_list, settings, signed, recipe_extra or {}, {})
        shards.clear_leftovers(root)
        made_by = [recipes.own_code(), *map(recipes.version, _PACKAGES)]  # two versions must not be mixed
        key = hashlib.sha256(json.dumps([recipe, weights, made_by], sort_keys=True).encode()).hexdigest()[:12]
        for other in (root / ".spill.tmp", *root.glob(f"{_WORK}/*")):  # the first: of an earlier version
            if other.name != key:
                shutil.rmtree(other, ignore_errors=True)
        reader = read or functools.partial(_read_plain, settings)
        manifest = _build(root, root / _WORK / key, source_list, settings, reader, engine or _in_turn, log)
        shutil.rmtree(root / _WORK, ignore_errors=True)
        recipe["vocab_size"] = str(manifest["tokenizer"]["vocab_size"])
        manifests.write(root, {"recipe": recipe, **manifest})
    return shards.open_data(root)


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
    limits = {"tfds_dir": settings.tfds_dir, "max_bytes": settings.max_source_bytes}
    return iterate_documents(source.spec, text_key=source.text_key, stats=stats, **limits)


@dataclasses.dataclass
class _Documents:
    """One source's documents in shuffled order, each held out or not by a hash of its content."""

    shuffle: Shuffle
    limit: int  # documents with a lower hash are held out
    stats: SourceStats

    @classmethod
    def opened(cls, place: pathlib.Path) -> "_Documents | None":
        """Returns the documents that `save` left in this folder; None if they are not complete."""
        if not (place / _READ_MARK).is_file():
            return None
        on_disk, documents, limit, stats = pickle.loads((place / _READ_MARK).read_bytes())
        shuffle = Shuffle.opened(place, on_disk, documents)
        return shuffle and cls(shuffle, limit, stats)

    def save(self, place: pathlib.Path) -> None:
        """Moves all documents to the disk, so that tasks and a later call can read them."""
        self.shuffle.spill()
        content = pickle.dumps((self.shuffle.on_disk, self.shuffle.documents, self.limit, self.stats))
        files.write_atomically(place / _READ_MARK, content)

    def read(self, buckets: Iterable[int] = range(BUCKETS)) -> Iterator[tuple[str, bytes, bool]]:
        """Yields (doc_id, text in UTF-8, True if held out) in shuffled order; may be called again."""
        for doc_id, raw, content in self.shuffle.read(buckets):
            yield doc_id, raw, content < self.limit


def _read_source(place: pathlib.Path, source: Source, settings: BuildSettings, read: Reader, memory: int) -> _Documents:
    """Reads a source's documents, or opens those that an earlier call has read."""
    if documents := _Documents.opened(place):
        return documents
    shutil.rmtree(place, ignore_errors=True)
    key, stats = f"jaxlm/{settings.seed}".encode(), SourceStats()
    shuffle = Shuffle(place, f"{settings.seed}/documents/{source.name}", memory)
    limit = int(settings.val_fraction * 2**64)
    lowest, highest = 1 << 64, -1
    with console.working(f"reading {source.name}", unit="documents", end=False) as tell:
        for doc_id, text in console.told(read(source, stats), tell):
            # Spacing does not count, so that a re-wrapped copy of a held-out document is held out too.
            words = b" ".join(text.encode().split())
            content = int.from_bytes(hashlib.blake2b(words, digest_size=8, key=key).digest(), "little")
            shuffle.add(doc_id, text, content)
            lowest, highest = min(lowest, content), max(highest, content)
    if highest < 0:
        raise ConfigError(f"source '{source.name}' gave no document; check {source.spec}")
    if lowest == highest:
        read_of = f" ({stats.summary()})" if stats.skipped else ""
        raise ConfigError(
            f"source '{source.name}' has only one document, or copies of one{read_of}: split it, to hold one out"
        )
    if not lowest < limit <= highest:  # at least one, and not all
        limit = lowest + 1
    documents = _Documents(shuffle, limit, stats)
    if stats.bytes > _TASK_BYTES:
        documents.save(place)
    return documents


def _build(
    root: pathlib.Path,
    work: pathlib.Path,
    source_list: Sequence[Source],
    settings: BuildSettings,
    read: Reader,
    engine: Engine,
    log: console.Say,
) -> dict:
    """Writes all files except the manifest, and returns the manifest."""
    documents: dict[str, _Documents] = {}
    for source in source_list:
        began, name = time.perf_counter(), source.name
        documents[name] = _read_source(work / "documents" / name, source, settings, read, _MEMORY // len(source_list))
        log(f"read {name}: {documents[name].stats.summary()} ({time.perf_counter() - began:.1f} s)")
    coder, tasks = _planned(work, source_list, documents, settings, log)
    if tasks:
        began = time.perf_counter()
        engine(work, "encode", f"{__name__}.encode", len(tasks))
        log(f"encode: {len(tasks)} tasks ({time.perf_counter() - began:.1f} s)")
    files, entries, texts = _write_tokenizer(root, coder), {}, {}
    for source in source_list:
        began, name = time.perf_counter(), source.name
        with console.working(f"writing {name}", documents[name].shuffle.documents, "documents", end=False) as tell:
            paths = [_encoded_file(work, task) for task, (owner, _) in enumerate(tasks) if owner == name]
            batches = _saved(paths) if paths else _encoded(documents[name].read(), coder)
            splits, texts[name] = _write_source(root, name, batches, coder, settings, tell)
        if not paths:
            documents[name].shuffle.close()
        stats = dict(vars(documents[name].stats))  # Python 3.11's `asdict` spoils a Counter
        entries[name] = {"spec": source.spec, "read": stats, **splits}
        n_bytes, n_tokens = (splits["train"][key] + splits["val"][key] for key in ("bytes", "tokens"))
        odd = _odd_share(splits["val"]["tokens"], n_tokens, settings.val_fraction)
        log(
            f"wrote {name}: {splits['train']['tokens']:,} tokens to train on, {splits['val']['tokens']:,} held out{odd};"
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
        "mixture": {source.name: source.weight for source in source_list},
        "files": files,
        "sources": entries,
        manifests.HELD_OUT: texts,
    }


def _odd_share(held_out: int, tokens: int, wanted: float) -> str:
    if held_out < max(wanted * tokens / 4, _FEW_TOKENS):
        return ", too few to judge by (a larger --config.data.val_fraction holds out more)"
    if held_out > tokens / 4 > wanted * tokens:
        return f", far more than {wanted:.0%}: this source has few documents, and long ones"
    return ""


def _planned(
    work: pathlib.Path,
    source_list: Sequence[Source],
    documents: Mapping[str, _Documents],
    settings: BuildSettings,
    log: console.Say,
) -> tuple[Coder, list[tuple[str, list[int]]]]:
    """Returns (the tokenizer, (source, buckets) of each task); if there are tasks, also saves this for them."""
    if (work / _PLAN).is_file():
        return pickle.loads((work / _PLAN).read_bytes())
    began, weights = time.perf_counter(), {source.name: source.weight for source in source_list}
    shares = normalise_mixture(weights, list(weights))
    sample = functools.partial(_sample, documents, {name: float(share) for name, share in shares.items()}, settings)
    with console.working("training the tokenizer", end=False):
        coder = _tokenizer(settings, sum(part.stats.bytes for part in documents.values()), sample, log)
    log(f"tokenizer: {coder.vocab_size:,} ids ({time.perf_counter() - began:.1f} s)")
    large = {name: part.shuffle.on_disk for name, part in documents.items() if part.stats.bytes > _TASK_BYTES}
    groups = {name: _grouped(range(BUCKETS), _TASK_BYTES, sizes.__getitem__) for name, sizes in large.items()}
    tasks = [(name, buckets) for name, of_source in groups.items() for buckets in of_source]
    if tasks:
        (work / "encoded").mkdir(exist_ok=True)
        files.write_atomically(work / _PLAN, pickle.dumps((coder, tasks)))
    return coder, tasks


def _grouped(items: Iterable[T], least: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the items in groups, each closed once it has `least` of size; the last may have less."""
    group, held = [], 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= least:
            yield group
            group, held = [], 0
    if group:
        yield group


def _encoded_file(work: pathlib.Path, task: int) -> pathlib.Path:
    return work / "encoded" / f"{task:06d}.pickle"


def encode(work: pathlib.Path, task: int) -> None:
    """Encodes the documents of one task into a file of batches."""
    coder, tasks = pickle.loads((work / _PLAN).read_bytes())
    name, buckets = tasks[task]
    if (documents := _Documents.opened(work / "documents" / name)) is None:
        raise RunError(f"{work / 'documents' / name} is damaged: delete {work} and run the same command again")
    path = _encoded_file(work, task)
    if path.exists():
        return
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        for batch in _encoded(documents.read(buckets), coder):
            pickle.dump(batch, out)
    files.settle(part, path)


def _in_turn(work: pathlib.Path, phase: str, function: str, tasks: int) -> None:
    for task in range(tasks):
        encode(work, task)


def _encoded(documents: Iterable[tuple[str, bytes, bool]], coder: Coder) -> Iterator[Batch]:
    dtype = shards.token_dtype(coder.vocab_size)
    for batch in _grouped(documents, _BATCH_BYTES, lambda document: len(document[1])):
        coded = ids_lib.training_documents(coder, [raw.decode() for _, raw, _ in batch])
        yield [
            (doc_id, ids.astype(dtype), len(raw), raw if held_out else None)
            for (doc_id, raw, held_out), ids in zip(batch, coded, strict=True)
        ]


def _saved(paths: Iterable[pathlib.Path]) -> Iterator[Batch]:
    for path in paths:
        with path.open("rb") as content:
            while content.peek(1):
                yield pickle.load(content)


def _sample(documents: Mapping[str, _Documents], shares: Mapping[str, float], settings: BuildSettings) -> Iterator[str]:
    """Yields texts to train the tokenizer on: each source's share of the sample, shuffled, without held-out documents."""
    for name, share in shares.items():
        left = int(share * settings.tokenizer_sample_bytes)
        for _, raw, held_out in documents[name].read():
            if left <= 0:
                break
            if not held_out:
                yield raw.decode()[:left]
                left -= len(raw)


def _tokenizer(settings: BuildSettings, n_bytes: int, sample: Callable[[], Iterator[str]], log: console.Say) -> Coder:
    if settings.tokenizer_path is None:
        kinds = {"chat_tokens": settings.chat_tokens, "model_type": settings.tokenizer_model}
        if settings.vocab_size:
            return train_tokenizer(sample(), vocab_size=settings.vocab_size, **kinds)
        return vocabulary.train(sample, n_bytes, log, **kinds)
    coder = coders.load(settings.tokenizer_path)
    if settings.vocab_size and coder.vocab_size != settings.vocab_size:
        advice = f"set --config.model.vocab_size={coder.vocab_size}, or 0 for the tokenizer's own"
        raise ConfigError(f"{settings.tokenizer_path} has {coder.vocab_size} ids, not {settings.vocab_size}: {advice}")
    if settings.chat_tokens and coder.find("<|im_start|>") is None:
        raise ConfigError(f"data.chat_tokens needs ChatML tokens, and {settings.tokenizer_path} has no <|im_start|>")
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
    root: pathlib.Path, name: str, batches: Iterable[Batch], coder: Coder, settings: BuildSettings, tell: console.Tell
) -> tuple[dict[str, dict], str]:
    """Writes a source's streams. Returns (the manifest's entries, the held-out text's sha256)."""
    sizes = {"block_tokens": settings.block_tokens, "shard_blocks": settings.shard_blocks}
    sizes["dtype"] = shards.token_dtype(coder.vocab_size)
    writers = {split: shards.StreamWriter(root, split, name, **sizes) for split in shards.SPLITS}
    done, held_out_text = 0, hashlib.sha256()
    for batch in batches:
        for doc_id, ids, n_bytes, held_out in batch:
            writers["train" if held_out is None else "val"].add(doc_id, ids, n_bytes)
            if held_out is not None:
                manifests.add_text(held_out_text, held_out)
        tell(done := done + len(batch))
    return {split: writer.finish() for split, writer in writers.items()}, held_out_text.hexdigest()
