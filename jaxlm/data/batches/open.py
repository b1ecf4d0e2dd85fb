"""Makes a config's data if it is missing, opens it, and finds the weight of each source."""

import pathlib
import typing
from collections.abc import Iterator

from jaxlm.config import Config, ConfigError, DataConfig, PrepareConfig, config_files, final_weights
from jaxlm.corpus import documents, lists
from jaxlm.corpus.sources.base import SourceStats
from jaxlm.data.batches import removed
from jaxlm.data.batches.document_rows import Rows
from jaxlm.data.shards import removal, vocabulary
from jaxlm.data.shards.manifest import unfinished
from jaxlm.data.shards.mixture import Windows, final_of, weights_of
from jaxlm.data.shards.shards import MANIFEST, DataDir, open_data
from jaxlm.host import files
from jaxlm.host.console import Say

if typing.TYPE_CHECKING:
    from jaxlm.data.shards import build


def open_order(config: Config, passed_over: Windows = (), check: bool = True) -> Rows:
    """Opens `data.dir`. Returns the order in which a run of this config reads it. Raises ConfigError as `open_mixture` does."""
    opened, mixture = open_mixture(config.data, config.prepare, vocabulary.required(config), check)
    final = final_of(config, final_weights(mixture, config.data.final.weights))
    without = removed.read(opened, _list(config)) if config.data.without else None
    sizes = config.train.seq_len, config.train.batch_size
    return Rows(opened, mixture, config.seed, *sizes, passed_over, final, without)


def keep_list(config: Config) -> None:
    """Copies `data.without` into the folder of a new run. Raises ConfigError if the run has another list."""
    folder = pathlib.Path(config.workdir)
    path, saved = files.expanded(config.data.without), folder / "config.json"
    if not config.data.without:
        return
    if not (folder / removal.LIST).is_file():
        lists.read(path, "data.without")
        if not files.has_steps(folder / "checkpoints"):  # else the order of its batches is refused
            files.write_atomically(folder / removal.LIST, path.read_bytes())
    # Later changes of the file that the run began with do not concern it.
    elif not saved.is_file() or config_files.from_run(saved).data.without != config.data.without:
        check_list(folder, path)


