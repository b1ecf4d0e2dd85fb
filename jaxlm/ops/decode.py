"""What decoding one token at a time needs to run at the speed of memory: attention over a cache, tiled products.

Legend: B batch, T new tokens, S cache slots, N query heads, K key-value heads, G = N // K, H head dim, I inputs and O
outputs of a product, M rows, J column tiles, W columns of a tile.
"""

import jax
import jax.numpy as jnp
import numpy as np

TILE_COLUMNS = 64
MIN_PARTS, MAX_PARTS = 16, 16  # of a product; more than 8 for a second thread, not so many that starting them counts
WORTH_THREADS = 1 << 17  # elements
Tiles = tuple[tuple[jax.Array | np.ndarray, ...], ...]
_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf


def cached_attention(
    q_BxTxNxH: jax.Array, k_BxKxHxS: jax.Array, v_BxKxSxH: jax.Array, mask_BxTxS: jax.Array
) -> jax.Array:
    """Attention of a few new tokens over the cache, scaled by H ** -0.5.

    Keys are held with slots last and values with slots before channels, so that both products read the cache as it
    lies: on CPUs this took 5.5 ms where keys and values held alike took 7.4, and an einsum over [B, S, K, H] 13.6
    (8 layers, B 8, S 288, K 4, H 64).

    Args:
      q_BxTxNxH: queries.
      k_BxKxHxS, v_BxKxSxH: the cache, as `write_cache` fills it.
      mask_BxTxS: booleans, True where the query may see the slot; at least one in each row.

    Returns:
      [B, T, N, H] in q's dtype; scores and softmax are float32.
    """
    batch, length, heads, head_dim = q_BxTxNxH.shape
    kv_heads = k_BxKxHxS.shape[1]
    group = heads // kv_heads
    q = q_BxTxNxH.reshape(batch, length, kv_heads, group, head_dim)
    q_BxKxTGxH = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, length * group, head_dim)
    by_head = (((3,), (2,)), ((0, 1), (0, 1)))
    scores_BxKxTGxS = jax.lax.dot_general(q_BxKxTGxH, k_BxKxHxS, by_head, preferred_element_type=jnp.float32)
    mask_Bx1xTGxS = jnp.repeat(mask_BxTxS, group, axis=1)[:, None]
    scores_BxKxTGxS = jnp.where(mask_Bx1xTGxS, scores_BxKxTGxS * head_dim**-0.5, _MASKED)
    weights_BxKxTGxS = jax.nn.softmax(scores_BxKxTGxS, axis=-1).astype(v_BxKxSxH.dtype)
    out = jax.lax.dot_general(weights_BxKxTGxS, v_BxKxSxH, by_head, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q_BxTxNxH.shape).astype(q_BxTxNxH.dtype)


def write_cache(
    k_BxKxHxS: jax.Array, v_BxKxSxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, slot: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cache with new keys and values in the slots from `slot` on, the same in all rows; in place where donated."""
    return (
        jax.lax.dynamic_update_slice(k_BxKxHxS, k_BxTxKxH.transpose(0, 2, 3, 1), (0, 0, 0, slot)),
        jax.lax.dynamic_update_slice(v_BxKxSxH, v_BxTxKxH.transpose(0, 2, 1, 3), (0, 0, slot, 0)),
    )


def column_tiles(kernel_IxO: np.ndarray) -> Tiles:
    """A matrix cut for `tiled_product`: groups of rows, of each the tiles of 64 columns, in parts (J, I, W).

    A product with few rows reads the matrix once. Tiles, each contiguous, let it do so from end to end; a row-major
    matrix is read in strips, which costs a page each row: one core reads 7 GB/s against 4. XLA runs a batch of tiles on
    one thread, and starts a second one only where more than eight products are ready: hence the parts, and for narrow
    matrices the groups of rows. The last tile is padded with zeros. NumPy, because cutting needs no compiler.
    """
    inputs, outputs = kernel_IxO.shape
    tiles = -(-outputs // TILE_COLUMNS)
    padded = np.pad(kernel_IxO, ((0, 0), (0, tiles * TILE_COLUMNS - outputs)))
    tiles_JxIxW = padded.reshape(inputs, tiles, TILE_COLUMNS).transpose(1, 0, 2)
    groups = max(1, MIN_PARTS // tiles) if kernel_IxO.size >= WORTH_THREADS else 1
    parts = min(MAX_PARTS, tiles) if kernel_IxO.size >= WORTH_THREADS else 1
    return tuple(
        tuple(np.ascontiguousarray(part) for part in np.array_split(group, parts))
        for group in np.array_split(tiles_JxIxW, groups, axis=1)
    )


def tiled_product(
    x_MxI: jax.Array, tiles: Tiles, preferred_element_type: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """x times the matrix that `column_tiles` cut, (M, columns): those of padding, if any, come last."""
    ends = np.cumsum([group[0].shape[1] for group in tiles])
    total = 0
    for x_MxR, group in zip(jnp.split(x_MxI, ends[:-1], axis=1), tiles, strict=True):
        columns = []
        for tiles_JxRxW in group:
            x_JxMxR = jnp.broadcast_to(x_MxR, (tiles_JxRxW.shape[0], *x_MxR.shape))
            y_JxMxW = jnp.einsum("jmi,jiw->jmw", x_JxMxR, tiles_JxRxW, preferred_element_type=preferred_element_type)
            columns.append(y_JxMxW.transpose(1, 0, 2).reshape(x_MxI.shape[0], -1))
        total += jnp.concatenate(columns, axis=1)
    return total


def first_argmax(x_BxV: jax.Array) -> jax.Array:
    """`jnp.argmax` over the last axis, int32, as two reductions that vectorise (its pairwise one does not on CPUs)."""
    highest_Bx1 = jnp.max(x_BxV, axis=-1, keepdims=True)
    ids_V = jnp.arange(x_BxV.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x_BxV == highest_Bx1, ids_V, x_BxV.shape[-1]), axis=-1)
