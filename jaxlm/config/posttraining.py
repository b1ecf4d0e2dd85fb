"""The sections of the config that post-training adds: adapters, examples, replay, preferences. See `schema.py`."""

import dataclasses
from typing import Annotated, Literal

from jaxlm.config.annotations import REGULAR_EXPRESSION, above, at_least, from_to_below, within, written

LARGEST = 2**31 - 1  # of a size: an axis of an array
Pattern = Annotated[str, REGULAR_EXPRESSION]


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    kind: Literal["none", "lora", "prompt"]
    rank: Annotated[int, at_least(1, most=65_536)]
    alpha: Annotated[float, above(0)]
    rslora: bool
    dropout: Annotated[float, from_to_below(0, 1)]
    targets: tuple[Pattern, ...]
    rows: tuple[str, ...]
    without_rows: bool
    quantize: Literal["none", "nf4", "int8"]
    prompt_tokens: Annotated[int, at_least(1, most=65_536)]
    prompt_text: str

    @property
    def scale(self) -> float:
        """Returns what a LoRA's product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class ExamplesConfig:
    format: Literal["auto", "messages", "prompt", "sharegpt", "alpaca", "hh", "pairs"]
    val_path: str
    benchmarks: str
    template: str
    ignore: tuple[str, ...]
    last_only: bool


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    share: Annotated[float, from_to_below(0, 1)]
    path: str


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    loss: Literal["sigmoid", "ipo", "robust", "orpo", "simpo"]
    beta: Annotated[float, above(0)]
    label_smoothing: Annotated[float, within(0, 0.5)]
    margin: Annotated[float, at_least(0)]
    nll_weight: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts: Annotated[int, at_least(1, most=LARGEST)]
    answers: Annotated[int, at_least(1, most=LARGEST)]
    max_new_tokens: Annotated[int, at_least(1, most=LARGEST)]
    rows: Annotated[int, at_least(0, most=LARGEST)]
    importance_cap: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    average: Literal["token", "answer", "length"]
    ratio: Literal["token", "answer"]
    clip_low: Annotated[float, above(0)]
    clip_high: Annotated[float, above(0)]
    scale_advantages: bool
    mask_truncated: bool
    overlong_tokens: Annotated[int, at_least(0, most=LARGEST)]
    epochs: Annotated[int, at_least(1, most=1000)]
    minibatches: Annotated[int, at_least(1, most=LARGEST)]
    beta: Annotated[float, at_least(0)]
    kl_target: Annotated[float, at_least(0)]
    kl_horizon: Annotated[int, at_least(1)]
    reference: bool
    gamma: Annotated[float, within(0, 1)]
    gae_lambda: Annotated[float, within(0, 1)]
    whiten: bool
    value_clip: Annotated[float, above(0)]
    value_weight: Annotated[float, at_least(0)]
    value_from: Literal["zero", "reward"]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    tasks: str
    function: Annotated[str, written(r"([^\W\d][\w.]*:[^\W\d]\w*)?", "MODULE:FUNCTION")]
    model: str
    format: Pattern
    format_weight: Annotated[float, at_least(0)]
    run_code: bool
    timeout_s: Annotated[float, above(0)]
