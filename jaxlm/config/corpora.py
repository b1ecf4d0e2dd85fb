"""The sections `data` and `prepare` of the schema: each key's type, and the values that it may have."""

import dataclasses
from typing import Annotated, Literal

from jaxlm.config.annotations import above, at_least, from_to_below, within, written


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    path: str
    weight: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class FinalConfig:
    share: Annotated[float, from_to_below(0, 1)]
    weights: dict[str, Annotated[float, at_least(0)]]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    dir: str
    path: str
    sources: dict[str, SourceConfig]
    final: FinalConfig
    text_key: str
    max_bytes: Annotated[int, at_least(0, most=2**62)]
    tfds_dir: str
    hub_dir: str
    tokenizer: str
    tokenizer_model: Literal["bpe", "unigram"]
    chat_tokens: bool
    val_fraction: Annotated[float, above(0, most=0.5)]
    seed: Annotated[int, within(-1, 2**32 - 1)]
    timeout_s: Annotated[float, at_least(1, most=7 * 86_400)]


@dataclasses.dataclass(frozen=True)
class PrepareSourceConfig:
    path: Annotated[str, written(".+", "a folder, file, glob, URL or dataset")]
    format: str
    text_key: str
    stages: tuple[str, ...]
    priority: Annotated[int, within(-128, 127)]
    weight: Annotated[float, at_least(0)]
    max_bytes: Annotated[int, at_least(0)]
    exclude: tuple[str, ...]
    licences: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """The section `prepare`. `stages` holds each stage's defaults; the stage's Settings (`corpus.stages`) have their types."""

    sources: dict[str, PrepareSourceConfig]
    workers: Annotated[int, at_least(0)]
    engine_options: tuple[str, ...]
    task_mb: Annotated[float, at_least(0.001)]
    memory_gb: Annotated[float, at_least(0.001)]
    examples: Annotated[int, at_least(0)]
    excerpt_chars: Annotated[int, at_least(0)]
    report_mb: Annotated[float, at_least(0)]
    target: str
    stages: dict[str, dict[str, object]]
