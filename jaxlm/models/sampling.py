"""Draws the next token: temperature, top-k, top-p. Legend: B batch, V padded vocabulary, C candidates."""

import typing

import jax
import jax.numpy as jnp


class Sampler(typing.NamedTuple):
    """The settings of `sample` that are scalar arguments of the compiled program, so that a new value needs no compilation."""

    temperature: jax.typing.ArrayLike
    top_p: jax.typing.ArrayLike


def sample(logits_BxV: jax.Array, keys_B: jax.Array, sampler: Sampler, *, top_k: int, nucleus: bool) -> jax.Array:
    """Returns one token id for each row, drawn with the row's own key, int32 (B,). Logits of -inf are never drawn.

    As in Hugging Face, temperature comes first, then top-k, then top-p among what is left.

    Args:
      logits_BxV: the logits, in any float dtype.
      keys_B: a random key for each row.
      sampler: the temperature, above 0, and top_p.
      top_k: the number of likeliest tokens to draw among; 0 for all.
      nucleus: False to leave top-p out of the program.
    """
    scores_BxV = logits_BxV.astype(jnp.float32) / sampler.temperature
    if top_k:
        scores_BxC, ids_BxC = jax.lax.top_k(scores_BxV, top_k)
        if nucleus:
            probs_BxC = jax.nn.softmax(scores_BxC)
            before_BxC = jnp.cumsum(probs_BxC, axis=-1) - probs_BxC
            scores_BxC = jnp.where(before_BxC < sampler.top_p, scores_BxC, -jnp.inf)
        choice_B = jax.vmap(jax.random.categorical)(keys_B, scores_BxC)
        return jnp.take_along_axis(ids_BxC, choice_B[:, None], axis=1)[:, 0].astype(jnp.int32)
    if nucleus:
        probs_BxV = jax.nn.softmax(scores_BxV)
        scores_BxV = jnp.where(probs_BxV >= nucleus_threshold(probs_BxV, sampler.top_p), scores_BxV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, scores_BxV).astype(jnp.int32)


def nucleus_threshold(probs_BxV: jax.Array, top_p: jax.typing.ArrayLike) -> jax.Array:
    """Returns (B, 1): the highest t for which the tokens with a probability of at least t together have at least `top_p`.

    The result is exact and needs no sort: the bits of non-negative floats order as integers do, so t is found bit by
    bit, the highest bit first.
    """
    bits_BxV = jax.lax.bitcast_convert_type(probs_BxV, jnp.int32)

    def set_bit(i: jax.Array, threshold_Bx1: jax.Array) -> jax.Array:
        tried_Bx1 = threshold_Bx1 | (1 << (29 - i))
        mass_Bx1 = jnp.sum(jnp.where(bits_BxV >= tried_Bx1, probs_BxV, 0), axis=-1, keepdims=True)
        return jnp.where(mass_Bx1 >= top_p, tried_Bx1, threshold_Bx1)

    start_Bx1 = jnp.zeros((probs_BxV.shape[0], 1), jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 30, set_bit, start_Bx1), jnp.float32)
