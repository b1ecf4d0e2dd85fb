"""Checks combinations of keys. The limits of a single key are beside its type in `schema.py`."""

import dataclasses
import re
from collections.abc import Mapping

from jaxlm.config.build import nearest
from jaxlm.config.corpora import DataConfig, PrepareConfig
from jaxlm.config.posttraining import AdapterConfig, DpoConfig
from jaxlm.config.schema import (
    BY_RULE,
    CheckpointConfig,
    Config,
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PhasesConfig,
    RunsConfig,
    TrainConfig,
)


def validate(c: Config) -> None:
    """Raises ConfigError if keys do not go together. Called before anything is read or compiled."""
    _validate_model(c.model, c.train)
    _validate_training(c.train, c.optim)
    _validate_by_rule(c.program, c.optim)
    _validate_data(c.data, c.prepare)
    _validate_final(c)
    _validate_profile(c)
    _validate_phases(c.phases)
    _need(
        not c.origin_state or bool(c.origin),
        "origin_state=True needs config.origin, the folder of the run to branch from",
    )
    _need(
        len(c.eval.older_batches) in (0, 2),
        f"eval.older_batches={c.eval.older_batches}: (batches, rows of each), or ()",
    )
    _validate_mesh(c.mesh)
    _validate_end(c.runs, c.checkpoint)
    _validate_stability(c)
    if c.program == "dpo":
        _validate_dpo(c.dpo, c.adapter)
    if c.program in ("ppo", "grpo"):
        _validate_rollouts(c)
    _need(
        not c.checkpoint.best_metric.startswith("eval/") or bool(c.eval.tasks),
        f"config.checkpoint.best_metric={c.checkpoint.best_metric} is a benchmark's, and config.eval.tasks names none",
    )


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


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
    _need(
        not o.schedule_steps or o.warmup_steps < o.schedule_steps,
        f"optim.warmup_steps={o.warmup_steps} is not shorter than optim.schedule_steps={o.schedule_steps}",
    )
    _need(
        o.decay_at_step < t.steps,
        f"optim.decay_at_step={o.decay_at_step} is not before the last step, train.steps={t.steps}",
    )
    _need(
        o.mu_dtype == "float32" or o.name in ("adamw", "muon"),
        f"config.optim.mu_dtype={o.mu_dtype} is for adamw and muon; optim.name={o.name} has its own: set it back to float32",
    )


def _validate_by_rule(program: str, o: OptimConfig) -> None:
    left = [f"optim.{key}" for key in BY_RULE if not getattr(o, key)]
    _need(
        program == "pretrain" or not left,
        f"{''.join(left[:1])}=0 is the rule of pretraining, and there is none for {program}: give config.{''.join(left[:1])}",
    )


def _validate_data(d: DataConfig, p: PrepareConfig) -> None:
    _need(bool(d.sources or d.dir or p.sources), "no data: set config.data.path, data.sources or data.dir")
    for name in [*d.sources, *p.sources]:
        _need(bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)), f"source name {name!r}: letters, digits, - and _ only")
    _need("target" not in p.sources, "a source can't be called target: the mismatch report calls prepare.target so")
    empty = [name for name, source in d.sources.items() if not source.path]
    _need(
        len(empty) in (0, len(d.sources)),
        f"data.sources.{empty[:1]} has no path while others have one: an empty path means that all is in data.dir",
    )
    total = sum(source.weight for source in d.sources.values())
    _need(not d.sources or total > 0, "every weight in data.sources is 0: nothing to train on")


def _validate_final(c: Config) -> None:
    d = c.data
    named = ", ".join(d.final.weights)
    _need(
        not d.final.share or bool(named),
        f"data.final.share={d.final.share} needs data.final.weights: --config.data.final.weights.NAME=WEIGHT for each source "
        "whose weight changes",
    )
    _need(
        not named or bool(d.final.share or c.optim.decay_at_step),
        f"data.final.weights ({named}) has no steps: set data.final.share, such as 0.2 for the last fifth of them",
    )
    _need(
        not named or c.program == "pretrain",
        f"data.final.weights ({named}) is for pretraining; program={c.program} has no mixture of sources: take it out",
    )
    listed = d.sources or c.prepare.sources
    if any(source.path for source in listed.values()):  # else all that is in data.dir may be named
        final_weights({name: source.weight for name, source in listed.items()}, d.final.weights)


