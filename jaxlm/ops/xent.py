"""Cross-entropy of a linear head. Computed in tiles of tokens, it never has the whole logits tensor in memory.

The head may have a second part, `rows_NxD`, which is added to the columns of the tokens `row_ids`: adapters train this part
while the head itself is frozen. Then the head's gradient is not computed.

Legend: M tokens (batch x time, flattened), D model, V vocabulary as stored (padded), I tiles, R tokens in one tile, N tokens
whose columns are changed.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

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
    row_ids: tuple[int, ...] = (),
    rows_NxD: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the weighted sum over tokens of -log p(target) + z_loss * logsumexp^2, a dict of sums for metrics).

    The sum is a float32 scalar, differentiable in hidden, head and rows. The dict has float32 scalars without gradient: nll_sum
    (weighted, in nats, without z_loss), weight_sum, correct_sum (weighted count of argmax = target). Columns >= vocab_size
    (padding) have probability 0 and get exactly zero gradient. With tiles, the forward pass computes each tile's gradients and
    keeps nothing else (like Liger-Kernel's fused linear cross-entropy: Hsu et al. 2024, arXiv:2410.10989).

    Args:
      head_DxV: the output embedding; pass `embedding_VxD.T` if embeddings are tied (no copy is made).
      targets_M: integer ids < vocab_size. A token of weight 0 may have any id in [0, V).
      z_loss: the coefficient of the squared log-normaliser (PaLM: 1e-4, arXiv:2204.02311, section 5), weighted too.
      tile: the number of tokens in a tile, which need not divide M; 0 for all logits at once.
      row_ids, rows_NxD: the ids of N tokens, and the vectors added to their columns of the head; None for nothing.
    """
    weights_M = jax.lax.stop_gradient(weights_M.astype(jnp.float32))
    if tile == 0 or tile >= hidden_MxD.shape[0]:
        total, nll, correct = _plain(hidden_MxD, head_DxV, rows_NxD, targets_M, weights_M, vocab_size, z_loss, row_ids)
    else:
        inputs = (hidden_MxD, head_DxV, rows_NxD, targets_M, weights_M)
        total, nll, correct = _tiled(*inputs, vocab_size, z_loss, tile, row_ids)
    aux = {"nll_sum": nll, "weight_sum": jnp.sum(weights_M), "correct_sum": correct}
    return total, jax.tree.map(jax.lax.stop_gradient, aux)


def token_nll(
    hidden_MxD: jax.Array,
    head_DxV: jax.Array,
    targets_M: jax.Array,
    *,
    vocab_size: int,
    tile: int = 0,
    row_ids: tuple[int, ...] = (),
    rows_NxD: jax.Array | None = None,
) -> jax.Array:
    """Returns -log p(target) of each token, float32 [M], in nats. Differentiable in hidden, head and rows.

    With tiles neither pass ever holds all logits: the backward pass computes each tile's logits again. For a weighted sum
    use `cross_entropy`, which computes the logits once. Arguments as in `cross_entropy`.
    """
    if tile == 0 or tile >= hidden_MxD.shape[0]:
        lse_M, picked_M = _lse_and_picked(hidden_MxD, head_DxV, rows_NxD, targets_M, vocab_size, row_ids)
        return lse_M - picked_M
    return _tiled_nll(hidden_MxD, head_DxV, rows_NxD, targets_M, vocab_size, tile, row_ids)