def check_list(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Raises ConfigError if the run in `folder` has another list than `path`."""
    kept = folder / removal.LIST
    if kept.is_file() and path.is_file() and path.read_bytes() != kept.read_bytes():
        raise ConfigError(f"{folder} does without the documents of {kept}, not {path}: give another --config.workdir")


def _list(config: Config) -> pathlib.Path:
    kept = pathlib.Path(config.workdir, removal.LIST)
    return kept if config.workdir and kept.is_file() else files.expanded(config.data.without)


def open_mixture(
    data: DataConfig, prepare: PrepareConfig, vocab_size: int, check: bool = True
) -> tuple[DataDir, dict[str, float]]:
    """Opens `data.dir`. Returns (the data, source -> weight in the first mixture, by `data`, `prepare` or the manifest).

    Raises ConfigError if there is no data, its vocabulary is not `vocab_size` (0 = any), or it lacks a source.
    """
    opened = open_data(data.dir, check)
    if vocab_size and opened.vocab_size != vocab_size:
        advice = f"set --config.model.vocab_size={opened.vocab_size}, or another config.data.dir"
        raise ConfigError(f"the tokenizer in {data.dir} has {opened.vocab_size} tokens: {advice}")
    if unknown := [name for name in data.sources if name not in opened.sources]:
        there = f"the data in {data.dir} has {', '.join(opened.sources)}"
        raise ConfigError(
            f"data.sources names {unknown[0]}, but {there}: take this source out or name another data.dir"
        )
    final_weights(dict.fromkeys(opened.sources, 1.0), data.final.weights)  # refuses names that nothing in the data has
    later = {name: 0.0 for name in data.final.weights}
    if data.sources:
        return opened, later | {name: source.weight for name, source in data.sources.items()}
    prepared = {name: source.weight for name, source in prepare.sources.items() if name in opened.sources}
    return opened, later | (prepared or opened.mixture)


def make_data(data: DataConfig, prepare: PrepareConfig, engine: str, vocab_size: int, say: Say) -> None:
    """Makes `data.dir` (tokenizer, shards, manifest), or checks that the same recipe made it.

    Reads the `data.sources` with a path, or else the documents of `jaxlm prepare`, which it first makes if missing. Raises
    ConfigError if a source does not exist, or another recipe made the data.
    """
    from jaxlm.data.shards import build  # here, because what opens finished data should not wait for what reads sources

    d, root = data, pathlib.Path(data.dir)
    if line := unfinished(root):  # to be made by `jaxlm tokenize --without`, never of this config's sources
        raise ConfigError(line)
    if (root / removal.LIST).is_file():
        return say(f"data in {root} is complete: another folder's without the documents of {root / removal.LIST}")
    if not root.exists() and (near := config_files.did_you_mean(root)):
        say(f"{root} does not exist: it is made now, of this config's sources; {near}")
    if any(source.path for source in d.sources.values()):
        sources = [build.Source(name, s.path, s.weight, d.text_key) for name, s in d.sources.items()]
        read, extra = None, {}
    elif prepared := _prepared(data, prepare, engine, say):
        sources, read, extra = prepared
    else:
        return
    settings = build.BuildSettings(
        vocab_size=vocab_size,
        chat_tokens=d.chat_tokens,
        seed=d.seed,
        val_fraction=d.val_fraction,
        max_source_bytes=d.max_bytes or None,
        tfds_dir=d.tfds_dir or None,
        tokenizer_path=d.tokenizer or None,
        tokenizer_model=d.tokenizer_model,
    )

    def run(folder: pathlib.Path, phase: str, function: str, tasks: int) -> None:
        from jaxlm.corpus import engine as engines  # here, because a machine that only trains may lack datatrove

        engines.run(engine, prepare, folder, phase, function, tasks)

    build.build_data(d.dir, sources, settings, read=read, recipe_extra=extra, engine=run, log=say)


def _prepared(
    data: DataConfig, prepare: PrepareConfig, engine: str, say: Say
) -> "tuple[list[build.Source], build.Reader, dict[str, str]] | None":
    """Makes or opens prepared documents. Returns (sources, their reader, further recipe keys); None if there are none."""
    root = pathlib.Path(data.dir)
    if not prepare.sources and (root / MANIFEST).is_file():
        return None
    from jaxlm.corpus import prepare as corpus  # here, because its libraries take a second to import
    from jaxlm.data.shards import build

    fresh = not (root / corpus.MANIFEST).is_file()
    if prepare.sources:
        done = corpus.prepare(prepare, data, engine, say)
    elif fresh:
        return None
    else:
        done = corpus.open_prepared(root)
    if fresh:
        say(f"prepared documents: {root / 'documents'}")
    names = [name for name, source in done.manifest["sources"].items() if source["kept"]["documents"]]
    if not names:
        raise ConfigError(f"prepare kept no document of any source: {root / 'removed'} says which stages removed them")

    def verified(name: str) -> Iterator[pathlib.Path]:
        for entry in done.manifest["sources"][name]["files"]:
            documents.verify(root / entry["file"], entry["sha256"])
            yield root / entry["file"]

    def read(source: "build.Source", stats: SourceStats) -> Iterator[tuple[str, str]]:
        texts = documents.read_texts(verified(source.name))
        for doc_id, text in documents.within(texts, data.max_bytes):
            stats.documents += 1
            stats.bytes += len(text.encode())
            yield doc_id, text

    listed = prepare.sources or data.sources
    noted = {} if listed else documents.mixture(root)
    alone = [name for name in names if noted and done.manifest["sources"][name]["kept"]["documents"] < 2]
    if alone and len(alone) < len(names):  # such as one README next to a thousand pages
        say(f"left out: {', '.join(alone)}, of which one document is left; at least two are needed, to hold one out")
        names = [name for name in names if name not in alone]
    weights = {name: noted[name] for name in names} if noted.keys() >= set(names) else weights_of(listed, names)
    sources = [build.Source(name, f"documents/{name}", weights[name]) for name in names]
    return sources, read, {"prepared": done.sha256}
