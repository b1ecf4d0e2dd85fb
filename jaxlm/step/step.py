"""Builds the train step, a pure function (frozen, state, batch) -> (state, metrics), which is jitted once.

Legend: B batch, A parts (microbatches, or minibatches of a step), M rows of a part, T tokens.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax

from jaxlm.config import Config, ConfigError, TrainConfig
from jaxlm.devices import tree
from jaxlm.step import optim
from jaxlm.step.objectives.base import Batch, Objective, Running, Sums, Variables, split_rows
from jaxlm.step.state import TrainState

Metrics = dict[str, jax.Array]
TrainStep = typing.Callable[[Variables, TrainState, Batch], tuple[TrainState, Metrics]]
Rates = typing.Callable[[jax.Array], jax.Array | dict]  # step -> one rate, or a tree of them; see `optim.rates`


def make(config: Config, objective: Objective, tx: optax.GradientTransformationExtraArgs, rates: Rates) -> TrainStep:
    """Returns the train step as a pure function; `parts.Parts.jit` jits it.

    If the loss or the gradient of an update is not finite, the update changes nothing but the counters. The metrics are
    float32 scalars: `loss`, the objective's own metrics, `grad_norm` (before clipping), `update_norm`, both norms also
    by parameter group, `lr`, `skipped`, `skipped_in_a_row`; means over the updates if a step has several.
    """
    dtype = jnp.dtype(config.model.dtype)
    key = jax.random.key(config.seed)
    microbatches = _microbatches(config.train, objective.minibatches)

    def update(frozen: Variables, state: TrainState, batch: Batch, key: jax.Array | None) -> tuple[TrainState, Metrics]:
        sums, grads = _gradients(objective, frozen, cast(state.params, dtype), batch, key, microbatches)
        params, grads = tree.merge(state.params), tree.merge(grads)
        scale = 1.0 / jnp.where(sums.weight > 0, sums.weight, 1.0)
        loss = sums.loss * scale
        grads, norms, grad_norm = optim.clip(grads, scale, config.optim.clip_norm)
        # Not `optax.apply_if_finite`, which accepts a bad update in the end; nor a choice between old and new state
        # afterwards, which would keep both in memory: `tx` keeps each moment as it is where `ok` is false.
        ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        lr = rates(state.step + 1)
        rate_metrics = _rate_metrics(lr)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, state.opt_state, params, ok=ok, rate=rate_metrics["lr"])
        updates = jax.tree.map(lambda rate, u: jax.tree.map(lambda u: -rate * u, u), lr, updates)
        params = jax.tree.map(lambda p, u: jnp.where(ok, p + u, p), params, updates)
        bad = (~ok).astype(jnp.int32)
        state = dataclasses.replace(
            state,
            params=tree.split(params, like=state.params),
            opt_state=opt_state,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
        )
        update_norms = optim.group_norms(updates)
        metrics = {"loss": loss, "grad_norm": grad_norm, "update_norm": optim.total_norm(update_norms)} | rate_metrics
        metrics |= {name: value * scale for name, value in sums.metrics.items()}
        metrics |= {f"grad_norm/{name}": value for name, value in norms.items()}
        return state, metrics | {f"update_norm/{name}": value for name, value in update_norms.items()}

    updated = update if objective.updates == 1 else _repeated(update, objective)

    def train_step(frozen: Variables, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # The key of a step follows from its number, so that a resumed run draws what an uninterrupted one does.
        step_key = jax.random.fold_in(key, state.step) if config.model.dropout or config.adapter.dropout else None
        opt_state = state.opt_state
        if config.optim.offload:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        after, metrics = updated(frozen, dataclasses.replace(state, opt_state=opt_state), batch, step_key)
        running = _adapted(objective, state, after, metrics)
        metrics |= {"skipped": after.skipped, "skipped_in_a_row": after.skipped_in_a_row}
        after = dataclasses.replace(after, step=state.step + 1, running=running)
        return after, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)

    return train_step


def _adapted(objective: Objective, before: TrainState, after: TrainState, metrics: Metrics) -> Running:
    """Returns the objective's running scalars after a step; unchanged if an update of the step was not finite."""
    good = after.skipped == before.skipped
    adapted = objective.adapt(before.running, metrics)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), adapted, before.running)