def token_scores(
    hidden_MxD: jax.Array,
    head_DxV: jax.Array,
    targets_M: jax.Array,
    *,
    vocab_size: int,
    tile: int,
    row_ids: tuple[int, ...] = (),
    rows_NxD: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (log p(target) of each token in nats, float32 [M]; True where the target is the likeliest token, [M]).

    Has no backward pass. As in `ops.decode.first_argmax`, the first of several likeliest tokens counts. Arguments as in
    `cross_entropy`.
    """

    def of_tile(args):
        logits_RxV = _logits(args[0], head_DxV, rows_NxD, vocab_size, row_ids)
        logp_R = _pick(logits_RxV, args[1]) - jax.nn.logsumexp(logits_RxV, axis=-1)
        return logp_R, first_argmax(logits_RxV) == args[1]

    if tile == 0 or tile >= hidden_MxD.shape[0]:
        return of_tile((hidden_MxD, targets_M))
    return _by_tile(of_tile, tile, hidden_MxD, targets_M)


def _logits(hidden_RxD, head_DxV, rows_NxD, vocab_size: int, row_ids: tuple[int, ...]) -> jax.Array:
    logits_RxV = jnp.dot(hidden_RxD, head_DxV, preferred_element_type=jnp.float32)
    if rows_NxD is not None:
        more_RxN = jnp.dot(hidden_RxD, rows_NxD.T.astype(hidden_RxD.dtype), preferred_element_type=jnp.float32)
        logits_RxV = logits_RxV.at[:, np.asarray(row_ids)].add(more_RxN, unique_indices=True)
    if vocab_size < head_DxV.shape[1]:
        logits_RxV = jnp.where(jnp.arange(head_DxV.shape[1]) < vocab_size, logits_RxV, _MASKED)
    return logits_RxV


def _pick(logits_RxV, targets_R) -> jax.Array:
    return jnp.take_along_axis(logits_RxV, targets_R[:, None], axis=-1)[:, 0]


def _plain(hidden_MxD, head_DxV, rows_NxD, targets_M, weights_M, vocab_size, z_loss, row_ids):
    logits_MxV = _logits(hidden_MxD, head_DxV, rows_NxD, vocab_size, row_ids)
    lse_M = jax.nn.logsumexp(logits_MxV, axis=-1)
    picked_M = _pick(logits_MxV, targets_M)
    nll = jnp.sum(weights_M * (lse_M - picked_M))
    total = nll + z_loss * jnp.sum(weights_M * lse_M * lse_M) if z_loss else nll
    correct = jnp.sum(weights_M * (picked_M >= jnp.max(logits_MxV, axis=-1)))
    return total, nll, correct


def _to_tiles(tile: int, *arrays) -> tuple[jax.Array, ...]:
    """Splits each array into tiles: [M, ...] -> [I, R, ...], zeros at the end. Token m goes to tile m % I."""
    # Dealt round-robin, because M may be sharded. Each tile then has an equal share of every device's tokens: no data moves,
    # and no device waits while the loop works on another's tokens.
    count = -(-arrays[0].shape[0] // tile)
    out = []
    for x in arrays:
        x = jnp.pad(x, [(0, count * tile - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        out.append(jnp.moveaxis(x.reshape(tile, count, *x.shape[1:]), 1, 0))
    return tuple(out)


def _from_tiles(x_IxRx, length: int) -> jax.Array:
    x = jnp.moveaxis(x_IxRx, 0, 1)
    return x.reshape(-1, *x.shape[2:])[:length]


def _by_tile(of_tile: Callable, tile: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    tiles = jax.lax.map(of_tile, _to_tiles(tile, *arrays))
    return tuple(_from_tiles(x_IxR, arrays[0].shape[0]) for x_IxR in tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _tiled(hidden_MxD, head_DxV, rows_NxD, targets_M, weights_M, vocab_size, z_loss, tile, row_ids):
    def step(sums, args):
        hidden_RxD, targets_R, weights_R = args
        part = _plain(hidden_RxD, head_DxV, rows_NxD, targets_R, weights_R, vocab_size, z_loss, row_ids)
        return jax.tree.map(jnp.add, sums, part), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(step, (zero, zero, zero), _to_tiles(tile, hidden_MxD, targets_M, weights_M))[0]


def _tile_gradients(head_DxV, rows_NxD, vocab_size: int, z_loss: float, row_ids: tuple[int, ...]) -> Callable:
    """Returns the scan body of the tiled forward pass: one tile's sums and gradients."""

    # Gradients are computed in the forward pass, because only there the tile's logits exist. The loss is one scalar, so the
    # backward pass only scales them. Computing the logits again would cost a fourth product with the head.
    def step(carry, args):
        sums, d_head_VxD, d_rows_NxD = carry
        hidden_RxD, targets_R, weights_R = args
        logits_RxV = _logits(hidden_RxD, head_DxV, rows_NxD, vocab_size, row_ids)
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
        gradients = (d_head_VxD, d_rows_NxD)
        d_hidden_RxD, *gradients = _back(d_logits_RxV, hidden_RxD, head_DxV, rows_NxD, row_ids, *gradients)
        sums = jax.tree.map(jnp.add, sums, (total, nll, correct))
        return (sums, *gradients), d_hidden_RxD

    return step


def _back(d_logits_RxV, hidden_RxD, head_DxV, rows_NxD, row_ids, d_head_VxD, d_rows_NxD) -> tuple:
    """Returns (a tile's gradient of hidden, the gradients of head and rows so far plus the tile's); None stays None."""
    d_hidden_RxD = jnp.dot(d_logits_RxV, head_DxV.T, preferred_element_type=jnp.float32)
    if d_head_VxD is not None:
        d_head_VxD = d_head_VxD + jnp.dot(d_logits_RxV.T, hidden_RxD, preferred_element_type=jnp.float32)
    if rows_NxD is not None:
        d_RxN = d_logits_RxV[:, np.asarray(row_ids)]
        d_hidden_RxD += jnp.dot(d_RxN, rows_NxD.astype(d_RxN.dtype), preferred_element_type=jnp.float32)
        d_rows_NxD = d_rows_NxD + jnp.dot(d_RxN.T, hidden_RxD, preferred_element_type=jnp.float32)
    return d_hidden_RxD.astype(hidden_RxD.dtype), d_head_VxD, d_rows_NxD


def _zeros(*trained: jax.Array | None) -> tuple[jax.Array | None, ...]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)


