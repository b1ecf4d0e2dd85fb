"""Checks combinations of keys. The limits of a single key stand next to its type in `schema.py`."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxlm.config import schema
from jaxlm.config.build import nearest
from jaxlm.config.corpora import DataConfig, PrepareConfig
from jaxlm.config.posttraining import AdapterConfig, DpoConfig
from jaxlm.host.errors import ConfigError

_D_FF = 1.5, 6.0  # times d_model
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # the name of a source or a phase


def validate(c: schema.Config) -> None:
    """Raises ConfigError if keys contradict each other. Called before anything is read or compiled."""
    for problem in _problems(c):
        raise ConfigError(problem)


def odd(m: schema.ModelConfig) -> Iterator[str]:
    """Yields notes on shapes that can be trained, but that no published model has."""
    if m.head_dim % 8:
        yield f"model.head_dim={m.head_dim} is no multiple of 8: GPUs take the slow attention; 64 or 128 are usual"
    if not _D_FF[0] <= m.d_ff / m.d_model <= _D_FF[1]:
        yield f"model.d_ff={m.d_ff} is {m.d_ff / m.d_model:.2g} times model.d_model={m.d_model}; 2 to 4 times are usual"


def _problems(c: schema.Config) -> Iterator[str]:
    yield from _of_model(c.model, c.train)
    yield from _of_training(c.program, c.train, c.optim)
    yield from _of_data(c.data, c.prepare)
    yield from _of_final(c)
    if c.profile.window and not 1 <= c.profile.window[0] <= c.profile.window[1] <= c.train.steps:
        yield f"config.profile.steps={c.profile.steps} must be A:B with 1 <= A <= B <= train.steps={c.train.steps}"
    yield from _of_phases(c.phases)
    if c.origin_state and not c.origin:
        yield "origin_state=True needs config.origin, the folder of the run to branch from"
    if len(c.eval.older_batches) not in (0, 2):
        yield f"eval.older_batches={c.eval.older_batches} must be (batches, rows of each), or ()"
    if list(dataclasses.asdict(c.mesh).values()).count(-1) > 1:
        yield "config.mesh: only one axis can be -1 (all remaining devices)"
    yield from _of_end(c.runs, c.checkpoint)
    for first, last in c.stability.windows:
        if not 1 <= first <= last:
            yield f"config.stability.skip: {first}:{last} must begin at 1 or later, and end after that"
    if c.program == "dpo":
        yield from _of_dpo(c.dpo, c.adapter)
    if c.program in ("ppo", "grpo"):
        yield from _of_rollouts(c)
    if c.checkpoint.best_metric.startswith("eval/") and not c.eval.tasks:
        yield f"checkpoint.best_metric={c.checkpoint.best_metric} is of a benchmark, but config.eval.tasks is empty"


def _of_model(m: schema.ModelConfig, t: schema.TrainConfig) -> Iterator[str]:
    if m.head_dim <= 0:
        yield f"model.d_model={m.d_model} is not divisible by model.n_heads={m.n_heads}; set model.head_dim"
    if m.n_heads % m.n_kv_heads:
        yield f"model.n_heads={m.n_heads} is not divisible by model.n_kv_heads={m.n_kv_heads}: heads share them evenly"
    if m.family == "llama" and m.head_dim % 2:
        yield f"model.head_dim={m.head_dim} must be even for RoPE"
    if m.family == "gpt2" and m.n_kv_heads != m.n_heads:
        yield "model.family=gpt2 has no GQA: set model.n_kv_heads=0"
    if m.offload and m.remat != "names":
        yield f"config.model.offload needs model.remat=names, which selects what waits in host memory, not {m.remat}"
    if m.family == "gpt2" and t.seq_len > m.max_seq_len:
        yield f"train.seq_len={t.seq_len} is longer than model.max_seq_len={m.max_seq_len}, the learned positions"
    rope = m.rope
    if rope.scaling == "llama3" and not rope.high_freq_factor > rope.low_freq_factor > 0 < rope.original_max_len:
        factors = f"high_freq_factor={rope.high_freq_factor} above low_freq_factor={rope.low_freq_factor}"
        yield f"model.rope.scaling=llama3 needs {factors}, both and original_max_len above 0"


def _of_training(program: str, t: schema.TrainConfig, o: schema.OptimConfig) -> Iterator[str]:
    if t.microbatch_size != -1 and t.batch_size % t.microbatch_size:
        yield f"train.batch_size={t.batch_size} is not divisible by train.microbatch_size={t.microbatch_size}"
    warmup = f"optim.warmup_steps={o.warmup_steps} is not shorter than"
    if o.warmup_steps >= t.steps:
        yield f"{warmup} train.steps={t.steps}: raise these, or lower it: --config.optim.warmup_steps={t.steps // 10}"
    if o.schedule_steps and o.warmup_steps >= o.schedule_steps:
        yield f"{warmup} optim.schedule_steps={o.schedule_steps}"
    if o.decay_at_step >= t.steps:
        yield f"optim.decay_at_step={o.decay_at_step} is not before the last step, train.steps={t.steps}"
    if o.mu_dtype != "float32" and o.name not in ("adamw", "muon"):
        yield f"optim.mu_dtype={o.mu_dtype} is for adamw and muon: for optim.name={o.name} set it back to float32"

    for value, key in schema.BY_RULE.items() if program != "pretrain" else ():
        if not getattr(o, value):
            yield f"optim.{key}=0 is by the rule for pretraining, and there is none for {program}: give config.optim.{key}"
    if len(o.grown_from) not in (0, len(schema.GROWS)):
        yield f"optim.grown_from={o.grown_from}: leave it to jaxlm grow, which writes ({', '.join(schema.GROWS)})"
    if len(o.times) < len(o.rates):
        yield f"config.optim.rates={o.rates!r} has a pattern twice"
    for pattern, times in o.times.items():
        if not float(times.rstrip("^")) and pattern != schema.MATRICES:
            yield f"optim.rates: 0 is by rule, which the line {schema.MATRICES} alone can be: give {pattern} a number above 0"


def _of_data(d: DataConfig, p: PrepareConfig) -> Iterator[str]:
    if not (d.sources or d.dir or p.sources):
        yield "no data: set config.data.path, data.sources or data.dir"
    for name in [*d.sources, *p.sources]:
        if not _NAME.fullmatch(name):
            yield f"source name {name!r}: letters, digits, - and _ only"
    if "target" in p.sources:
        yield "a source can't be called target: the mismatch report uses that name for prepare.target"
    empty = [name for name, source in d.sources.items() if not source.path]
    if len(empty) not in (0, len(d.sources)):
        yield f"data.sources.{empty[:1]} has no path, which means that it is in data.dir, while others have one"
    if d.sources and not sum(source.weight for source in d.sources.values()) > 0:
        yield "every weight in data.sources is 0: nothing to train on"


def _of_final(c: schema.Config) -> Iterator[str]:
    d = c.data
    named = ", ".join(d.final.weights)
    if d.final.share and not named:
        yield f"data.final.share={d.final.share} needs data.final.weights: --config.data.final.weights.NAME=WEIGHT"
    if named and not d.final.share and not c.optim.decay_at_step:
        yield f"data.final.weights ({named}) has no steps: set data.final.share, such as 0.2 for the last fifth of them"
    if d.without and c.program != "pretrain":
        yield f"data.without={d.without} is for pretraining; program={c.program} reads no documents: remove it"
    if named and c.program != "pretrain":
        yield f"data.final.weights ({named}) is for pretraining; program={c.program} has no mixture: remove it"
    listed = d.sources or c.prepare.sources
    if any(source.path for source in listed.values()):  # else any source in data.dir may be named
        final_weights({name: source.weight for name, source in listed.items()}, d.final.weights)


def final_weights(first: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns source -> weight in the final mixture: the first mixture's weights, replaced by those in `weights`.

    Args:
      first: source -> weight in the first mixture, for all sources of the data.
      weights: `data.final.weights`.

    Raises:
      ConfigError: a source is unknown, or no weight is positive.
    """
    if unknown := [name for name in weights if name not in first]:
        raise ConfigError(f"data.final.weights names {unknown[0]}, which is no source: {nearest(unknown[0], first)}")
    final = {**first, **weights}
    if weights and not any(weight > 0 for weight in final.values()):
        raise ConfigError("data.final.weights leaves every source at 0: give one a positive weight")
    return final


