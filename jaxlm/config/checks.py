"""What can't work is refused here, one line each, before anything is read or compiled."""

import dataclasses
import difflib
import math
import re
import typing

from jaxlm.config.schema import Config, ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig

# Key -> smallest and largest value that makes sense.
_BOUNDS = {
    **dict.fromkeys(
        ("model.n_layers", "model.d_model", "model.n_heads", "model.n_kv_heads", "model.d_ff"), (1, math.inf)
    ),
    **dict.fromkeys(("train.seq_len", "train.steps", "train.batch_size"), (1, math.inf)),
    **dict.fromkeys(("model.vocab_size", "model.max_seq_len", "log.every_steps", "tune.steps"), (1, math.inf)),
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
    **dict.fromkeys(
        ("prepare.workers", "prepare.examples", "prepare.excerpt_chars", "prepare.report_mb"), (0, math.inf)
    ),
    **dict.fromkeys(("prepare.task_mb", "prepare.memory_gb"), (0.001, math.inf)),
    **dict.fromkeys(
        (
            "plan.hosts",
            "plan.preemptions_per_day",
            "plan.restart_minutes",
            "tune.max_seconds",
            "tune.step_seconds",
            "tune.memory_gb",
        ),
        (0, math.inf),
    ),
    "train.microbatch_size": (-1, math.inf),  # -1 = auto
    "eval.batch_size": (0, math.inf),  # 0 as long as the microbatch is auto
    "seed": (0, 2**32 - 1),  # jax.random.key takes 32 bits of it
    **dict.fromkeys(("hardware.usd_per_hour", "hardware.peak_tflops"), (0, math.inf)),
    **dict.fromkeys(("optim.final_lr_ratio", "optim.b1", "optim.b2", "sample.top_p"), (0, 1)),
}


def validate(c: Config) -> None:
    """Refuses what can't work, one line each, before anything is compiled."""
    _validate_choices(c)
    _validate_bounds(c)
    _validate_model(c.model, c.train)
    _validate_training(c.train, c.optim)
    _validate_data(c.data)
    _validate_profile(c)
    _validate_prepare(c)
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
    "model.remat": ("none", "names", "dots", "full", "auto"),
    "model.attention": ("auto", "xla", "blocked", "cudnn", "cudnn_packed", "tokamax", "pallas"),
    "model.rope.scaling": ("none", "linear", "llama3"),
    "optim.schedule": ("cosine", "wsd", "linear", "constant"),
    "optim.name": ("adamw", "adamw8bit", "adafactor", "muon"),
    "optim.mu_dtype": ("float32", "bfloat16"),
    "log.wandb": ("", "offline", "online"),
    "data.tokenizer_model": ("bpe", "unigram"),
    "engine": ("local", "ray", "slurm"),
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
    _need(
        not m.offload or m.remat == "names",
        f"config.model.offload needs model.remat=names, which says what waits in host memory; it is {m.remat}",
    )
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
        t.microbatch_size == -1 or t.batch_size % t.microbatch_size == 0,
        f"train.batch_size={t.batch_size} is not divisible by train.microbatch_size={t.microbatch_size}",
    )
    _need(
        o.warmup_steps < t.steps,
        f"optim.warmup_steps={o.warmup_steps} is not shorter than train.steps={t.steps}: lower the one or raise the other",
    )
    _need(0 < o.decay_fraction <= 1, f"config.optim.decay_fraction={o.decay_fraction} must be in (0, 1]")
    _need(
        o.mu_dtype == "float32" or o.name in ("adamw", "muon"),
        f"config.optim.mu_dtype={o.mu_dtype} is for adamw and muon; optim.name={o.name} has its own: set it back to float32",
    )
    for pattern in o.decay + o.no_decay + o.full_precision:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"config.optim: {pattern!r} is not a regular expression: {error}") from error


def _validate_profile(c: Config) -> None:
    steps = c.profile.steps
    _need(
        not steps or bool(re.fullmatch(r"[0-9]{1,18}:[0-9]{1,18}", steps)),
        f"config.profile.steps={steps!r}: give the first and the last step to trace as A:B, such as 20:25",
    )
    if c.profile.window:
        first, last = c.profile.window
        _need(
            1 <= first <= last <= c.train.steps,
            f"config.profile.steps={steps}: the first step must be at least 1, the last at least the first and at most "
            f"train.steps={c.train.steps}",
        )


def _validate_prepare(c: Config) -> None:
    has_data = c.data.sources or c.data.dir or c.prepare.sources
    _need(bool(has_data), "no data: set config.data.path, data.sources or data.dir")
    for name, source in c.prepare.sources.items():
        where = f"config.prepare.sources.{name}"
        _need(bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)), f"source name {name!r}: letters, digits, - and _ only")
        _need(name != "target", "a source can't be called target: the mismatch report calls prepare.target so")
        _need(source.weight >= 0, f"{where}.weight={source.weight} must not be negative")
        _need(-128 <= source.priority <= 127, f"{where}.priority={source.priority} must be in -128 to 127")
        _need(source.max_bytes >= 0, f"{where}.max_bytes={source.max_bytes} must not be negative")
        _need(bool(source.path), f"{where}.path is empty: name a folder, file, glob, URL or dataset")


def _validate_data(d: DataConfig) -> None:
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
