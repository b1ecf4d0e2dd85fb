"""Draws the next token: penalties, temperature, min-p, top-k, top-p. Legend: B batch, V padded vocabulary, C candidates."""

import typing

import jax
import jax.numpy as jnp

from jaxlm.ops.decode import first_argmax

NO_PENALTIES = (0.0, 0.0, 1.0)


class Rows(typing.NamedTuple):
    """Each row's settings as arrays of the compiled program, so that one program serves any mix of requests.

    Attributes:
      temperature_B: 0 takes the likeliest token.
      top_k_B: draws among the k likeliest; 0 among all.
      top_p_B: draws among the likeliest that together have this probability; 1 among all.
      seed_B: uint32. A row's draw depends on its seed and on the number of tokens that the row drew before.
      bias_BxV: added to the logits.
      likeliest_B: log-probabilities wanted: -1 none, 0 the drawn token's, n > 0 also the n likeliest tokens'.
      min_p_B: draws among tokens at least this share as likely as the likeliest; 0 among all.
      penalties_Bx3: vLLM's `presence_penalty`, subtracted from the logit of each token that the row drew; `frequency_penalty`,
        the same times how often the row drew it; `repetition_penalty`, which divides the logit of each token of the prompt and
        of the answer, or multiplies it if it is negative (arXiv:1909.05858).
      seen_BxV: int32, twice how often the row drew each token, plus 1 if its prompt has it. Only penalties count.
      adapter_B: which of the stacked adapters the row has; 0 for none.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    seed_B: jax.Array
    bias_BxV: jax.Array
    likeliest_B: jax.Array
    min_p_B: jax.Array
    penalties_Bx3: jax.Array
    seen_BxV: jax.Array
    adapter_B: jax.Array


def penalised(scores_BxV: jax.Array, rows: Rows) -> jax.Array:
    """Returns the scores after each row's penalties. Those of a row without penalties keep their bits."""
    presence_Bx1, frequency_Bx1, repetition_Bx1 = jnp.split(rows.penalties_Bx3, 3, axis=1)
    repetition_BxV = jnp.where(rows.seen_BxV > 0, repetition_Bx1, 1)
    scores_BxV = jnp.where(scores_BxV > 0, scores_BxV / repetition_BxV, scores_BxV * repetition_BxV)
    drawn_BxV = rows.seen_BxV // 2
    return scores_BxV - frequency_Bx1 * drawn_BxV - presence_Bx1 * (drawn_BxV > 0)


def sample_rows(logits_BxV: jax.Array, rows: Rows, drawn_B: jax.Array) -> jax.Array:
    """Returns one token id for each row, drawn by the row's own settings, int32 (B,). The caller adds the bias.

    Needs no sort. All tokens as likely as the k-th are kept. Draws no random numbers if all rows take the likeliest token.

    Args:
      logits_BxV: float32; -inf is never drawn.
      drawn_B: how many tokens each row drew before.
    """
    sampled_B = rows.temperature_B > 0

    def draw() -> jax.Array:
        scores_BxV = logits_BxV / jnp.where(sampled_B, rows.temperature_B, 1)[:, None]
        limited = (sampled_B & ((rows.top_k_B > 0) | (rows.top_p_B < 1) | (rows.min_p_B > 0))).any()
        scores_BxV = jax.lax.cond(limited, lambda: _limited(scores_BxV, rows), lambda: scores_BxV)
        keys_B = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(rows.seed_B, drawn_B)
        return jnp.where(sampled_B, _draw(scores_BxV, keys_B), first_argmax(logits_BxV))

    return jax.lax.cond(sampled_B.any(), draw, lambda: first_argmax(logits_BxV))


def _draw(scores_BxV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """Returns the first token of each row at which the summed probabilities pass a uniform number, int32 (B,)."""
    # Noise for each token (jax.random.categorical) takes four times as long on a CPU, a fifth of a small model's step. Behind
    # float32's sums a token of a probability under 1e-8 is never drawn.
    probs_BxV = jax.nn.softmax(scores_BxV)
    sums_BxV = jnp.where(
        probs_BxV > 0, jnp.cumsum(probs_BxV, axis=-1), 0
    )  # excluded tokens stay out, however sums round
    uniform_Bx1 = jax.vmap(jax.random.uniform)(keys_B)[:, None]
    return first_argmax(sums_BxV > uniform_Bx1 * sums_BxV.max(axis=-1, keepdims=True))


def _limited(scores_BxV: jax.Array, rows: Rows) -> jax.Array:
    """Returns the scores, with -inf for tokens that min-p, top-k, then top-p exclude."""
    probs_BxV = jax.nn.softmax(scores_BxV)
    k_Bx1 = jnp.where(rows.top_k_B > 0, rows.top_k_B, scores_BxV.shape[1])[:, None]
    least_Bx1 = _highest(probs_BxV, lambda kept_BxV: kept_BxV.sum(axis=-1, keepdims=True) >= k_Bx1)
    kept_BxV = probs_BxV >= jnp.maximum(least_Bx1, rows.min_p_B[:, None] * probs_BxV.max(axis=-1, keepdims=True))
    probs_BxV = jnp.where(kept_BxV, probs_BxV, 0)
    probs_BxV /= probs_BxV.sum(axis=-1, keepdims=True)
    kept_BxV &= probs_BxV >= nucleus_threshold(probs_BxV, rows.top_p_B[:, None])
    return jnp.where(kept_BxV, scores_BxV, -jnp.inf)


def nucleus_threshold(probs_BxV: jax.Array, top_p: jax.typing.ArrayLike) -> jax.Array:
    """Returns (B, 1): the highest t for which the tokens with a probability of at least t together have at least `top_p`."""
    return _highest(
        probs_BxV, lambda kept_BxV: jnp.sum(jnp.where(kept_BxV, probs_BxV, 0), axis=-1, keepdims=True) >= top_p
    )


def _highest(probs_BxV: jax.Array, enough: typing.Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns (B, 1): the highest t for which `enough(mask)` is true; the mask (B, V) is True where probability >= t."""
    # Exact and without a sort: non-negative floats have the order of their bits as integers, so t is found bit by bit, the
    # highest bit first.
    bits_BxV = jax.lax.bitcast_convert_type(probs_BxV, jnp.int32)

    def set_bit(i: jax.Array, threshold_Bx1: jax.Array) -> jax.Array:
        tried_Bx1 = threshold_Bx1 | (1 << (29 - i))
        return jnp.where(enough(bits_BxV >= tried_Bx1), tried_Bx1, threshold_Bx1)

    start_Bx1 = jnp.zeros((probs_BxV.shape[0], 1), jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 30, set_bit, start_Bx1), jnp.float32)
