"""Hugging Face datasets: `hub:REPO[:CONFIG][:SPLIT]`, from the hub or from a folder of the same layout (`hub_dir`).

Parquet and jsonl files are read in pieces, like any remote file; other formats are streamed by `datasets`, a shard at a
time.
"""

import posixpath
import re
import types
import typing
from collections.abc import Iterator

from jaxlm.config import ConfigError, optional
from jaxlm.config.config_files import first_line
from jaxlm.corpus.sources import base, files
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

if typing.TYPE_CHECKING:
    import datasets

_FORMATS = ("parquet", "jsonl")
_SPLIT_IN_NAME = re.compile(r"(?:^|/)(train|validation|test)(?:[-_.]\d+-of-\d+.*|[-_]\d+)?[./]")
_REVISION = re.compile(r"hf://datasets/[^@]+@[^/]+/")


def parts(spec: SourceSpec, task_bytes: int) -> list[Part]:
    """Returns pieces of files of about `task_bytes`, or shards. Raises ConfigError if there is no such dataset or split."""
    repo, config, split = _parse(spec.path)
    listed = _local(spec, repo, config, split) if spec.hub_dir else _on_hub(spec, repo, config, split)
    if all(files.format_of(file.name, _FORMATS) for file in listed):
        return [part for file in listed for part in files.cut(file, files.format_of(file.name, _FORMATS), task_bytes)]
    count = _stream(spec).num_shards
    return [Part("hub", _shard_name(spec, i, count), spec.path, i, i + 1, task_bytes) for i in range(count)]


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields the rows of a shard of `datasets`. Ids: `REPO/CONFIG/SPLIT/SHARD-of-SHARDS:ROW` (rows count from 0)."""
    stream = _stream(spec)
    if part.name != _shard_name(spec, part.start, stream.num_shards):
        raise ConfigError(f"source '{spec.path}' changed on the hub since tasks were planned; run the command again")
    for number, row in enumerate(stream.shard(stream.num_shards, part.start)):
        text, doc_id = base.text_of(row, spec.text_key), f"{part.name}:{number}"
        if text is not None:
            yield base.document_of_row(text, doc_id, row, spec.text_key)
        elif row.keys() >= set(base.text_keys(row, spec.text_key)):
            stats.skip(base.no_text(spec.text_key), doc_id)
        else:
            raise ConfigError(base.no_field(spec.path, spec.text_key, row))


def _parse(path: str) -> tuple[str, str, str]:
    """Returns (repository, configuration or "", split)."""
    repo, _, rest = path.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    if not repo or ":" in split:
        raise ConfigError(f"source '{path}' is not of the form hub:REPO[:CONFIG][:SPLIT]")
    return repo, config, split or "train"


def _local(spec: SourceSpec, repo: str, config: str, split: str) -> list[files.Found]:
    """Returns the files under HUB_DIR/REPO whose names hold the split; for "train" without any, files that name no split."""
    fs, root = files.filesystem(posixpath.join(spec.hub_dir, repo))
    if not fs.isdir(root):
        raise ConfigError(f"source '{spec.path}': hub_dir={spec.hub_dir} has no folder {repo}")
    named = (config, f"data/{config}", config.replace("-", "/", 1)) if config else ()
    folders = [folder for folder in named if fs.isdir(f"{root}/{folder}")]
    names = sorted(posixpath.basename(name.rstrip("/")) for name in fs.ls(root, detail=False) if fs.isdir(name))
    there = [name for name in names if not (name[0] == "." or name == "data" or _SPLIT_IN_NAME.match(f"{name}/"))]
    if there and not folders and (config or len(there) > 1):
        problem = f"no configuration '{config}'" if config else "several configurations"
        raise ConfigError(f"source '{spec.path}': {problem} in {root}; there are {', '.join(there)}")
    prefix = f"{folders[0]}/" if folders else ""
    listed = files.find(files.url_of(fs, f"{root}/{prefix}".rstrip("/")), *_FORMATS)
    splits = [match[1] if (match := _SPLIT_IN_NAME.search(file.name)) else "" for file in listed]
    wanted = "" if split == "train" and split not in splits else split  # files that name no split are for training
    listed = [file for file, of in zip(listed, splits, strict=True) if of == wanted]
    if not listed:
        have = ", ".join(sorted(set(splits)))
        raise ConfigError(f"source '{spec.path}': no split '{split}' in {root}; there are {have}")
    return [files.Found(f"{repo}/{prefix}{file.name}", file.url, file.size) for file in listed]


def _datasets() -> types.ModuleType:
    """Imports the `datasets` library, which is slow. Raises ConfigError if it is not installed."""
    return optional("datasets", "the hub needs datasets", "hub", ", or give data.hub_dir")


def _on_hub(spec: SourceSpec, repo: str, config: str, split: str) -> list[files.Found]:
    datasets = _datasets()
    try:
        by_split = datasets.load_dataset_builder(repo, config or None).config.data_files or {}
    except Exception as e:
        raise ConfigError(f"source '{spec.path}': {first_line(e)} (without a network, set hub_dir)") from None
    if split not in by_split:
        raise ConfigError(f"source '{spec.path}': no split '{split}'; there are {', '.join(map(str, by_split))}")
    urls, listed = sorted(by_split[split]), []
    fs, _ = files.filesystem(urls[0])
    for folder in sorted({posixpath.dirname(url) for url in urls}):
        fs.ls(folder)  # one request for each folder; `info` below reuses its answer
    for url in urls:
        name = _REVISION.sub("", url).removeprefix(repo).lstrip("/")
        listed.append(files.Found(f"{repo}/{name}", url, fs.info(url)["size"]))
    return listed


def _stream(spec: SourceSpec) -> "datasets.IterableDataset":
    datasets = _datasets()
    repo, config, split = _parse(spec.path)
    return datasets.load_dataset(repo, config or None, split=split, streaming=True)


def _shard_name(spec: SourceSpec, index: int, count: int) -> str:
    return f"{'/'.join(filter(None, _parse(spec.path)))}/{index}-of-{count}"
