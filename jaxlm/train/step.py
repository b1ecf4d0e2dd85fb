"""The train step: (state, batch) -> (state, metrics), pure and jitted once.

Legend: B batch, A microbatches, M rows of a microbatch, T tokens.
"""

import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlm import sharding, tree
from jaxlm.config import Config
from jaxlm.objectives.lm import Batch, Objective
from jaxlm.train.state import TrainState


def make(
    config: Config, objective: Objective, tx: optax.GradientTransformation, lr: optax.Schedule
) -> typing.Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """The step as a pure function of (state, batch); see `jit` for the compiled one.

    A step whose loss or gradient is not finite changes nothing but the counters. The metrics are float32 scalars:
    `loss`, what the objective adds, `grad_norm` (before clipping), `update_norm`, each also by parameter group, `lr`,
    `skipped`, `skipped_in_a_row`.
    """
    dtype = jnp.dtype(config.model.dtype)
    key = jax.random.key(config.seed)
    microbatches = config.train.batch_size // config.train.microbatch_size

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        step_key = jax.random.fold_in(key, state.step) if config.model.dropout else None
        grads, loss_sum, weight, sums = _gradients(objective, cast(state.params, dtype), batch, step_key, microbatches)
        scale = 1.0 / jnp.where(weight > 0, weight, 1.0)
        loss = loss_sum * scale
        norms = {name: norm * scale for name, norm in _group_norms(grads).items()}
        grad_norm = _total(norms)
        clip = jnp.minimum(1.0, config.optim.clip_norm / grad_norm) if config.optim.clip_norm else 1.0
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * (scale * clip), grads)
        opt_state = state.opt_state
        if config.optim.offload:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(grads, opt_state, state.params, ok=ok)
        rate = lr(state.step + 1)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        params = jax.tree.map(lambda p, u: jnp.where(ok, p + u, p), state.params, updates)
        bad = (~ok).astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
        )
        update_norms = _group_norms(updates)
        metrics = {"loss": loss, "lr": rate, "grad_norm": grad_norm, "update_norm": _total(update_norms)}
        metrics |= {"skipped": new.skipped, "skipped_in_a_row": new.skipped_in_a_row}
        metrics |= {name: value * scale for name, value in sums.items()}
        metrics |= {f"grad_norm/{name}": value for name, value in norms.items()}
        metrics |= {f"update_norm/{name}": value for name, value in update_norms.items()}
        return new, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)

    return train_step


def jit(train_step: typing.Callable, state_shardings: TrainState, mesh: Mesh) -> typing.Any:
    """Compiles the step for a mesh, the old state's memory given to the new one. Call it under `jax.set_mesh(mesh)`."""
    return jax.jit(
        train_step,
        in_shardings=(state_shardings, sharding.batch_sharding(mesh)),
        out_shardings=(state_shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )


def _gradients(objective, params, batch: Batch, key, microbatches: int):
    """Summed gradients (float32 when accumulated), loss, weight and metrics over all microbatches."""

    def loss_fn(params, batch, key):
        loss_sum, weight, sums = objective(params, batch, key, True)
        return loss_sum, (weight, sums)

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if microbatches == 1:
        (loss_sum, (weight, sums)), grads = value_and_grad(params, batch, key)
        return grads, loss_sum, weight, sums

    def split(x_BxT: jax.Array) -> jax.Array:
        # Every A-th row, not A runs of rows: each device then keeps the rows that it holds.
        rows = x_BxT.shape[0] // microbatches
        x_AxMxT = x_BxT.reshape(rows, microbatches, *x_BxT.shape[1:]).swapaxes(0, 1)
        return sharding.constrain(x_AxMxT, None, "batch", *(None,) * (x_BxT.ndim - 1))

    def one(total, inputs):
        index, micro = inputs
        micro_key = None if key is None else jax.random.fold_in(key, index)
        (loss_sum, (weight, sums)), grads = value_and_grad(params, micro, micro_key)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, (grads, loss_sum, weight, sums)), None

    split_batch = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], split_batch)
    (loss, (weight, sums)), grads = jax.eval_shape(value_and_grad, params, first, key)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), (grads, loss, weight, sums))
    total, _ = jax.lax.scan(one, zero, (jnp.arange(microbatches), split_batch))
    return total


def cast(params: typing.Any, dtype: jnp.dtype) -> typing.Any:
    """Parameters in the compute type, once a step; vectors (norms, biases of the MLP) and embedding tables stay float32.

    A table's gradient is a sum over all tokens with that id: in bfloat16 a frequent token would lose most of it. The
    rows that are looked up are cast instead, and the table as a whole where it is the head.
    """

    def one(name: str, p: jax.Array) -> jax.Array:
        return p.astype(dtype) if p.ndim > 1 and not name.endswith("embedding") else p

    return tree.map_named(one, params)


def _group_norms(grads: typing.Any) -> dict[str, jax.Array]:
    """L2 norm by parameter group (`embed`, `layers/attn`, ...), float32."""
    squares: dict[str, jax.Array] = {}
    for name, leaf in tree.named_leaves(grads):
        group = tree.group_of(name)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {group: jnp.sqrt(value) for group, value in squares.items()}


def _total(norms: dict[str, jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(norm) for norm in norms.values()))
