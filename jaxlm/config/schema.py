"""The sections of the configuration as frozen dataclasses: the keys of `configs/base.py`, typed, without defaults."""

import dataclasses
import typing

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")


class ConfigError(ValueError):
    """Bad input from the user: the message is one line that says what is wrong and how to mend it (exit code 2)."""


class RunError(RuntimeError):
    """A run that can't go on for a reason outside the program, in one line with the mend (exit code 1)."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    theta: float
    scaling: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    bias: bool
    qk_norm: bool
    norm_eps: float
    rope: RopeConfig
    dropout: float
    init_std: float
    dtype: str
    attention: str
    remat: str
    scan_layers: bool
    fuse_projections: bool
    fp8: bool
    offload: bool

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: the vocabulary rounded up to a multiple of 128 (the tail is masked)."""
        return -(-self.vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    path: str
    weight: float


@dataclasses.dataclass(frozen=True)
class DataConfig:
    dir: str
    path: str
    sources: dict[str, SourceConfig]
    text_key: str
    max_bytes: int
    tfds_dir: str
    hub_dir: str
    tokenizer: str
    tokenizer_model: str
    chat_tokens: bool
    val_fraction: float
    block_tokens: int
    num_threads: int
    num_workers: int
    prefetch: int
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class PrepareSourceConfig:
    path: str
    format: str
    text_key: str
    stages: tuple[str, ...]
    priority: int
    weight: float
    max_bytes: int
    licences: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """`stages` holds each stage's defaults; their types are those of the stages' own Settings (`corpus.stages`)."""

    sources: dict[str, PrepareSourceConfig]
    workers: int
    engine_options: tuple[str, ...]
    task_mb: float
    memory_gb: float
    examples: int
    excerpt_chars: int
    report_mb: float
    target: str
    stages: dict[str, dict[str, typing.Any]]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int
    batch_size: int
    seq_len: int
    microbatch_size: int
    eval_every_steps: int
    max_nonfinite_steps: int


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float
    tile_tokens: int


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: str
    mu_dtype: str
    full_precision: tuple[str, ...]
    offload: bool
    lr: float
    schedule: str
    warmup_steps: int
    decay_fraction: float
    final_lr_ratio: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay: tuple[str, ...]
    no_decay: tuple[str, ...]
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep_last: int
    keep_every: int
    keep_best: int


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    at_start: bool
    batch_size: int
    max_batches: int


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    prompts: tuple[str, ...]
    every_steps: int
    at_steps: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    tensor: int
    context: int


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every_steps: int
    tensorboard: bool
    wandb: str


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    usd_per_hour: float
    peak_tflops: float
    compile_cache: str
    xla_flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    steps: str

    @property
    def window(self) -> tuple[int, int] | None:
        """First and last traced step; None when nothing is traced."""
        first, _, last = self.steps.partition(":")
        return (int(first), int(last)) if self.steps else None


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    mesh: str
    hosts: int
    prices: str
    accelerator: str
    compile: bool
    preemptions_per_day: float
    restart_minutes: float


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    exhaustive: bool
    microbatch_sizes: tuple[int, ...]
    remat: tuple[str, ...]
    attention: tuple[str, ...]
    scan_layers: tuple[bool, ...]
    tile_tokens: tuple[int, ...]
    steps: int
    step_seconds: float
    max_seconds: float
    memory_gb: float


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    auto: bool
    coordinator: str
    num_processes: int
    process_id: int


@dataclasses.dataclass(frozen=True)
class Config:
    program: str
    workdir: str
    seed: int
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    loss: LossConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    sample: SampleConfig
    mesh: MeshConfig
    log: LogConfig
    hardware: HardwareConfig
    profile: ProfileConfig
    distributed: DistributedConfig
    plan: PlanConfig
    tune: TuneConfig
    engine: str
    prepare: PrepareConfig