def _of_phases(p: schema.PhasesConfig) -> Iterator[str]:
    for name, phase in p.plan.items():
        if not _NAME.fullmatch(name):
            yield f"phase name {name!r}: letters, digits, - and _ only"
        if bool(phase.steps) == bool(phase.tokens):
            yield f"phases.plan.{name} ends after steps={phase.steps} or tokens={phase.tokens}: give one of them"
    if p.accept and p.accept not in p.plan:
        yield f"phases.accept={p.accept} is no phase of phases.plan; there are {', '.join(p.plan) or 'none'}"


def _of_dpo(d: DpoConfig, a: AdapterConfig) -> Iterator[str]:
    smoothing = f"dpo.label_smoothing={d.label_smoothing}"
    if d.label_smoothing and d.loss not in ("sigmoid", "robust"):
        yield f"{smoothing} is for dpo.loss=sigmoid and robust, not for {d.loss}: set it to 0"
    if d.loss == "robust" and d.label_smoothing >= 0.5:
        yield f"{smoothing} means that half of the labels are swapped: nothing can be learnt; give a smaller share"
    if d.margin and d.loss != "simpo":
        yield f"dpo.margin={d.margin} is for dpo.loss=simpo, not for {d.loss}: set it to 0"
    if a.dropout:
        yield f"dpo trains without dropout, so that the policy is compared as it is: set adapter.dropout={a.dropout} to 0"


