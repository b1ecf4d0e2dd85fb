"""Cross-entropy of a linear head. If it works in tiles of tokens, the whole logits tensor is never in memory.

Legend: M tokens (batch x time, flattened), D model, V vocabulary as stored (padded), I tiles, R tokens in one tile.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.ops.decode import first_argmax

_MASKED = -1e30  # finite, so that a masked column gives exp(...) = 0 and never inf - inf


@jax.named_scope("loss")
def cross_entropy(
    hidden_MxD: jax.Array,
    head_DxV: jax.Array,
    targets_M: jax.Array,
    weights_M: jax.Array,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    tile: int = 0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weighted sum over tokens of -log p(target) + z_loss * logsumexp^2, and a dict of sums for metrics.

    Logits, softmax and sums are float32 whatever the inputs' dtype. Columns >= vocab_size (padding) have no probability
    and get exactly zero gradient. With a tile, the forward pass computes the gradients of each tile and keeps nothing else
    (as Liger-Kernel's fused linear cross-entropy does: Hsu et al. 2024, arXiv:2410.10989). z_loss: PaLM,
    arXiv:2204.02311, section 5.

    Args:
      hidden_MxD: the final hidden states.
      head_DxV: the output embedding; pass `embedding_VxD.T` if embeddings are tied (no copy is made).
      targets_M: integer ids < vocab_size. A token of weight 0 may have any id in [0, V).
      weights_M: the weight of each token, 0 to leave it out. No gradient flows to the weights.
      vocab_size: the number of real columns, <= V.
      z_loss: the coefficient of the squared log-normaliser (1e-4 in PaLM); that term is weighted too.
      tile: the number of tokens in a tile, which need not divide M; 0 for all logits at once.

    Returns:
      (loss_sum, aux). loss_sum is a float32 scalar, differentiable in hidden and head. aux holds float32 scalars without
      gradient: nll_sum (weighted, in nats, without z_loss), weight_sum, correct_sum (weighted count of argmax = target).

    Raises:
      ValueError: shapes do not fit, vocab_size is outside 1..V, or the tile is negative.
    """
    _check(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, tile)
    weights_M = jax.lax.stop_gradient(weights_M.astype(jnp.float32))
    if tile == 0 or tile >= hidden_MxD.shape[0]:
        total, nll, correct = _plain(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, z_loss)
    else:
        total, nll, correct = _tiled(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, z_loss, tile)
    aux = {"nll_sum": nll, "weight_sum": jnp.sum(weights_M), "correct_sum": correct}
    return total, jax.tree.map(jax.lax.stop_gradient, aux)


def token_nll(
    hidden_MxD: jax.Array,
    head_DxV: jax.Array,
    targets_M: jax.Array,
    *,
    vocab_size: int,
    tile: int = 0,
) -> jax.Array:
    """Returns -log p(target) of each token, in nats. Differentiable in hidden and head.

    With a tile neither pass ever holds all logits: the backward pass computes each tile's logits again. For one
    weighted sum use `cross_entropy`, which computes the logits once.

    Args:
      hidden_MxD, head_DxV, targets_M, vocab_size, tile: as in `cross_entropy`.

    Returns:
      nll_M, float32.

    Raises:
      ValueError: as in `cross_entropy`.
    """
    _check(hidden_MxD, head_DxV, targets_M, targets_M, vocab_size, tile)
    if tile == 0 or tile >= hidden_MxD.shape[0]:
        lse_M, picked_M = _lse_and_picked(hidden_MxD, head_DxV, targets_M, vocab_size)
        return lse_M - picked_M
    return _tiled_nll(hidden_MxD, head_DxV, targets_M, vocab_size, tile)


