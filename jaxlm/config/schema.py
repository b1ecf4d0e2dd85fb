"""The sections of the config as frozen dataclasses: each key's type, and the values that it may have.

A key's default and comment are in `configs/base.py`, rules for several keys in `checks.py`. Nothing is written twice.
"""

import dataclasses
import math
from typing import Annotated, Literal

from jaxlm.config.annotations import REGULAR_EXPRESSION, above, at_least, from_to_below, within, written

LARGEST = 2**31 - 1  # of a size: an axis of an array
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
Pattern = Annotated[str, REGULAR_EXPRESSION]
Attention = Literal["xla", "blocked", "cudnn", "cudnn_packed", "tokamax", "pallas"]
Axis = Annotated[int, at_least(1, or_else={-1: "all remaining devices"}, most=LARGEST)]
Remat = Literal["none", "names", "dots", "full"]


class ConfigError(ValueError):
    """Bad input from the user: the message is one line that says what is wrong and how to mend it (exit code 2)."""


class RunError(RuntimeError):
    """A run can't go on for a reason outside the program: one line that says why and how to mend it (exit code 1)."""


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


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    theta: Annotated[float, at_least(1)]
    scaling: Literal["none", "linear", "llama3"]
    factor: Annotated[float, at_least(1)]
    low_freq_factor: Annotated[float, at_least(0)]
    high_freq_factor: Annotated[float, at_least(0)]
    original_max_len: Annotated[int, at_least(0)]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    family: Literal["llama", "gpt2"]
    n_layers: Annotated[int, at_least(1, most=10_000)]
    d_model: Annotated[int, at_least(1, most=LARGEST)]
    n_heads: Annotated[int, at_least(1, most=LARGEST)]
    n_kv_heads: Annotated[int, at_least(0, most=LARGEST)]
    head_dim: Annotated[int, at_least(0, most=LARGEST)]
    d_ff: Annotated[int, at_least(1, most=LARGEST)]
    vocab_size: Annotated[int, at_least(0, most=LARGEST)]
    max_seq_len: Annotated[int, at_least(0, most=LARGEST)]
    tie_embeddings: bool
    bias: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: Annotated[float, above(0)]
    rope: RopeConfig
    dropout: Annotated[float, from_to_below(0, 1)]
    init_std: Annotated[float, at_least(0)]
    dtype: Literal["auto", "float32", "bfloat16"]
    attention: Literal["auto", Attention]
    remat: Literal["auto", Remat]
    scan_layers: bool
    fuse_projections: bool
    fp8: bool
    offload: bool

    @property
    def padded_vocab_size(self) -> int:
        """Returns the rows of the embedding table: `vocab_size` rounded up to a multiple of 128 (added rows are masked)."""
        return -(-self.vocab_size // 128) * 128


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
    block_tokens: Annotated[int, at_least(1, most=LARGEST)]
    num_threads: Annotated[int, at_least(1, most=1024)]
    num_workers: Annotated[int, at_least(0, most=1024)]
    prefetch: Annotated[int, at_least(1, most=65_536)]
    timeout_s: Annotated[float, at_least(1, most=7 * 86_400)]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[int, at_least(1, most=10**12)]
    batch_size: Annotated[int, at_least(1, most=LARGEST)]
    seq_len: Annotated[int, at_least(1, most=LARGEST)]
    microbatch_size: Annotated[int, at_least(-1, most=LARGEST)]
    eval_every_steps: Annotated[int, at_least(0, most=10**12)]
    max_nonfinite_steps: Annotated[int, at_least(0, most=10**12)]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: Annotated[float, at_least(0)]
    tile_tokens: Annotated[int, at_least(0, most=LARGEST)]


BY_RULE = ("lr", "matrix_lr_ratio", "b2")  # keys of `optim` that are 0 where a rule is to say them


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "adamw8bit", "adafactor", "muon"]
    mu_dtype: Literal["float32", "bfloat16"]
    ns_steps: Literal[3, 5]
    full_precision: tuple[Pattern, ...]
    offload: bool
    lr: Annotated[float, at_least(0)]
    matrix_lr_ratio: Annotated[float, at_least(0)]
    rows_lr_ratio: Annotated[float, above(0)]
    schedule: Literal["cosine", "wsd", "linear", "constant"]
    warmup_steps: Annotated[int, at_least(0, most=10**12)]
    decay_fraction: Annotated[float, above(0, most=1)]
    final_lr_ratio: Annotated[float, within(0, 1)]
    schedule_steps: Annotated[int, at_least(0, most=10**12)]
    decay_at_step: Annotated[int, at_least(0, most=10**12)]
    b1: Annotated[float, from_to_below(0, 1)]
    b2: Annotated[float, from_to_below(0, 1)]
    eps: Annotated[float, at_least(0)]
    weight_decay: Annotated[float, at_least(0)]
    decay_follows_rate: bool
    decay: tuple[Pattern, ...]
    no_decay: tuple[Pattern, ...]
    clip_norm: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: Annotated[int, at_least(0, most=10**12)]
    every_minutes: Annotated[float, at_least(0, or_else={-1: "auto"})]
    verify: bool
    keep_last: Annotated[int, at_least(1, most=LARGEST)]
    keep_every: Annotated[int, at_least(0, most=10**12)]
    keep_best: Annotated[int, at_least(0, most=LARGEST)]
    best_metric: str
    best_is: Literal["lowest", "highest"]
    reserve_mb: Annotated[float, at_least(0)]
    max_unprotected_minutes: Annotated[float, at_least(0)]
    max_unprotected_usd: Annotated[float, at_least(0)]
    mirror: str
    mirror_weights_only: bool
    mirror_keep_last: Annotated[int, at_least(1, most=LARGEST)]
    mirror_timeout_s: Annotated[float, above(0)]


