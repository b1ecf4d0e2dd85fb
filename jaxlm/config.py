"""Configuration: an ml_collections ConfigDict at the edge, frozen dataclasses inside.

`configs/base.py` is the only home of defaults; the dataclasses here have the same keys (a test compares them) and no
defaults, so a key that is read somewhere exists, is typed and is documented. Everything a user can get wrong raises
`ConfigError` with one line that says what is wrong and how to mend it.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import typing

from ml_collections import config_dict

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
    chat_tokens: bool
    val_fraction: float
    block_tokens: int
    num_threads: int
    num_workers: int
    prefetch: int
    timeout_s: float


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
    distributed: DistributedConfig


def resolve(config: config_dict.ConfigDict | dict) -> Config:
    """Checks types, fills derived values (0 = derive) and refuses impossible combinations. Raises ConfigError."""
    if isinstance(config, config_dict.ConfigDict):
        config = config.to_dict()
    resolved = _derive(_build(Config, config, ""))
    _validate(resolved)
    return resolved


def to_json(config: Config) -> str:
    """The resolved config as JSON, the content of WORKDIR/config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def _build(kind: typing.Any, value: typing.Any, where: str) -> typing.Any:
    """Builds `kind` (a dataclass, dict[str, X], tuple[X, ...] or scalar type) from plain values, checking every type."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise ConfigError(f"config.{where} must be a section with the keys {', '.join(hints)}")
        for key in value:
            if key not in hints:
                raise ConfigError(
                    f"unknown key config.{_join(where, key)}; {nearest_key(_join(where, key), list(hints))}"
                )
        missing = [key for key in hints if key not in value]
        if missing:
            raise ConfigError(f"missing key config.{_join(where, missing[0])}; begin the config with base.get_config()")
        return kind(**{key: _build(hint, value[key], _join(where, key)) for key, hint in hints.items()})
    origin = typing.get_origin(kind)
    if origin is dict and isinstance(value, dict):
        return {key: _build(typing.get_args(kind)[1], v, _join(where, key)) for key, v in value.items()}
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_build(typing.get_args(kind)[0], v, where) for v in value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ConfigError(f"config.{where}={value!r}: expected {getattr(kind, '__name__', kind)}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _derive(c: Config) -> Config:
    """Fills values that 0, -1 or an empty string leave to be derived from others."""
    m, t = c.model, c.train
    heads = m.n_heads
    model = dataclasses.replace(
        m,
        n_kv_heads=m.n_kv_heads or heads,
        head_dim=m.head_dim or (m.d_model // heads if heads > 0 and m.d_model % heads == 0 else 0),
        max_seq_len=m.max_seq_len or t.seq_len,
    )
    train = dataclasses.replace(t, microbatch_size=t.microbatch_size or t.batch_size)
    sources = {"text": SourceConfig(path=c.data.path, weight=1.0)} if c.data.path else c.data.sources
    evaluation = dataclasses.replace(c.eval, batch_size=c.eval.batch_size or train.microbatch_size)
    data_dir = c.data.dir or (os.path.join(c.workdir, "data") if c.workdir else "")
    data = dataclasses.replace(c.data, dir=data_dir, sources=sources)
    return dataclasses.replace(c, model=model, train=train, data=data, eval=evaluation)


# Key -> smallest and largest value that makes sense.
_BOUNDS = {
    **dict.fromkeys(
        ("model.n_layers", "model.d_model", "model.n_heads", "model.n_kv_heads", "model.d_ff"), (1, math.inf)
    ),
    **dict.fromkeys(("train.seq_len", "train.steps", "train.batch_size"), (1, math.inf)),
    **dict.fromkeys(
        ("model.vocab_size", "model.max_seq_len", "train.microbatch_size", "eval.batch_size", "log.every_steps"),
        (1, math.inf),
    ),
    **dict.fromkeys(("checkpoint.keep_last", "data.num_threads", "data.block_tokens", "data.prefetch"), (1, math.inf)),
    **dict.fromkeys(("model.rope.theta", "model.rope.factor", "data.timeout_s"), (1, math.inf)),
    **dict.fromkeys(("model.rope.low_freq_factor", "model.rope.high_freq_factor"), (0, math.inf)),
    **dict.fromkeys(
        ("model.init_std", "model.rope.original_max_len", "loss.z_loss", "loss.tile_tokens"), (0, math.inf)
    ),
    **dict.fromkeys(("train.eval_every_steps", "train.max_nonfinite_steps", "eval.max_batches"), (0, math.inf)),
    **dict.fromkeys(("optim.warmup_steps", "optim.weight_decay", "optim.eps", "optim.clip_norm"), (0, math.inf)),
    **dict.fromkeys(("checkpoint.every_steps", "checkpoint.keep_every", "checkpoint.keep_best"), (0, math.inf)),
    **dict.fromkeys(
        ("sample.every_steps", "sample.max_new_tokens", "sample.temperature", "sample.top_k"), (0, math.inf)
    ),
    **dict.fromkeys(("data.max_bytes", "data.num_workers"), (0, math.inf)),
    "seed": (0, 2**32 - 1),  # jax.random.key takes 32 bits of it
    **dict.fromkeys(("hardware.usd_per_hour", "hardware.peak_tflops"), (0, math.inf)),
    **dict.fromkeys(("optim.final_lr_ratio", "optim.b1", "optim.b2", "sample.top_p"), (0, 1)),
}


def _validate(c: Config) -> None:
    """Refuses what can't work, one line each, before anything is compiled."""
    _validate_choices(c)
    _validate_bounds(c)
    _validate_model(c.model, c.train)
    _validate_training(c.train, c.optim)
    _validate_data(c.data)
    for key, value in dataclasses.asdict(c.mesh).items():
        _need(value == -1 or value > 0, f"config.mesh.{key}={value} must be positive, or -1 for all remaining devices")
    _need(
        list(dataclasses.asdict(c.mesh).values()).count(-1) <= 1,
        "config.mesh: only one axis can be -1 (all remaining devices)",
    )


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


