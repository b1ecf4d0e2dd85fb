"""Builds the optimizer, which turns gradients into updates, and the schedule of the learning rate. Clips gradients.

The optimizer does not contain the schedule: the train step looks up the rate by the step's number and multiplies the
updates by it. So every optimizer has the same schedule, and a skipped step does not delay it.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) is momentum, orthogonalised. Momentum (Nesterov's) and state are
those of `optax.contrib.scale_by_muon`; the orthogonalisation is `ops.polar`'s.

Adam (arXiv:1412.6980) has its moments in float32, or in eight bits (arXiv:2110.02861; `ops.quantize` rounds). The update is
computed from the new moments before they are rounded, so rounding affects later steps only. Both moments together take 2.03
bytes a parameter instead of 8.
"""

import functools
import math
import re
import typing
import zlib

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec

from jaxlm.config import ROWS, ConfigError, OptimConfig
from jaxlm.devices import sharding, tree
from jaxlm.models import growth
from jaxlm.models.params import axes_of, input_axes
from jaxlm.ops import polar, quantize

_MUON_BETA = 0.95
NEW = "new/"  # begins the name of what is new in a grown parameter, in `optim.rates`


def rates(config: OptimConfig, steps: int, params: dict | None = None) -> typing.Callable:
    """Returns a function from the step (1 to `steps`) to its learning rate: linear warm-up, then `optim.schedule`.

    Cosine, linear and wsd end at `final_lr_ratio` times the peak. wsd (warm-up, stable, decay; arXiv:2404.06395) stays at the
    peak and then falls linearly during the last `decay_fraction` of all steps. `schedule_steps` stretches the schedule over
    another number of steps. After `decay_at_step` the rate instead falls linearly towards 0 (arXiv:2502.15938), which it
    would reach one step after the last.

    The rate is one scalar, unless `params` are given and `optim.rates` gives some of them another rate: then it is a tree like
    `params`. The train step also accepts a shorter tree, {"embed": 1e-4, "layers_0": 1e-3, ...}: one rate for all parameters
    below a name.

    Raises ConfigError as `by_pattern` does.
    """
    planned = _planned(config, config.schedule_steps or steps)
    begin = config.decay_at_step

    def decaying(step: jax.typing.ArrayLike) -> jax.Array:
        share = (steps + 1 - step) / (steps + 1 - begin)  # of the rate at `begin` that is left
        return jnp.where(step <= begin, planned(step), planned(begin) * share)

    one = decaying if begin else planned
    ratios = None if params is None else _ratios(config, params)
    if ratios is None:
        return one

    def by_parameter(step: jax.typing.ArrayLike) -> dict:
        rate = one(step)
        times = {ratio: rate if ratio == 1 else rate * ratio for ratio in jax.tree.leaves(ratios)}  # each one once
        return jax.tree.map(times.get, ratios)

    return by_parameter


def check_learns(config: OptimConfig, steps: int, first: int = 1) -> None:
    """Raises ConfigError if none of the steps from `first` to `steps` has a rate above 0, by `rates`."""
    highest = min(max(config.warmup_steps, first), steps)  # the rate never rises after the warm-up
    if not rates(config, steps)(highest) > 1e-7 * config.lr:  # cosine's last rate may be above 0 by rounding
        longer = "config.optim.schedule_steps" if config.schedule_steps else "config.train.steps"
        raise ConfigError(
            f"no step from {first} to train.steps={steps} has a learning rate above 0, so nothing would be "
            f"learnt: its schedule ends at optim.final_lr_ratio={config.final_lr_ratio:g} of optim.lr={config.lr:g}; raise "
            f"{longer} or the ratio"
        )


def _ratios(config: OptimConfig, params: dict) -> dict | None:
    """Returns each parameter's rate divided by `optim.lr`, of a grown one its old part's; None if it is 1 for all."""
    times = {part: ratio for part, (_, ratio) in by_pattern(config, params).items()}
    ratios = tree.map_named(lambda name, _: times[name if name in times else NEW + name], params)
    return ratios if any(ratio != 1 for ratio in times.values()) else None


