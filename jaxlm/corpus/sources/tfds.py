"""TFDS datasets in ArrayRecord form, read without TensorFlow: `tfds:NAME[:SPLIT][?key=FEATURE]`."""

import re
from collections.abc import Iterator, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.config.config_files import first_line
from jaxlm.corpus.sources import base
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document


def parts(spec: SourceSpec, task_bytes: int) -> list[Part]:
    """Returns ranges of examples of about `task_bytes` each. Raises ConfigError if there is no such dataset or feature."""
    name, split, _ = _parse(spec.path)
    records, all_bytes, all_examples = _open(spec)
    size = round(all_bytes * len(records) / max(all_examples, 1))
    count = max(1, -(-size // task_bytes))
    step = max(1, -(-len(records) // count))
    return [
        Part("tfds", f"tfds:{name}/{split}", spec.path, start, min(start + step, len(records)), size // count)
        for start in range(0, len(records), step)
    ]


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a document for each example. Ids: `tfds:NAME/SPLIT/INDEX`. Raises ConfigError if the feature is not text."""
    key = _parse(spec.path)[2]
    records, _, _ = _open(spec)
    for i in range(part.start, part.stop):
        example, doc_id = records[i], f"{part.name}/{i}"
        text = example[key]
        if not isinstance(text, bytes | str):
            raise ConfigError(f"source '{spec.path}': feature '{key}' is not text; add ?key=NAME")
        if isinstance(text, bytes):
            text = base.to_text(text, doc_id, stats)
        known = base.FIELDS & set(example) - {key}
        row = {field: example[field] for field in known if isinstance(example[field], bytes | str)}
        yield base.document_of_row(text, doc_id, row, key)


def _parse(path: str) -> tuple[str, str, str]:
    """Returns (name with configuration and version, split, feature) of `tfds:NAME[:VERSION][:SPLIT][?key=FEATURE]`."""
    match = re.fullmatch(r"tfds:([^:?]+(?::\d+\.\d+\.\d+)?)(?::([^?]+))?(?:\?key=(.+))?", path)
    if not match:
        raise ConfigError(f"source '{path}' is not of the form tfds:NAME[:SPLIT][?key=FEATURE]")
    return match[1], match[2] or "train", match[3] or "text"


def _open(spec: SourceSpec) -> tuple[Sequence[Mapping[str, object]], int, int]:
    """Returns (examples of the split or slice, bytes of the whole split, examples of the whole split)."""
    name, split, key = _parse(spec.path)
    source, whole = f"source '{spec.path}'", split.partition("[")[0]
    import tensorflow_datasets as tfds  # slow to import, and most runs have no TFDS source

    try:
        builder = tfds.builder(name, data_dir=spec.tfds_dir or None, try_gcs=False)
    except Exception as e:
        where = spec.tfds_dir or "its data_dir"
        raise ConfigError(f"{source}: TFDS finds no such dataset in {where} ({first_line(e)})") from None
    splits, features = builder.info.splits, builder.info.features
    if whole not in splits:
        have = ", ".join(splits) or "none: run its download_and_prepare with file_format='array_record'"
        raise ConfigError(f"{source}: no split '{split}'; prepared are {have}")
    if key not in features:
        raise ConfigError(f"{source}: no feature '{key}'; it has {', '.join(sorted(features))}: add ?key=NAME")
    try:
        records = builder.as_data_source(split=split)
    except Exception as e:
        advice = "prepare it with file_format='array_record'"
        raise ConfigError(f"{source} cannot be read at random ({first_line(e)}); {advice}") from None
    return records, splits[whole].num_bytes, splits[whole].num_examples