@dataclasses.dataclass(frozen=True)
class RedteamConfig:
    scorers: tuple[str, ...]
    toxicity: bool
    max_new_tokens: Annotated[int, at_least(1, most=2**20)]
    temperature: Annotated[float, at_least(0)]
    seed: Annotated[int, at_least(0, most=LARGEST)]
    search_tokens: Annotated[int, at_least(0, most=10**18)]


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    at_start: bool
    batch_size: Annotated[int, at_least(0, most=LARGEST)]
    max_mb: Annotated[float, at_least(0, most=1e12)]
    max_examples: Annotated[int, at_least(0, most=LARGEST)]
    older_batches: tuple[Annotated[int, at_least(0, most=LARGEST)], ...]
    tasks: tuple[str, ...]
    tasks_every_steps: Annotated[int, at_least(0, most=10**12)]
    max_items: Annotated[int, at_least(0, most=LARGEST)]
    fewshot: Annotated[int, at_least(0, or_else={-1: "as each task says"}, most=1000)]
    chat_template: bool
    data_dir: str
    run_code: bool
    run_code_with_network: bool
    code_seconds: Annotated[float, above(0)]
    code_memory_mb: Annotated[float, at_least(64)]
    redteam: RedteamConfig

    @property
    def max_prompts(self) -> int:
        """Returns how many held-out prompts are asked at most; 0 = all."""
        return math.prod(self.older_batches) if self.older_batches else self.max_examples


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    prompts: tuple[str, ...]
    every_steps: Annotated[int, at_least(0, most=10**12)]
    at_steps: tuple[Annotated[int, at_least(0)], ...]
    max_new_tokens: Annotated[int, at_least(0, most=2**20)]
    temperature: Annotated[float, at_least(0)]
    also_greedy: bool
    chat_template: bool
    top_k: Annotated[int, at_least(0, most=LARGEST)]
    top_p: Annotated[float, above(0, most=1)]


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
    steps: Annotated[int, at_least(0, most=10**12)]
    tokens: Annotated[int, at_least(0, most=10**18)]
    usd: Annotated[float, at_least(0)]
    max_val_loss: Annotated[float, at_least(0)]
    min_tokens_per_second: Annotated[float, at_least(0)]
    max_nonfinite_steps: Annotated[int, at_least(0, or_else={-1: "no gate"})]


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
    plan: dict[str, PhaseConfig]
    accept: str
    shrink: Literal["", "cpu"]


