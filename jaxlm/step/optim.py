"""Makes the optimizer, which turns gradients into updates, and the schedule of the learning rate.

The optimizer does not contain the schedule: the train step looks up the rate by the step's number and multiplies the
updates by it. So every optimizer has the same schedule, and a skipped step does not delay it.
"""

import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxlm import tree
from jaxlm.config import ConfigError, OptimConfig
from jaxlm.models.params import input_axes
from jaxlm.step.adam import scale_by_adam


def rates(config: OptimConfig, steps: int) -> optax.Schedule:
    """Returns a function from the step (1 to `steps`) to its learning rate: linear warm-up, then `optim.schedule`.

    Cosine, linear and wsd end at `final_lr_ratio` times the peak. wsd (warm-up, stable, decay; MiniCPM,
    arXiv:2404.06395) stays at the peak and then falls linearly during the last `decay_fraction` of all steps.

    `schedule_steps` stretches the schedule over another number of steps. After `decay_at_step` the rate leaves it, and falls
    linearly towards 0 (arXiv:2502.15938), which it would reach one step after the last.

    This function returns one scalar, the rate of all parameters. The train step also accepts a function that returns a
    tree of scalars, such as {"embed": 1e-4, "layers_0": 1e-3, ...}: each is the rate of all parameters below that name.
    """
    planned = _planned(config, config.schedule_steps or steps)
    begin = config.decay_at_step
    if not begin:
        return planned

    def decaying(step: jax.typing.ArrayLike) -> jax.Array:
        share = (steps + 1 - step) / (steps + 1 - begin)  # of the rate at `begin` that is left
        return jnp.where(step <= begin, planned(step), planned(begin) * share)

    return decaying


def _planned(config: OptimConfig, steps: int) -> optax.Schedule:
    """The warm-up and `optim.schedule` over so many steps."""
    lr, end = config.lr, config.lr * config.final_lr_ratio
    rest = steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(lr, rest, alpha=config.final_lr_ratio)
    elif config.schedule == "linear":
        after = optax.linear_schedule(lr, end, rest)
    elif config.schedule == "wsd":
        decay = min(max(round(steps * config.decay_fraction), 1), rest)
        after = optax.linear_schedule(lr, end, decay, transition_begin=rest - decay)
    else:
        after = optax.constant_schedule(lr)
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, lr, config.warmup_steps), after], [config.warmup_steps])


def make(config: OptimConfig, params: dict, rows: tuple[int, ...] = ()) -> optax.GradientTransformation:
    """Returns the optimizer. The train step multiplies its updates by the learning rate.

    The updates include decoupled weight decay (arXiv:1711.05101). `update(grads, state, params, ok=ok)` returns the
    state unchanged if the scalar `ok` is false.

    Args:
      config: `config.optim`.
      params: all trained parameters (arrays or shapes) in one tree, as `tree.merge` returns it.
      rows: ids whose rows of embedding and head learn at `optim.rows_lr_ratio` times the rate.

    Raises:
      ConfigError: a parameter is in neither or both of `optim.decay` and `optim.no_decay`, or muon has no matrix to train.
    """
    try:
        mask = tree.regex_mask(params, config.decay, config.no_decay)
    except ValueError as error:
        raise ConfigError(f"optim.decay and optim.no_decay must split all parameters: {error}") from error
    if config.name == "muon" and not any(_matrix_axes(name, p) for name, p in tree.named_leaves(params)):
        name = tree.named_leaves(params)[0][0]
        raise ConfigError(f"optim.name=muon is for kernels of layers, and none is trained ({name}, ...): take adamw")
    found = [_OPTIMIZERS[config.name](config), optax.add_decayed_weights(config.weight_decay, mask=mask)]
    return optax.chain(*found, *([_faster(rows, config.rows_lr_ratio)] if rows else []))


def _faster(rows: tuple[int, ...], ratio: float) -> optax.GradientTransformation:
    """Multiplies the updates of some ids' rows: of the embedding (V, D), and of the kernel of a head (D, V) its columns."""

    def scaled(name: str, update: jax.Array) -> jax.Array:
        if name not in ("embed/embedding", "head/kernel"):
            return update
        embedding = name == "embed/embedding"
        ids = jnp.arange(update.shape[0 if embedding else 1])
        ratios = jnp.where(jnp.isin(ids, jnp.array(rows)), ratio, 1).astype(update.dtype)
        return update * (ratios[:, None] if embedding else ratios)

    # With a ratio of 1 the state has the same form, so that a run whose ratio was changed resumes.
    return optax.stateless(lambda updates, _: tree.map_named(scaled, updates)) if ratio != 1 else optax.identity()


def _adamw(c: OptimConfig) -> optax.GradientTransformation:
    return scale_by_adam(c.b1, c.b2, c.eps, mu_dtype=c.mu_dtype)


def _adamw8bit(c: OptimConfig) -> optax.GradientTransformation:
    return scale_by_adam(c.b1, c.b2, c.eps, full_precision=c.full_precision)


def _adafactor(c: OptimConfig) -> optax.GradientTransformation:
    """Adafactor (arXiv:1804.04235): second moments by row and column, no first moment.

    Updates are not scaled by the parameter's size (as in arXiv:2106.04560), so a learning rate means the same as for AdamW.
    Dimensions of 32 and more are factored. Optax's default is 128, but then attention kernels (D, heads, head dim) would
    have no two dimensions to factor.
    """
    del c
    return _gated(optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=32), optax.clip_by_block_rms(1.0)))


def _muon(c: OptimConfig) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of the layers, AdamW for embeddings, head, norms and biases.

    Momentum and scale are those of arXiv:2502.16982. They give Muon's updates the root mean square of AdamW's, so one
    learning rate and one weight decay serve both.
    """
    orthogonalise = optax.contrib.scale_by_muon(beta=0.95, mu_dtype=c.mu_dtype, weight_dimension_numbers=_matrices)

    def scale(update: jax.Array, axes: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        fans = (math.prod(update.shape[axis] for axis in part) for part in axes)
        return 0.2 * math.sqrt(max(fans)) * update

    rms = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, _matrices(updates)))

    def labels(params: dict) -> dict:
        return tree.map_named(lambda name, p: "muon" if _matrix_axes(name, p) else "adamw", params)

    return optax.partition({"muon": _gated(optax.chain(orthogonalise, rms)), "adamw": _adamw(c)}, labels)


def _gated(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with the gate that `adam.scale_by_adam` has: the state stays as it is if `ok` is false."""

    def update(grads: dict, state: optax.OptState, params: dict, *, ok: jax.Array, **extra) -> tuple:
        updates, new = tx.update(grads, state, params)
        return updates, jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _matrices(params: dict) -> dict:
    return tree.map_named(_matrix_axes, params)


def _matrix_axes(name: str, p: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns a layer kernel's input and output axes, so that (D, N, H) is a matrix too; None for other parameters."""
    if tree.layer_of(name) is None or not name.endswith("/kernel"):
        return None
    inputs = input_axes(name)
    return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, p.ndim)))


_OPTIMIZERS = {"adamw": _adamw, "adamw8bit": _adamw8bit, "adafactor": _adafactor, "muon": _muon}