def _parts(config: OptimConfig, params: dict) -> dict[str, int]:
    """Returns part -> how many numbers it has: each parameter; of a grown model its old part, and `new/PARAMETER`."""
    sizes = {name: leaf.size for name, leaf in tree.named_leaves(params)}
    for name, old in growth.old_parts(params, config.grown_from).items() if config.grown_from else ():
        count = math.prod(old) if old else 0
        sizes |= {name: count, NEW + name: sizes[name] - count}
    return {name: size for name, size in sizes.items() if size}


def by_pattern(config: OptimConfig, params: dict) -> dict[str, tuple[str, float]]:
    """Returns part -> (the first pattern of `optim.rates` that matches it, "" if none does; its rate over `optim.lr`).

    The part `new/NAME` of a grown model is matched by what matches NAME too. "PATTERN 0.9^" gives the last layer 1, and each
    layer below it .9 of the rate of the one above it.

    Raises ConfigError if a pattern is the first of no part.
    """
    names = [*_parts(config, params)]
    layers = {name: tree.layer_of(name.removeprefix(NEW)) or 0 for name in names}
    found, last = dict.fromkeys(names, ("", 1.0)), max(layers.values())
    for pattern, times in reversed(config.times.items()):
        matches, each = re.compile(pattern).fullmatch, float(times.rstrip("^"))
        own = [name for name in names if matches(name) or matches(name.removeprefix(NEW))]
        found |= {name: (pattern, each ** (last - layers[name] if times[-1] == "^" else 1)) for name in own}
    if idle := config.times.keys() - {ROWS} - {pattern for pattern, _ in found.values()}:
        which = f"{min(idle)} is the first match of no trained parameter ({names[0]}, ...)"
        raise ConfigError(f"config.optim.rates: {which}: leave it out (log.parameters=True shows them all)")
    return found


def table(config: OptimConfig, variables: dict[str, dict]) -> list[list[str]]:
    """Returns the rows of a table of `optim.rates`: pattern, how many numbers learn at its rate, its peak; [] if empty."""
    times, sizes = by_pattern(config, params := tree.merge(variables)), _parts(config, params)
    rows = [["RATES", "parameters", "peak"]] if config.rates else []
    for pattern in [*config.times, ""] if rows else []:
        own = [name for name, (first, _) in times.items() if first == pattern]
        peaks = [f"{config.lr * rate:.3g}" for rate in sorted(times[name][1] for name in own)]
        if pattern == ROWS:
            rows.append(["  rows", "those of adapter.rows", f"{config.lr * float(config.times[ROWS]):.3g}"])
        elif own:
            ends = " to ".join(dict.fromkeys((peaks[0], peaks[-1])))
            rows.append([f"  {pattern or 'all others'}", f"{sum(sizes[name] for name in own):,}", ends])
    return rows


def _planned(config: OptimConfig, steps: int) -> optax.Schedule:
    lr, end = config.lr, config.lr * config.final_lr_ratio
    rest = steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(lr, rest, alpha=config.final_lr_ratio)
    elif config.schedule == "linear":
        after = _falling(lr, end, 0, rest)
    elif config.schedule == "wsd":
        decay = _last_fall(config, steps)
        after = _falling(lr, end, rest - decay, decay)
    else:
        after = optax.constant_schedule(lr)
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, lr, config.warmup_steps), after], [config.warmup_steps])


def _last_fall(config: OptimConfig, steps: int) -> int:
    """Returns the number of steps over which the rate of wsd falls."""
    return min(max(round(steps * config.decay_fraction), 1), steps - config.warmup_steps)


def decay_begins(config: OptimConfig, steps: int) -> int:
    """Returns the last step before the rate's fall at the end, of a branch or of wsd; 0 for a schedule without such a fall."""
    planned = config.schedule_steps or steps
    return config.decay_at_step or (planned - _last_fall(config, planned) if config.schedule == "wsd" else 0)


def _falling(lr: float, end: float, begin: int, steps: int) -> optax.Schedule:
    """Returns a schedule: `lr` until `begin`, then a linear fall in `steps` steps exactly to `end` (optax's may go below 0)."""
    return lambda count: end + (lr - end) * ((steps - jnp.clip(count - begin, 0, steps)) / max(steps, 1))