def final_weights(first: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns source -> weight in the final mixture: the first mixture, but for the sources that `weights` names.

    Args:
      first: source -> weight in the first mixture, for all sources of the data.
      weights: `data.final.weights`.

    Raises:
      ConfigError: a source is unknown, or no weight is positive.
    """
    if unknown := [name for name in weights if name not in first]:
        raise ConfigError(f"data.final.weights names {unknown[0]}, which is no source: {nearest(unknown[0], first)}")
    found = {**first, **weights}
    _need(
        not weights or any(weight > 0 for weight in found.values()),
        "data.final.weights leaves every source at 0: nothing to train on; give one a positive weight",
    )
    return found


def _validate_profile(c: Config) -> None:
    if c.profile.window:
        first, last = c.profile.window
        _need(
            1 <= first <= last <= c.train.steps,
            f"config.profile.steps={c.profile.steps}: the first step must be at least 1, the last at least the first and "
            f"at most train.steps={c.train.steps}",
        )


def _validate_phases(p: PhasesConfig) -> None:
    for name, phase in p.plan.items():
        _need(bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)), f"phase name {name!r}: letters, digits, - and _ only")
        _need(
            bool(phase.steps) != bool(phase.tokens),
            f"phases.plan.{name} ends after steps={phase.steps} or tokens={phase.tokens}: give one of them",
        )
    _need(
        not p.accept or p.accept in p.plan,
        f"phases.accept={p.accept} is no phase of phases.plan; there are {', '.join(p.plan) or 'none'}",
    )


def _validate_stability(c: Config) -> None:
    for first, last in c.stability.windows:
        _need(1 <= first <= last, f"config.stability.skip: {first}:{last} must begin at 1 or later, and end after that")


def _validate_dpo(d: DpoConfig, a: AdapterConfig) -> None:
    _need(
        not d.label_smoothing or d.loss in ("sigmoid", "robust"),
        f"dpo.label_smoothing={d.label_smoothing} is for dpo.loss=sigmoid and robust, not for {d.loss}: set it to 0",
    )
    _need(
        d.loss != "robust" or d.label_smoothing < 0.5,
        "dpo.label_smoothing=0.5 says that half of the labels are swapped: nothing can be learnt; give a share below it",
    )
    _need(
        not d.margin or d.loss == "simpo", f"dpo.margin={d.margin} is for dpo.loss=simpo, not for {d.loss}: set it to 0"
    )
    _need(
        not a.dropout,
        f"dpo trains without dropout, so that policy and reference differ by what is learnt alone; adapter.dropout is "
        f"{a.dropout}: set it to 0",
    )


def _validate_rollouts(c: Config) -> None:
    r, p, w, rows = c.rollout, c.policy, c.reward, c.train.batch_size
    answers = r.prompts * r.answers
    _need(
        answers % rows == 0,
        f"rollout.prompts={r.prompts} times rollout.answers={r.answers} is not a multiple of train.batch_size={rows}: each "
        "row holds a whole number of answers",
    )
    room = c.train.seq_len // (answers // rows)
    _need(
        room > r.max_new_tokens,
        f"{answers} answers in {rows} rows of train.seq_len={c.train.seq_len} have {room} tokens each, and "
        f"rollout.max_new_tokens={r.max_new_tokens} leaves no room for a prompt: "
        f"give --config.rollout.max_new_tokens={max(room // 4, 1)}, a longer train.seq_len or more rows (train.batch_size)",
    )
    _need(rows % p.minibatches == 0, f"train.batch_size={rows} is not a multiple of policy.minibatches={p.minibatches}")
    _need(
        c.program == "ppo" or r.answers > 1,
        "grpo compares the answers to a prompt with each other: rollout.answers must be at least 2",
    )
    _need(p.reference or not p.beta, f"policy.beta={p.beta} needs the reference: set policy.reference=True")
    _need(not p.kl_target or p.beta > 0, f"policy.kl_target={p.kl_target} adapts policy.beta, which must begin above 0")
    _need(
        p.overlong_tokens < r.max_new_tokens,
        f"policy.overlong_tokens={p.overlong_tokens} must be below rollout.max_new_tokens={r.max_new_tokens}",
    )
    _need(
        not c.model.dropout and not c.adapter.dropout,
        f"{c.program} trains without dropout, so that the policy that is trained is the one that answered: set it to 0",
    )
    _need(p.value_from == "zero" or bool(w.model), "policy.value_from=reward needs reward.model")


def _validate_mesh(mesh: MeshConfig) -> None:
    sizes = list(dataclasses.asdict(mesh).values())
    _need(sizes.count(-1) <= 1, "config.mesh: only one axis can be -1 (all remaining devices)")


def _validate_end(runs: RunsConfig, checkpoint: CheckpointConfig) -> None:
    asked = [cause for cause, command in dataclasses.asdict(runs.on_exit).items() if command]
    _need(
        not asked or bool(checkpoint.mirror) or runs.on_exit_unmirrored,
        f"config.runs.on_exit.{''.join(asked[:1])} needs config.checkpoint.mirror, or config.runs.on_exit_unmirrored=True: "
        "a machine that is gone takes its checkpoints with it",
    )