# Key -> the names that it can have.
_CHOICES = {
    "model.family": ("llama", "gpt2"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.remat": ("none", "full", "dots", "names"),
    "model.attention": ("auto", "xla", "blocked", "cudnn", "pallas"),
    "model.rope.scaling": ("none", "linear", "llama3"),
    "optim.schedule": ("cosine", "wsd", "linear", "constant"),
    "optim.name": ("adamw",),
    "log.wandb": ("", "offline", "online"),
}


def _validate_choices(c: Config) -> None:
    for key, names in _CHOICES.items():
        value = _value(c, key)
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        _need(value in names, f"config.{key}={value!r}: choose one of {', '.join(n or repr('') for n in names)}{hint}")


def _validate_bounds(c: Config) -> None:
    for key, (low, high) in _BOUNDS.items():
        value = _value(c, key)
        near = f"at least {low}" if high == math.inf else f"in {low} to {high}"
        _need(math.isfinite(value) and low <= value <= high, f"config.{key}={value} must be {near}")
    for key in ("optim.lr", "model.norm_eps", "sample.top_p"):
        _need(0 < _value(c, key) < math.inf, f"config.{key}={_value(c, key)} must be greater than 0")


def _value(c: Config, key: str) -> typing.Any:
    for part in key.split("."):
        c = getattr(c, part)
    return c


def _validate_model(m: ModelConfig, t: TrainConfig) -> None:
    _need(
        m.head_dim > 0, f"model.d_model={m.d_model} is not divisible by model.n_heads={m.n_heads}; set model.head_dim"
    )
    _need(
        m.n_heads % m.n_kv_heads == 0,
        f"model.n_heads={m.n_heads} is not divisible by model.n_kv_heads={m.n_kv_heads}; each key-value head serves a "
        "whole number of query heads",
    )
    _need(m.family != "llama" or m.head_dim % 2 == 0, f"model.head_dim={m.head_dim} must be even for RoPE")
    _need(m.family != "gpt2" or m.n_kv_heads == m.n_heads, "model.family=gpt2 has no GQA: set model.n_kv_heads=0")
    _need(0 <= m.dropout < 1, f"config.model.dropout={m.dropout} must be at least 0 and below 1")
    _need(
        m.family != "gpt2" or t.seq_len <= m.max_seq_len,
        f"train.seq_len={t.seq_len} is longer than model.max_seq_len={m.max_seq_len}, the learned positions",
    )
    rope = m.rope
    _need(
        rope.scaling != "llama3" or rope.high_freq_factor > rope.low_freq_factor > 0 < rope.original_max_len,
        f"model.rope.scaling=llama3 needs high_freq_factor={rope.high_freq_factor} above low_freq_factor="
        f"{rope.low_freq_factor}, both and original_max_len above 0",
    )


def _validate_training(t: TrainConfig, o: OptimConfig) -> None:
    _need(
        t.batch_size % t.microbatch_size == 0,
        f"train.batch_size={t.batch_size} is not divisible by train.microbatch_size={t.microbatch_size}",
    )
    _need(
        o.warmup_steps < t.steps,
        f"optim.warmup_steps={o.warmup_steps} is not shorter than train.steps={t.steps}: lower the one or raise the other",
    )
    _need(0 < o.decay_fraction <= 1, f"config.optim.decay_fraction={o.decay_fraction} must be in (0, 1]")
    for pattern in o.decay + o.no_decay:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"config.optim: {pattern!r} is not a regular expression: {error}") from error


def _validate_data(d: DataConfig) -> None:
    _need(bool(d.sources) or bool(d.dir), "no data: set config.data.path, data.sources or data.dir")
    for name, source in d.sources.items():
        _need(source.weight >= 0, f"config.data.sources.{name}.weight={source.weight} must not be negative")
        _need(bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)), f"source name {name!r}: letters, digits, - and _ only")
    empty = [name for name, source in d.sources.items() if not source.path]
    _need(
        len(empty) in (0, len(d.sources)),
        f"data.sources.{empty[:1]} has no path while others have one: an empty path means that all is in data.dir",
    )
    total = sum(source.weight for source in d.sources.values())
    _need(not d.sources or total > 0, "every weight in data.sources is 0: nothing to train on")
    _need(0 < d.val_fraction <= 0.5, f"config.data.val_fraction={d.val_fraction} must be above 0, at most 0.5")


def nearest_key(key: str, keys: typing.Sequence[str]) -> str:
    """A hint at the key that was probably meant."""
    last = key.split(".")[-1]
    same = [k for k in keys if k.split(".")[-1] == last]
    near = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        by_last = {k.split(".")[-1]: k for k in keys}
        near = [by_last[m] for m in difflib.get_close_matches(last, by_last, n=1)]
    return f"did you mean config.{near[0]}?" if near else "jaxlm train --help lists all keys"