def _tiled_fwd(hidden, head, rows, targets, weights, vocab_size, z_loss, tile, row_ids):
    hidden_MxD, head_DxV, rows_NxD = hidden.value, head.value, rows and rows.value
    zero, start = jnp.zeros((), jnp.float32), _zeros(head_DxV.T if head.perturbed else None, rows_NxD)
    body = _tile_gradients(head_DxV, rows_NxD, vocab_size, z_loss, row_ids)
    tiles = _to_tiles(tile, hidden_MxD, targets.value, weights.value)
    (sums, d_head_VxD, d_rows_NxD), d_hidden_IxRxD = jax.lax.scan(body, ((zero,) * 3, *start), tiles)
    d_hidden_MxD = _from_tiles(d_hidden_IxRxD, hidden_MxD.shape[0])
    return sums, (d_hidden_MxD, _like(d_head_VxD, head_DxV, transposed=True), _like(d_rows_NxD, rows_NxD))


def _tiled_bwd(vocab_size, z_loss, tile, row_ids, residuals, cotangents):
    slope = cotangents[0]  # of the total; the metrics carry no gradient
    if isinstance(slope, SymbolicZero):
        slope = jnp.zeros(slope.shape, slope.dtype)
    scaled = jax.tree.map(lambda x: (x * slope).astype(x.dtype), residuals)
    return *scaled, None, None


# Symbolic zeros tell which inputs are differentiated: the gradient of a frozen head would cost a product.
_tiled.defvjp(_tiled_fwd, _tiled_bwd, symbolic_zeros=True)


def _like(gradient: jax.Array | None, x: jax.Array | None, transposed: bool = False) -> jax.Array | None:
    """Returns the gradient in the dtype of `x`."""
    if gradient is None:
        return None
    return (gradient.T if transposed else gradient).astype(x.dtype)


def _lse_and_picked(hidden_RxD, head_DxV, rows_NxD, targets_R, vocab_size: int, row_ids: tuple[int, ...]) -> tuple:
    logits_RxV = _logits(hidden_RxD, head_DxV, rows_NxD, vocab_size, row_ids)
    return jax.nn.logsumexp(logits_RxV, axis=-1), _pick(logits_RxV, targets_R)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _tiled_nll(hidden_MxD, head_DxV, rows_NxD, targets_M, vocab_size, tile, row_ids):
    return _nll_and_lse(hidden_MxD, head_DxV, rows_NxD, targets_M, vocab_size, tile, row_ids)[0]


def _nll_and_lse(hidden_MxD, head_DxV, rows_NxD, targets_M, vocab_size, tile, row_ids):
    def of_tile(args):
        lse_R, picked_R = _lse_and_picked(args[0], head_DxV, rows_NxD, args[1], vocab_size, row_ids)
        return lse_R - picked_R, lse_R

    return _by_tile(of_tile, tile, hidden_MxD, targets_M)


def _tiled_nll_fwd(hidden, head, rows, targets, vocab_size, tile, row_ids):
    # The backward pass computes the logits again: only there the gradient of each token's loss is known.
    inputs = (hidden.value, head.value, rows and rows.value, targets.value)
    nll_M, lse_M = _nll_and_lse(*inputs, vocab_size, tile, row_ids)
    trained_head = {} if head.perturbed else None  # a residual is an array or a structure
    return nll_M, (*inputs, lse_M, trained_head)


def _tiled_nll_bwd(vocab_size, tile, row_ids, residuals, slope_M):
    hidden_MxD, head_DxV, rows_NxD, targets_M, lse_M, trained_head = residuals
    if isinstance(slope_M, SymbolicZero):
        slope_M = jnp.zeros(slope_M.shape, slope_M.dtype)

    def of_tile(gradients, args):
        hidden_RxD, targets_R, lse_R, slope_R = args
        logits_RxV = _logits(hidden_RxD, head_DxV, rows_NxD, vocab_size, row_ids)
        hit_RxV = targets_R[:, None] == jnp.arange(head_DxV.shape[1])
        d_logits_RxV = (jnp.exp(logits_RxV - lse_R[:, None]) - hit_RxV) * slope_R[:, None]
        d_logits_RxV = d_logits_RxV.astype(head_DxV.dtype)
        d_hidden_RxD, *gradients = _back(d_logits_RxV, hidden_RxD, head_DxV, rows_NxD, row_ids, *gradients)
        return tuple(gradients), d_hidden_RxD

    tiles = _to_tiles(tile, hidden_MxD, targets_M, lse_M, slope_M)
    start = _zeros(None if trained_head is None else head_DxV.T, rows_NxD)
    (d_head_VxD, d_rows_NxD), d_hidden_IxRxD = jax.lax.scan(of_tile, start, tiles)
    d_hidden_MxD = _from_tiles(d_hidden_IxRxD, hidden_MxD.shape[0])
    return d_hidden_MxD, _like(d_head_VxD, head_DxV, transposed=True), _like(d_rows_NxD, rows_NxD), None


_tiled_nll.defvjp(_tiled_nll_fwd, _tiled_nll_bwd, symbolic_zeros=True)
