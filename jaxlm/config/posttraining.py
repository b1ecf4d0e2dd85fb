"""The sections of the config that post-training adds: adapters, examples, replay, preferences. See `schema.py`."""

import dataclasses
from typing import Annotated, Literal

from jaxlm.config.annotations import (
    BelowOne,
    Count,
    NotNegative,
    Pattern,
    Positive,
    Share,
    Size,
    at_least,
    key,
    within,
    written,
)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """LoRA, QLoRA, prompt tuning; trained in place of the model's parameters"""

    kind: Literal["none", "lora", "prompt"] = key(
        "none", "none: all parameters; lora (arXiv:2106.09685); prompt: vectors in front (arXiv:2104.08691)"
    )
    rank: Annotated[int, at_least(1, most=65_536)] = key(16, "lora")
    alpha: Positive = key(32.0, "lora: its product is multiplied by alpha / rank")
    rslora: bool = key(False, "lora: by alpha / sqrt(rank) (arXiv:2312.03732)")
    dropout: BelowOne = key(0.0, "lora: of what goes into A")
    targets: tuple[Pattern, ...] = key(
        (r"attn/[qkvo]", r"mlp/(gate|up|down)"), "lora: kernels of each layer (full match); these are all"
    )
    rows: tuple[str, ...] = key(("auto",), "tokens whose embedding and head rows train too; auto: ChatML's, if ours")
    without_rows: bool = key(False, "True: train an adapter although the rows of ChatML's tokens stay as they are")
    quantize: Literal["none", "nf4", "int8"] = key("none", "frozen layers: nf4 by 64 (QLoRA, arXiv:2305.14314), int8")
    prompt_tokens: Annotated[int, at_least(1, most=65_536)] = key(20, "prompt: how many vectors")
    prompt_text: str = key("", 'prompt: they begin as the embeddings of this text; "" = of random tokens')

    @property
    def scale(self) -> float:
        """Returns the factor by which a LoRA's product is multiplied: alpha / rank, or alpha / sqrt(rank) with rslora."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class ExamplesConfig:
    """chats and pairs; of data.path: a jsonl, json or parquet file, or a folder"""

    format: Literal["auto", "messages", "prompt", "sharegpt", "alpaca", "hh", "pairs"] = key(
        "auto", "auto: by the keys; prompt: prompt and response; hh: transcripts; pairs: chosen and rejected"
    )
    val_path: str = key("", 'held-out examples; "" = data.val_fraction of the others, by a hash of their content')
    benchmarks: str = key("", "folder of benchmark files; examples that hold one of their items are named")
    template: str = key("", "for a hub base without one: chatml (teaches two tokens), plain (User: ...), a file")
    ignore: tuple[str, ...] = key((), "keys of rows and messages that are read as if they were not there")
    last_only: bool = key(False, "True: of each chat the last answer alone is learnt")


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """pretraining text in post-training; against forgetting"""

    share: BelowOne = key(0.05, "of the tokens that count; 0 = none")
    path: str = key("", 'data directory or text; "" = the data of the origin if it is a run, else no replay')


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """preferences"""

    loss: Literal["sigmoid", "ipo", "robust", "orpo", "simpo"] = key(
        "sigmoid", "sigmoid (arXiv:2305.18290), ipo, robust; orpo and simpo: no reference"
    )
    beta: Positive = key(0.1, "how strongly the reference holds the policy; ipo's tau, simpo's scale, orpo's lambda")
    label_smoothing: Annotated[float, within(0, 0.5)] = key(0.0, "share of swapped labels; robust, and sigmoid as cDPO")
    margin: NotNegative = key(0.0, "simpo: the target margin, gamma")
    nll_weight: NotNegative = key(0.0, "of the cross-entropy of the chosen answers, which is added")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """what the policy says in a step; at temperature 1, so that it is the policy that speaks"""

    prompts: Size = key(8, "prompts in a step")
    answers: Size = key(8, "answers to each, which grpo compares. train.batch_size rows share prompts x answers")
    max_new_tokens: Size = key(256, "of an answer")
    rows: Count = key(0, "answers that are drawn at once; 0 = all")
    importance_cap: NotNegative = key(0.0, "greatest weight against a sampler unlike the trainer; 0 = none")


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """the loss of ppo and grpo"""

    average: Literal["token", "answer", "length"] = key(
        "token", "token: over all tokens (DAPO, arXiv:2503.14476); answer: GRPO; length: Dr. GRPO"
    )
    ratio: Literal["token", "answer"] = key("token", "answer: one ratio for an answer (GSPO, arXiv:2507.18071)")
    clip_low: Positive = key(0.2, "the ratio is clipped to at least 1 - clip_low")
    clip_high: Positive = key(0.28, "and at most 1 + clip_high; above clip_low it keeps entropy (DAPO)")
    scale_advantages: bool = key(False, "grpo: divide by the group's deviation (Dr. GRPO, arXiv:2503.20783, does not)")
    mask_truncated: bool = key(True, "answers that did not end do not count")
    overlong_tokens: Count = key(0, "the last tokens before max_new_tokens cost up to 1 of the reward (DAPO); 0 = none")
    epochs: Annotated[int, at_least(1, most=1000)] = key(1, "times that a step goes over its answers")
    minibatches: Size = key(1, "updates of each of them")
    beta: NotNegative = key(0.0, "weight of the KL divergence to the reference: in grpo's loss, in ppo's reward")
    kl_target: NotNegative = key(0.0, "ppo: adapts beta to this KL, in nats a token (arXiv:1909.08593); 0 = fixed")
    kl_horizon: Annotated[int, at_least(1)] = key(10_000, "ppo: answers over which beta adapts")
    reference: bool = key(True, "False: nothing is held to compare with, and no KL is told; needs beta=0")
    gamma: Share = key(1.0, "ppo: discount")
    gae_lambda: Share = key(0.95, "ppo: of the advantages (arXiv:1506.02438)")
    whiten: bool = key(True, "ppo: advantages get mean 0 and variance 1")
    value_clip: Positive = key(0.2, "ppo: how far a value may move from the old one")
    value_weight: NotNegative = key(0.1, "ppo: of the value's loss")
    value_from: Literal["zero", "reward"] = key("zero", "ppo: how the value head begins; reward: as reward.model's")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """what an answer is worth; several are added up"""

    tasks: str = key("", "prompts with answers: reasoning_gym:chain_sum?max_terms=2,gsm8k; data.path is not read then")
    function: Annotated[str, written(r"([^\W\d][\w.]*:[^\W\d]\w*)?", "MODULE:FUNCTION")] = key(
        "", "MODULE:FUNCTION, (prompts, answers, **columns) -> numbers; in a process of its own"
    )
    model: str = key("", "a run of `reward`, or the folder of a Hugging Face model with one label")
    format: Pattern = key("", "a regular expression that the whole answer should match; a dot matches line breaks too")
    format_weight: NotNegative = key(0.1, "what that is worth")
    run_code: bool = key(False, "True: tasks may run an answer, in a process without network, disk and keys")
    timeout_s: Positive = key(60.0, "of tasks and function, for all answers of a step; then for one tried alone")
