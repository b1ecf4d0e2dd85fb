"""Makes a config small enough to run its whole plan, with all phases, on a CPU in minutes: `phases.shrink=cpu`."""

import dataclasses
import math

from jaxlm.config.corpora import DataConfig, SourceConfig
from jaxlm.config.schema import Config, PhaseConfig, with_keys

BY = 500  # steps, tokens and dollars are divided by this
ROWS, TOKENS = 8, 128  # of a batch
LEAST_INTERVAL = 10  # steps between two evaluations or checkpoints, or train.steps where the run is shorter
LEAST_STEPS = 2  # of a phase, and of the run
CORPUS = {"prose": 0.87, "math": 0.1, "code": 0.03}  # the embedded corpus and its mixture
FINAL = {"math": 0.4}  # its final weights, if the config has any
EVAL_MB, EVAL_EXAMPLES = 0.015, 32  # MB per source; chats, pairs or prompts
# The price of a two-core machine; at a GPU's price the first budget would be spent before the first step.
USD_PER_HOUR = 0.1
MAX_BYTES = 1_000_000  # read of each source


def shrunk(c: Config) -> Config:
    """Returns a small version of the config: 2 layers of d 128, 8 rows of 128 tokens, steps and dollars / 500.

    The corpus is the embedded one, in the run's folder, so that nothing is downloaded. `phases.shrink` of the result is "",
    so that a run with this config is not shrunk again when it resumes.
    """
    heads = {"n_heads": 4, "n_kv_heads": 2 if c.model.n_kv_heads else 0, "head_dim": 32}
    sizes = {"n_layers": 2, "d_model": 128, "d_ff": 512, "vocab_size": 4096, "max_seq_len": 0} | heads
    plain = {"attention": "auto", "dtype": "auto", "remat": "none", "offload": False, "fp8": False}
    steps = max(_over(c.train.steps), LEAST_STEPS)
    phases = sorted(c.phases.plan.items(), key=lambda item: item[1].steps)
    changes = {
        "model": sizes | plain,
        "train": {
            "steps": steps,
            "batch_size": ROWS,
            "seq_len": TOKENS,
            "microbatch_size": 0,
            "eval_every_steps": _interval(c.train.eval_every_steps, steps),
        },
        "optim": {
            "offload": False,
            "warmup_steps": min(_over(c.optim.warmup_steps), steps - 1),
            "schedule_steps": _over(c.optim.schedule_steps),
            "decay_at_step": _over(c.optim.decay_at_step),
        },
        "data": _data(c.data),
        "checkpoint": {
            "every_steps": _interval(c.checkpoint.every_steps, steps),
            "keep_every": _over(c.checkpoint.keep_every),
            "max_unprotected_usd": c.checkpoint.max_unprotected_usd / BY,
        },
        "sample": {
            "every_steps": _interval(c.sample.every_steps, steps),
            "at_steps": tuple(_over(step) for step in c.sample.at_steps),
            "max_new_tokens": min(c.sample.max_new_tokens, 24),
        },
        "rollout": {"prompts": 4, "answers": 4, "max_new_tokens": 24, "rows": 0},
        "policy": {"minibatches": min(c.policy.minibatches, 2), "overlong_tokens": 0},
        "eval": {"batch_size": 0, "max_mb": EVAL_MB, "max_examples": EVAL_EXAMPLES, "older_batches": ()},
        "prepare": {"sources": {}},
        "mesh": {"data": -1, "fsdp": 1, "tensor": 1, "context": 1},
        "log": {"every_steps": max(_over(c.log.every_steps), 1)},
        "hardware": {"usd_per_hour": USD_PER_HOUR if c.hardware.usd_per_hour else 0.0},
        "profile": {"steps": ""},
        "phases": {"plan": {name: _phase(phase) for name, phase in phases}, "shrink": ""},
        "stop": {"usd": c.stop.usd / BY},
    }
    return with_keys(c, **changes)


def summary(c: Config, unread: str = "") -> str:
    """Returns one line that describes a config returned by `shrunk`; `unread` is the data directory that it leaves."""
    ends = ", ".join(f"{name} {phase.steps}" for name, phase in c.phases.plan.items() if phase.steps)
    m, t = c.model, c.train
    return (
        f"shrunk: {m.n_layers} layers of d {m.d_model}, vocabulary {m.vocab_size:,}, {t.batch_size} rows of {t.seq_len}, "
        f"steps and dollars over {BY} ({t.steps} steps{f'; phases end after {ends}' * bool(ends)}), evaluated every "
        f"{t.eval_every_steps} and saved every {c.checkpoint.every_steps}, the embedded corpus in {c.data.dir}"
        f"{f' in place of {unread}' * (unread not in ('', c.data.dir))}, ${c.hardware.usd_per_hour:.2f} an hour"
    )


def _over(steps: int) -> int:
    """Returns `steps` divided by BY, rounded up; 0 stays 0."""
    return math.ceil(steps / BY)


def _interval(every: int, steps: int) -> int:
    """Returns an interval divided by BY, but at least LEAST_INTERVAL and at most `steps`; 0 stays 0."""
    return min(max(_over(every), LEAST_INTERVAL), steps) if every else 0


def _data(d: DataConfig) -> dict[str, object]:
    """Returns the settings of the embedded corpus, with a final mixture if the config has one."""
    sources = {name: SourceConfig(path=f"embedded:{name}", weight=weight) for name, weight in CORPUS.items()}
    final = dataclasses.replace(d.final, weights=FINAL if d.final.weights else {})
    return {"dir": "", "path": "", "sources": sources, "final": final, "tokenizer": "", "max_bytes": MAX_BYTES}


def _phase(phase: PhaseConfig) -> PhaseConfig:
    steps = max(_over(phase.steps), LEAST_STEPS) if phase.steps else 0
    tokens = max(_over(phase.tokens), LEAST_STEPS * ROWS * TOKENS) if phase.tokens else 0
    return dataclasses.replace(phase, steps=steps, tokens=tokens, usd=phase.usd / BY)