def _microbatches(train: TrainConfig, minibatches: int) -> int:
    """Returns the number of microbatches of an update. Raises ConfigError if they do not divide its rows."""
    rows, left = divmod(train.batch_size, minibatches)
    size = min(train.microbatch_size, rows)
    if left or rows % size:
        raise ConfigError(
            f"train.batch_size={train.batch_size} in {minibatches} minibatches must be whole microbatches of "
            f"train.microbatch_size={train.microbatch_size} rows each"
        )
    return rows // size


Update = typing.Callable[[Variables, TrainState, Batch, jax.Array | None], tuple[TrainState, Metrics]]


def _repeated(update: Update, objective: Objective) -> Update:
    """Returns a function that scans all updates of a step, each on its part of the batch. Metrics are means over updates."""
    times, minibatches = objective.updates, objective.minibatches

    def updates(
        frozen: Variables, state: TrainState, batch: Batch, key: jax.Array | None
    ) -> tuple[TrainState, Metrics]:
        parts = jax.tree.map(functools.partial(split_rows, parts=minibatches), batch)

        def one(state: TrainState, index: jax.Array) -> tuple[TrainState, Metrics]:
            # Indexed, not scanned over: a scan would need a copy of the batch for each pass.
            part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index % minibatches, keepdims=False), parts)
            return update(frozen, state, part, None if key is None else jax.random.fold_in(key, index))

        state, metrics = jax.lax.scan(one, state, jnp.arange(times))
        return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)

    return updates


def _gradients(
    objective: Objective, frozen: Variables, trained: Variables, batch: Batch, key: jax.Array | None, microbatches: int
) -> tuple[Sums, Variables]:
    """Returns (sums, gradients of the trained variables), added over all microbatches (in float32 if there are several)."""

    def loss_fn(trained: Variables, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        sums = objective.sums(frozen | trained, batch, key)
        return sums.loss, sums

    def sums_and_grads(batch: Batch, key: jax.Array | None) -> tuple[Sums, Variables]:
        (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(trained, batch, key)
        return sums, grads

    batch = objective.prepare(batch)
    if microbatches == 1:
        return sums_and_grads(batch, key)

    def one(total: tuple[Sums, Variables], inputs: tuple[jax.Array, Batch]) -> tuple[tuple[Sums, Variables], None]:
        index, micro = inputs
        of_micro = sums_and_grads(micro, None if key is None else jax.random.fold_in(key, index))
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of_micro), None

    parts = jax.tree.map(functools.partial(split_rows, parts=microbatches), batch)
    shapes = jax.eval_shape(sums_and_grads, jax.tree.map(lambda x: x[0], parts), key)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    total, _ = jax.lax.scan(one, zero, (jnp.arange(microbatches), parts))
    return total


_EXACT = ("embedding", "/rows", "/prompt")  # tables


def cast(params: Variables, dtype: jnp.dtype) -> Variables:
    """Returns the parameters in the compute type. Vectors, embedding tables and quantised kernels keep their types.

    The gradient of a table's row is a sum over all tokens with that id; in bfloat16 the sum of a frequent token would lose most
    of its terms. So the model casts the rows that it looks up, and the whole table only if it is also the head.
    """

    def one(name: str, p: jax.Array) -> jax.Array:
        return p.astype(dtype) if p.ndim > 1 and not name.endswith(_EXACT) else p

    return {of: part if of in ("quantized", "packed") else tree.map_named(one, part) for of, part in params.items()}


def _rate_metrics(lr: jax.Array | dict) -> Metrics:
    """Returns `lr`, the highest rate; with several rates also `lr/GROUP`, the highest of each parameter group."""
    named = tree.named_leaves(lr)
    groups: dict[str, list[jax.Array]] = {}
    for name, rate in named:
        of_group = groups.setdefault(tree.group_of(name), [])
        if not any(rate is other for other in of_group):
            of_group.append(rate)
    highest = {f"lr/{name}": functools.reduce(jnp.maximum, found) for name, found in groups.items()}
    return {"lr": functools.reduce(jnp.maximum, highest.values())} | (highest if len(named) > 1 else {})