@dataclasses.dataclass(frozen=True)
class StopConfig:
    usd: Annotated[float, at_least(0)]
    hours: Annotated[float, at_least(0)]
    usd_per_centinat: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class StabilityConfig:
    roll_back: bool
    spike_z: Annotated[float, at_least(0)]
    spike_steps: Annotated[int, at_least(0, most=10**12)]
    window: Annotated[int, within(8, 100_000)]
    skip: tuple[Annotated[str, written(r"[0-9]{1,18}:[0-9]{1,18}", "the first and the last batch as A:B")], ...]
    overfit_evals: Annotated[int, at_least(0)]

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Returns the first and the last batch of each entry of `skip`."""
        return tuple((int(first), int(last)) for first, _, last in (window.partition(":") for window in self.skip))


@dataclasses.dataclass(frozen=True)
class OnExitConfig:
    done: str
    gate: str
    failed: str
    stopped: str


@dataclasses.dataclass(frozen=True)
class RunsConfig:
    supervise: Literal["auto", "on", "off"]
    backoff_s: Annotated[float, at_least(0)]
    hang_s: Annotated[float, at_least(0)]
    notices: tuple[Literal["gce", "aws"], ...]
    on_exit: OnExitConfig
    on_exit_unmirrored: bool


@dataclasses.dataclass(frozen=True)
class NotifyConfig:
    urls: tuple[str, ...]
    events: tuple[Literal["gate", "stall", "crash", "end", "budget"], ...]
    heartbeat_url: str
    heartbeat_minutes: Annotated[float, above(0)]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: Axis
    fsdp: Axis
    tensor: Axis
    context: Axis


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every_steps: Annotated[int, at_least(1, most=10**12)]
    parameters: bool
    tensorboard: bool
    wandb: Literal["", "offline", "online"]


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    usd_per_hour: Annotated[float, at_least(0)]
    peak_tflops: Annotated[float, at_least(0)]
    compile_cache: str
    xla_flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    steps: Annotated[
        str, written(r"([0-9]{1,18}:[0-9]{1,18})?", "the first and the last step to trace as A:B, such as 20:25")
    ]

    @property
    def window(self) -> tuple[int, int] | None:
        """Returns the first and the last step to trace; None if no step is traced."""
        first, _, last = self.steps.partition(":")
        return (int(first), int(last)) if self.steps else None


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    mesh: str
    hosts: Annotated[int, at_least(0)]
    prices: str
    accelerator: str
    compile: bool
    measure: Literal["auto", "never", "again"]
    preemptions_per_day: Annotated[float, at_least(0)]
    restart_minutes: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    exhaustive: bool
    microbatch_sizes: tuple[Annotated[int, at_least(1)], ...]
    remat: tuple[Remat, ...]
    attention: tuple[Attention, ...]
    scan_layers: tuple[bool, ...]
    tile_tokens: tuple[Annotated[int, at_least(0)], ...]
    steps: Annotated[int, at_least(1)]
    step_seconds: Annotated[float, at_least(0)]
    max_seconds: Annotated[float, at_least(0)]
    memory_gb: Annotated[float, at_least(0)]


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    auto: bool
    coordinator: str
    num_processes: Annotated[int, at_least(0)]
    process_id: Annotated[int, at_least(-1)]
    start_timeout_s: Annotated[float, at_least(1)]
    heartbeat_s: Annotated[float, at_least(1)]


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


@dataclasses.dataclass(frozen=True)
class Config:
    program: Literal["pretrain", "sft", "reward", "dpo", "ppo", "grpo"]
    workdir: str
    seed: Annotated[int, within(0, 2**32 - 1)]
    origin: str
    origin_checkpoint: Annotated[str, written("latest|best|[0-9]{1,18}", "latest, best or a step")]
    origin_state: bool
    origin_merge: bool
    adapter: AdapterConfig
    examples: ExamplesConfig
    replay: ReplayConfig
    dpo: DpoConfig
    rollout: RolloutConfig
    policy: PolicyConfig
    reward: RewardConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    loss: LossConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    sample: SampleConfig
    phases: PhasesConfig
    stop: StopConfig
    stability: StabilityConfig
    runs: RunsConfig
    notify: NotifyConfig
    mesh: MeshConfig
    log: LogConfig
    hardware: HardwareConfig
    profile: ProfileConfig
    distributed: DistributedConfig
    plan: PlanConfig
    tune: TuneConfig
    engine: Literal["local", "ray", "slurm"]
    prepare: PrepareConfig