def _of_rollouts(c: schema.Config) -> Iterator[str]:
    r, p, rows = c.rollout, c.policy, c.train.batch_size
    answers = r.prompts * r.answers
    if answers % rows:
        advice = f"each row holds a whole number of answers; give --config.train.batch_size={math.gcd(answers, rows)}"
        drawn = f"rollout.prompts={r.prompts} times rollout.answers={r.answers}"
        yield f"{drawn} is not a multiple of train.batch_size={rows}: {advice}"
    room = c.train.seq_len // (answers // rows)
    if room <= r.max_new_tokens:
        each = f"{answers} answers in {rows} rows of train.seq_len={c.train.seq_len} have {room} tokens each"
        advice = f"--config.rollout.max_new_tokens={max(room // 4, 1)}, a longer train.seq_len or more rows (train.batch_size)"
        yield f"{each}, and rollout.max_new_tokens={r.max_new_tokens} leaves no room for a prompt: give {advice}"
    if rows % p.minibatches:
        yield f"train.batch_size={rows} is not a multiple of policy.minibatches={p.minibatches}"
    if c.program != "ppo" and r.answers <= 1:
        yield "grpo compares the answers to a prompt with each other: rollout.answers must be at least 2"
    if p.beta and not p.reference:
        yield f"policy.beta={p.beta} needs the reference: set policy.reference=True"
    if p.kl_target and p.beta <= 0:
        yield f"policy.kl_target={p.kl_target} adapts policy.beta, which must begin above 0"
    if p.overlong_tokens >= r.max_new_tokens:
        yield f"policy.overlong_tokens={p.overlong_tokens} must be below rollout.max_new_tokens={r.max_new_tokens}"
    if c.model.dropout or c.adapter.dropout:
        yield f"{c.program} trains the policy that answered, without dropout: set model.dropout, adapter.dropout to 0"
    if p.value_from != "zero" and not c.reward.model:
        yield "policy.value_from=reward needs reward.model"


def _of_end(runs: schema.RunsConfig, checkpoint: schema.CheckpointConfig) -> Iterator[str]:
    commands = [cause for cause, command in dataclasses.asdict(runs.on_exit).items() if command]
    if commands and not checkpoint.mirror and not runs.on_exit_unmirrored:
        needs = "config.checkpoint.mirror, or config.runs.on_exit_unmirrored=True"
        yield f"config.runs.on_exit.{commands[0]} needs {needs}: a machine that is gone takes its checkpoints with it"
