"""The sections `data` and `prepare` of the schema: each key's type, and the values that it may have."""

import dataclasses
from typing import Annotated, Literal

from jaxlm.config.annotations import BelowOne, Natural, NotNegative, above, at_least, key, within, written
from jaxlm.config.prepare_stages import StagesConfig


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    path: str
    weight: NotNegative


@dataclasses.dataclass(frozen=True)
class FinalConfig:
    """other weights at the end of a run, for the best data"""

    share: BelowOne = key(0.0, "the last share of optim.schedule_steps has them (wsd decays in the last 0.2); 0 = none")
    weights: dict[str, NotNegative] = key({}, "NAME -> weight; other sources keep theirs. A branch has them at once")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """texts, tokenizer, shards, loader"""

    dir: str = key("", 'folder of tokenizer, shards and manifest; made when absent; "" = WORKDIR/data')
    path: str = key("", "train on this one folder, file, glob or tfds:NAME; takes the place of `sources`")
    sources: dict[str, SourceConfig] = key({}, 'NAME -> weight, path (as data.path, embedded:NAME; "" = in data.dir)')
    final: FinalConfig = FinalConfig()
    text_key: str = key("text", "the field that holds the text, in jsonl, parquet and TFDS")
    max_bytes: Annotated[int, at_least(0, most=2**62)] = key(0, "of text, read from each source at most; 0 = all")
    tfds_dir: str = key("", 'folder of TFDS datasets; "" = TFDS\'s own default')
    hub_dir: str = key("", 'folder that holds hub datasets as REPOSITORY/*.parquet or .jsonl; "" = from the hub')
    tokenizer: str = key("", 'a SentencePiece .model to use; "" = one is trained on the sources')
    tokenizer_model: Literal["bpe", "unigram"] = key("bpe", "the kind of tokenizer that is trained")
    chat_tokens: bool = key(False, "the last five ids of the vocabulary are the ChatML tokens")
    val_fraction: Annotated[float, above(0, most=0.5)] = key(0.01, "of documents, held out by a hash of their content")
    seed: Annotated[int, within(-1, 2**32 - 1)] = key(-1, "of held-out documents and tokenizer; -1 = the data's, or 0")
    without: str = key("", "a list by `jaxlm trace --remove`: its documents keep their places, and teach nothing")
    timeout_s: Annotated[float, at_least(1, most=7 * 86_400)] = key(300.0, "a batch that takes longer is an error")


@dataclasses.dataclass(frozen=True)
class PrepareSourceConfig:
    """A source of `prepare.sources`: `source("docs/*.html", stages=("html", "unicode"), priority=1)`."""

    path: Annotated[str, written(".+", "a folder, file, glob, URL or dataset")] = key(
        "", "required: folder, file, glob, URL that fsspec knows, tfds:NAME, hub:REPOSITORY, embedded:NAME"
    )
    format: Literal[
        "auto", "text", "markdown", "markup", "readme", "html", "warc", "code", "mediawiki", "jsonl", "parquet"
    ] = key("auto", "of its files; auto = by their names, readme = README, LICENSE and such names")
    text_key: str = key("text", "the field that holds the text, in jsonl, parquet and datasets")
    stages: tuple[str, ...] = key((), 'in order, each with its settings: "gopher_quality min_words=30"')
    priority: Annotated[int, within(-128, 127)] = key(0, "of duplicates, that of the source with the highest stays")
    weight: NotNegative = key(1.0, "in the mixture to train on")
    max_bytes: Natural = key(0, "of text to read; 0 = all")
    exclude: tuple[str, ...] = key((), 'files and folders below the path to leave out, by name: "_static", "*.css"')
    without: str = key("", "a list by `jaxlm trace --remove`: its training texts go, after the duplicates")
    licences: tuple[str, ...] = key((), "code: keep files under these SPDX licences only; () = all")


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """raw documents to clean ones"""

    sources: dict[str, PrepareSourceConfig] = key({}, "NAME -> base.source(path, stages, ...)")
    workers: Natural = key(0, "processes (local), or the most tasks (ray, slurm), at a time; 0 = one per core")
    engine_options: tuple[Annotated[str, written(r"[^=]+=.*", "NAME=VALUE")], ...] = key(
        (), "NAME=VALUE: of sbatch (partition=cpu, time=12:00:00) or of ray.init (address=auto)"
    )
    task_mb: Annotated[float, at_least(0.001)] = key(64.0, "of input per task; decides the outcome, as workers do not")
    memory_gb: Annotated[float, at_least(0.001)] = key(1.0, "for what looks at all documents; the rest is on disk")
    report_mb: NotNegative = key(8.0, "of each source's documents for the audit and the mismatch report; 0 = neither")
    target: str = key("", 'a folder of "what I want it to write like", for the mismatch report')
    stages: dict[str, dict[str, object]] = key(dataclasses.asdict(StagesConfig()), StagesConfig.__doc__)