def make(
    config: OptimConfig, params: dict, rows: tuple[int, ...] = (), dtype: str = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, with decoupled weight decay (arXiv:1711.05101). The train step multiplies its updates by the rate.

    `update(grads, state, params, ok=ok, rate=rate)` returns the state unchanged if the scalar `ok` is false. `rate` is the
    step's highest rate, for `optim.decay_follows_rate`. `rows`: ids at the rate of the line `rows`. Muon multiplies in `dtype`.

    Raises ConfigError if a parameter is in neither or both of `optim.decay` and `no_decay`, or muon has no matrix to train.
    """
    try:
        mask = tree.regex_mask(params, config.decay, config.no_decay)
    except ValueError as error:
        raise ConfigError(f"optim.decay and optim.no_decay must split all parameters: {error}") from error
    times = {name: ratio for name, (_, ratio) in by_pattern(config, params).items()}
    if config.name == "muon" and not any(map(_is_matrix, times)):
        raise ConfigError(f"optim.name=muon needs layer kernels; only {min(times)}, ... are trained: take adamw")
    directions = _muon(config, dtype) if config.name == "muon" else _OPTIMIZERS[config.name](config)
    chain = [directions, optax.masked(_decay(config, max(jax.tree.leaves(_ratios(config, params)), default=1.0)), mask)]
    chain += [_apart(growth.old_parts(params, config.grown_from), times)] if config.grown_from else []
    return optax.chain(*chain, *([_faster(rows, float(config.times.get(ROWS, 0)), times)] if rows else []))


def _decay(config: OptimConfig, highest: float) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that adds the weight decay, with `decay_follows_rate` multiplied by rate / peak rate.

    `highest`: the highest rate of a parameter over `optim.lr`.
    """
    # The train step multiplies the decay by the rate again, so then it falls as the rate's square. One factor serves all
    # parameters, because all rates are the same share of their peaks.
    # Where a step is only timed (tune, doctor), a rate left to the rule is 0: a peak of 1 then avoids 0 / 0.
    peak = config.lr * highest if config.lr else 1.0

    def update(
        updates: dict, state: optax.EmptyState, params: dict, *, rate: jax.Array | None = None, **extra
    ) -> tuple:
        del extra
        strength = config.weight_decay * (rate / peak if config.decay_follows_rate else 1.0)
        return jax.tree.map(lambda u, p: u + strength * p, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _apart(old: dict[str, tuple[int, ...] | None], times: dict[str, float]) -> optax.GradientTransformation:
    """Returns a transformation that gives the new part of each grown parameter its own rate; the step gives all the old's.

    Args:
      old: parameter -> how much of each axis is old.
      times: part -> its rate over `optim.lr`.
    """

    def scaled(name: str, update: jax.Array) -> jax.Array:
        if not {name, NEW + name} <= times.keys() or times[name] == times[NEW + name]:
            return update  # it is old or new as a whole
        places = (jax.lax.broadcasted_iota(jnp.int32, update.shape, axis) for axis in range(update.ndim))
        inside = functools.reduce(jnp.logical_and, (place < n for place, n in zip(places, old[name], strict=True)))
        return update * jnp.where(inside, 1, times[NEW + name] / times[name]).astype(update.dtype)

    return optax.stateless(lambda updates, _: tree.map_named(scaled, updates))


def _faster(rows: tuple[int, ...], ratio: float, times: dict[str, float]) -> optax.GradientTransformation:
    """Returns a transformation for the ids' rows of the embedding (V, D), columns of the head (D, V): they learn at `ratio`.

    `ratio` is over `optim.lr`; 0 leaves them at the rate of all the table. `times`: each parameter's rate over `optim.lr`.
    """

    def scaled(name: str, update: jax.Array) -> jax.Array:
        if name not in ("embed/embedding", "head/kernel"):
            return update
        embedding = name == "embed/embedding"
        ids = jnp.arange(update.shape[0 if embedding else 1])
        ratios = jnp.where(jnp.isin(ids, jnp.array(rows)), ratio / times.get(name, 1.0), 1).astype(update.dtype)
        return update * (ratios[:, None] if embedding else ratios)

    # With a ratio of 1 the state has the same form, so that a run whose ratio was changed resumes.
    return optax.stateless(lambda updates, _: tree.map_named(scaled, updates)) if ratio else optax.identity()


Moment = jax.Array | quantize.Blocked


class AdamState(typing.NamedTuple):
    """Adam's state: the number of updates, and the moments, trees of `Moment` like the parameters."""

    count: jax.Array
    mu: dict
    nu: dict


def scale_by_adam(
    b1: float, b2: float, eps: float, *, mu_dtype: str = "float32", full_precision: typing.Sequence[str] = (".*",)
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam without a learning rate. `update(grads, state, params, ok=True)` keeps the state if `ok` is false.

    Args:
      full_precision: regular expressions. A parameter's moments do not use eight bits if one of these matches its whole
        name, or if its last axis has no divisor from 64 to 255.
    """

    def init(params: dict) -> AdamState:
        def zeros(name: str, p: jax.Array, dtype: str | jnp.dtype, dtype_8bit: jnp.dtype) -> Moment:
            whole = any(re.fullmatch(pattern, name) for pattern in full_precision)
            if whole or not p.ndim or not quantize.block_size(p.shape[-1]):
                return jnp.zeros(p.shape, dtype)
            return quantize.zeros(p.shape, dtype_8bit)

        mu = tree.map_named(lambda name, p: zeros(name, p, mu_dtype, jnp.int8), params)
        nu = tree.map_named(lambda name, p: zeros(name, p, jnp.float32, jnp.uint8), params)
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: dict, state: AdamState, params: dict | None = None, *, ok: bool | jax.Array = True, **extra
    ) -> tuple[dict, AdamState]:
        del params, extra
        count = state.count + 1
        bias1, bias2 = (1 - b ** count.astype(jnp.float32) for b in (b1, b2))

        def one(name: str, g: jax.Array, mu: Moment, nu: Moment) -> tuple[jax.Array, Moment, Moment]:
            old_m, old_v = _read(mu), _read(nu)
            # Why the gate is here: a choice between old and new state after the update would keep both in memory. Here each
            # moment is overwritten in place.
            m = jnp.where(ok, b1 * old_m + (1 - b1) * g, old_m)
            v = jnp.where(ok, b2 * old_v + (1 - b2) * g * g, old_v)
            step = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            if not isinstance(mu, quantize.Blocked):
                return step, m.astype(mu.dtype), v
            # Different noise for each parameter and step: with the same noise, all layers would be rounded alike.
            seed = count.astype(jnp.uint32) ^ jnp.uint32(zlib.crc32(name.encode()))
            noise = quantize.noise(g.shape, seed)
            return step, quantize.encode(m, noise & 0xFFFF, jnp.int8), quantize.encode(v, noise >> 16, jnp.uint8)

        like_grads = jax.tree.structure(grads)
        done = like_grads.flatten_up_to(tree.map_named(one, grads, state.mu, state.nu))
        steps, mu, nu = (like_grads.unflatten(part) for part in zip(*done, strict=True))
        return steps, AdamState(jnp.where(ok, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _read(moment: Moment) -> jax.Array:
    return quantize.decode(moment) if isinstance(moment, quantize.Blocked) else moment.astype(jnp.float32)


def _adamw(c: OptimConfig) -> optax.GradientTransformation:
    whole = c.full_precision if c.name == "adamw8bit" else (".*",)
    return scale_by_adam(c.b1, c.b2, c.eps, mu_dtype=c.mu_dtype, full_precision=whole)


def _adafactor(c: OptimConfig) -> optax.GradientTransformation:
    """Adafactor (arXiv:1804.04235): second moments by row and column, no first moment."""
    # Updates are not scaled by the parameter's size (as in arXiv:2106.04560), so a rate means the same as for AdamW. Optax
    # factors dimensions from 128 on, but then attention kernels (D, heads, head dim) would have no two to factor.
    del c
    tx = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=32), optax.clip_by_block_rms(1.0))

    def update(grads: dict, state: optax.OptState, params: dict, *, ok: jax.Array, **extra) -> tuple:
        updates, new = tx.update(grads, state, params)
        return updates, jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)  # the gate that `scale_by_adam` has

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _muon(c: OptimConfig, dtype: str) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for embeddings, head, norms and biases. One weight decay serves both."""

    def labels(params: dict) -> dict:
        return tree.map_named(lambda name, _: "muon" if _is_matrix(name) else "adamw", params)

    return optax.partition({"muon": _scale_by_muon(c.mu_dtype, dtype, c.ns_steps), "adamw": _adamw(c)}, labels)


def _is_matrix(name: str) -> bool:
    """Returns True if a parameter is a kernel of a layer; (D, N, H) counts as a matrix too, of inputs by outputs."""
    return tree.layer_of(name) is not None and name.endswith("/kernel")


def _scale_by_muon(mu_dtype: str, dtype: str, iterations: int) -> optax.GradientTransformationExtraArgs:
    """Muon without a learning rate, for trees of matrices only; the momentum in `mu_dtype`, orthogonalised in `dtype`."""

    def update(
        grads: dict, state: optax.contrib.MuonState, params: dict | None = None, *, ok: bool | jax.Array = True, **extra
    ) -> tuple[dict, optax.contrib.MuonState]:
        del params, extra
        count = state.count + 1
        now, following = (1 - _MUON_BETA ** n.astype(jnp.float32) for n in (count, count + 1))
        named, structure = tree.named_leaves(grads), jax.tree.structure(grads)
        momenta, ahead = [], []
        for (_, g), mu in zip(named, structure.flatten_up_to(state.mu), strict=True):
            old = mu.astype(jnp.float32)
            m = jnp.where(ok, _MUON_BETA * old + (1 - _MUON_BETA) * g, old)
            momenta.append(m.astype(mu_dtype))
            ahead.append((_MUON_BETA / following * m + (1 - _MUON_BETA) / now * g).astype(dtype))
        inputs = [input_axes(name) for name, _ in named]
        found = polar.each(ahead, inputs, [_spec(name, g) for name, g in named], iterations)
        state = state._replace(count=jnp.where(ok, count, state.count), mu=structure.unflatten(momenta))
        return structure.unflatten(found), state

    # Optax's own state, with coefficients that nothing reads any more, so that checkpoints keep their form.
    init = optax.contrib.scale_by_muon(beta=_MUON_BETA, mu_dtype=mu_dtype).init
    scaled = optax.stateless(lambda updates, _: tree.map_named(_scaled, updates))
    return optax.chain(optax.GradientTransformationExtraArgs(init, update), scaled)


def _scaled(name: str, update: jax.Array) -> jax.Array:
    # By 0.2 sqrt(max(inputs, outputs)) updates get the root mean square of AdamW's (arXiv:2502.16982).
    inputs = input_axes(name)
    sides = math.prod(update.shape[:inputs]), math.prod(update.shape[inputs:])
    return 0.2 * math.sqrt(max(sides)) * update.astype(jnp.float32)


def _spec(name: str, leaf: jax.Array) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    return PartitionSpec() if mesh.empty else sharding.spec(axes_of(name, leaf), leaf.shape, mesh)


_OPTIMIZERS = {"adamw": _adamw, "adamw8bit": _adamw, "adafactor": _adafactor}


def clip(grads: dict, scale: jax.Array, limit: float) -> tuple[dict, dict[str, jax.Array], jax.Array]:
    """Returns (scaled float32 gradients, clipped to norm `limit` if not 0; norms by group; global norm), norms unclipped."""
    norms = {name: norm * scale for name, norm in group_norms(grads).items()}
    grad_norm = total_norm(norms)
    factor = scale * (jnp.minimum(1.0, limit / grad_norm) if limit else 1.0)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads), norms, grad_norm


def group_norms(grads: dict) -> dict[str, jax.Array]:
    """Returns the L2 norm by parameter group (`embed`, `layers/attn`, ...), float32."""
    squares: dict[str, jax.Array] = {}
    for name, leaf in tree.named_leaves(grads):
        group = tree.group_of(name)
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return {group: jnp.sqrt(value) for group, value in squares.items()}


def total_norm(norms: dict[str, jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(norm) for norm in norms.values()))