def token_scores(
    hidden_MxD: jax.Array, head_DxV: jax.Array, targets_M: jax.Array, *, vocab_size: int, tile: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (log p(target) of each token in nats, float32 [M]; True where the target is the likeliest token, [M]).

    Has no backward pass. As in `ops.decode.first_argmax`, the first of several likeliest tokens counts.

    Args:
      hidden_MxD, head_DxV, targets_M, vocab_size, tile: as in `cross_entropy`.
    """
    _check(hidden_MxD, head_DxV, targets_M, targets_M, vocab_size, tile)

    def of_tile(args):
        logits_RxV = _logits(args[0], head_DxV, vocab_size)
        logp_R = _pick(logits_RxV, args[1]) - jax.nn.logsumexp(logits_RxV, axis=-1)
        return logp_R, first_argmax(logits_RxV) == args[1]

    if tile == 0 or tile >= hidden_MxD.shape[0]:
        return of_tile((hidden_MxD, targets_M))
    found = jax.lax.map(of_tile, _to_tiles(tile, hidden_MxD, targets_M))
    return tuple(_from_tiles(x_IxR, hidden_MxD.shape[0]) for x_IxR in found)


def _check(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, tile) -> None:
    if hidden_MxD.ndim != 2 or head_DxV.ndim != 2 or hidden_MxD.shape[1] != head_DxV.shape[0]:
        raise ValueError(f"hidden {hidden_MxD.shape} and head {head_DxV.shape} are not [M, D] and [D, V]")
    if targets_M.shape != hidden_MxD.shape[:1] or weights_M.shape != hidden_MxD.shape[:1]:
        raise ValueError(f"targets {targets_M.shape} and weights {weights_M.shape} must be [{hidden_MxD.shape[0]}]")
    if not 1 <= vocab_size <= head_DxV.shape[1]:
        raise ValueError(f"vocab_size {vocab_size} is not between 1 and the head's {head_DxV.shape[1]} columns")
    if tile < 0:
        raise ValueError(f"tile must be 0 (off) or a number of tokens, got {tile}")


def _logits(hidden_RxD, head_DxV, vocab_size: int) -> jax.Array:
    logits_RxV = jnp.dot(hidden_RxD, head_DxV, preferred_element_type=jnp.float32)
    if vocab_size < head_DxV.shape[1]:
        logits_RxV = jnp.where(jnp.arange(head_DxV.shape[1]) < vocab_size, logits_RxV, _MASKED)
    return logits_RxV


def _pick(logits_RxV, targets_R) -> jax.Array:
    return jnp.take_along_axis(logits_RxV, targets_R[:, None], axis=-1)[:, 0]


def _plain(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, z_loss):
    logits_MxV = _logits(hidden_MxD, head_DxV, vocab_size)
    lse_M = jax.nn.logsumexp(logits_MxV, axis=-1)
    picked_M = _pick(logits_MxV, targets_M)
    nll = jnp.sum(weights_M * (lse_M - picked_M))
    total = nll + z_loss * jnp.sum(weights_M * lse_M * lse_M) if z_loss else nll
    correct = jnp.sum(weights_M * (picked_M >= jnp.max(logits_MxV, axis=-1)))
    return total, nll, correct


def _to_tiles(tile: int, *arrays) -> tuple[jax.Array, ...]:
    """Splits each array into tiles: [M, ...] -> [I, R, ...], zeros at the end. Token m goes to tile m % I.

    Tokens are dealt to the tiles in turn because devices may split M. Each tile then holds an equal share of every
    device's tokens: nothing moves, and no device waits while the loop works through another's tokens.
    """
    count = -(-arrays[0].shape[0] // tile)
    out = []
    for x in arrays:
        x = jnp.pad(x, [(0, count * tile - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        out.append(jnp.moveaxis(x.reshape(tile, count, *x.shape[1:]), 1, 0))
    return tuple(out)


def _from_tiles(x_IxRx, length: int) -> jax.Array:
    """Undoes `_to_tiles` for one array of `length` tokens."""
    x = jnp.moveaxis(x_IxRx, 0, 1)
    return x.reshape(-1, *x.shape[2:])[:length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _tiled(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, z_loss, tile):
    def step(sums, args):
        hidden_RxD, targets_R, weights_R = args
        part = _plain(hidden_RxD, head_DxV, targets_R, weights_R, vocab_size, z_loss)
        return jax.tree.map(jnp.add, sums, part), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(step, (zero, zero, zero), _to_tiles(tile, hidden_MxD, targets_M, weights_M))[0]


def _tile_gradients(head_DxV, vocab_size: int, z_loss: float) -> Callable:
    """Returns the scan body of the tiled forward pass: one tile's sums and gradients.

    Why gradients in the forward pass: they need the tile's logits, which exist here only. The loss is one scalar, so the
    backward pass has only to scale them. Computing the logits again there would cost a fourth product with the head.
    """

    def step(carry, args):
        sums, d_head_VxD = carry
        hidden_RxD, targets_R, weights_R = args
        logits_RxV = _logits(hidden_RxD, head_DxV, vocab_size)
        max_R = jnp.max(logits_RxV, axis=-1)
        lse_R = max_R + jnp.log(jnp.sum(jnp.exp(logits_RxV - max_R[:, None]), axis=-1))
        picked_R = _pick(logits_RxV, targets_R)
        nll = jnp.sum(weights_R * (lse_R - picked_R))
        total = nll + z_loss * jnp.sum(weights_R * lse_R * lse_R) if z_loss else nll
        correct = jnp.sum(weights_R * (picked_R >= max_R))
        slope_R = weights_R * (1.0 + 2.0 * z_loss * lse_R)
        hit_RxV = targets_R[:, None] == jnp.arange(head_DxV.shape[1])
        d_logits_RxV = jnp.exp(logits_RxV - lse_R[:, None]) * slope_R[:, None]
        d_logits_RxV = d_logits_RxV - jnp.where(hit_RxV, weights_R[:, None], 0.0)
        d_logits_RxV = d_logits_RxV.astype(head_DxV.dtype)
        d_hidden_RxD = jnp.dot(d_logits_RxV, head_DxV.T, preferred_element_type=jnp.float32)
        d_head_VxD = d_head_VxD + jnp.dot(d_logits_RxV.T, hidden_RxD, preferred_element_type=jnp.float32)
        sums = jax.tree.map(jnp.add, sums, (total, nll, correct))
        return (sums, d_head_VxD), d_hidden_RxD.astype(hidden_RxD.dtype)

    return step


def _tiled_fwd(hidden_MxD, head_DxV, targets_M, weights_M, vocab_size, z_loss, tile):
    zero = jnp.zeros((), jnp.float32)
    start = ((zero, zero, zero), jnp.zeros(head_DxV.shape[::-1], jnp.float32))
    body = _tile_gradients(head_DxV, vocab_size, z_loss)
    tiles = _to_tiles(tile, hidden_MxD, targets_M, weights_M)
    (sums, d_head_VxD), d_hidden_IxRxD = jax.lax.scan(body, start, tiles)
    d_hidden_MxD = _from_tiles(d_hidden_IxRxD, hidden_MxD.shape[0])
    return sums, (d_hidden_MxD, d_head_VxD.T.astype(head_DxV.dtype))


def _tiled_bwd(vocab_size, z_loss, tile, residuals, cotangents):
    slope = cotangents[0]  # of the total; nll and correct carry no gradient
    scaled = jax.tree.map(lambda x: (x * slope).astype(x.dtype), residuals)
    return *scaled, None, None


_tiled.defvjp(_tiled_fwd, _tiled_bwd)


def _lse_and_picked(hidden_RxD, head_DxV, targets_R, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    logits_RxV = _logits(hidden_RxD, head_DxV, vocab_size)
    return jax.nn.logsumexp(logits_RxV, axis=-1), _pick(logits_RxV, targets_R)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _tiled_nll(hidden_MxD, head_DxV, targets_M, vocab_size, tile):
    return _tiled_nll_fwd(hidden_MxD, head_DxV, targets_M, vocab_size, tile)[0]


def _tiled_nll_fwd(hidden_MxD, head_DxV, targets_M, vocab_size, tile):
    def of_tile(args):
        lse_R, picked_R = _lse_and_picked(args[0], head_DxV, args[1], vocab_size)
        return lse_R - picked_R, lse_R

    # The logits are computed again in the backward pass: the slope of each token's loss is known only there.
    found = jax.lax.map(of_tile, _to_tiles(tile, hidden_MxD, targets_M))
    nll_M, lse_M = (_from_tiles(x_IxR, hidden_MxD.shape[0]) for x_IxR in found)
    return nll_M, (hidden_MxD, head_DxV, targets_M, lse_M)


def _tiled_nll_bwd(vocab_size, tile, residuals, slope_M):
    hidden_MxD, head_DxV, targets_M, lse_M = residuals

    def of_tile(d_head_VxD, args):
        hidden_RxD, targets_R, lse_R, slope_R = args
        logits_RxV = _logits(hidden_RxD, head_DxV, vocab_size)
        hit_RxV = targets_R[:, None] == jnp.arange(head_DxV.shape[1])
        d_logits_RxV = (jnp.exp(logits_RxV - lse_R[:, None]) - hit_RxV) * slope_R[:, None]
        d_logits_RxV = d_logits_RxV.astype(head_DxV.dtype)
        d_hidden_RxD = jnp.dot(d_logits_RxV, head_DxV.T, preferred_element_type=jnp.float32)
        d_head_VxD = d_head_VxD + jnp.dot(d_logits_RxV.T, hidden_RxD, preferred_element_type=jnp.float32)
        return d_head_VxD, d_hidden_RxD.astype(hidden_RxD.dtype)

    start = jnp.zeros(head_DxV.shape[::-1], jnp.float32)
    d_head_VxD, d_hidden_IxRxD = jax.lax.scan(of_tile, start, _to_tiles(tile, hidden_MxD, targets_M, lse_M, slope_M))
    return _from_tiles(d_hidden_IxRxD, hidden_MxD.shape[0]), d_head_VxD.T.astype(head_DxV.dtype), None


_tiled_nll.defvjp(_tiled_nll_fwd, _tiled_nll_bwd)
