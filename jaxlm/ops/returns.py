"""Advantages of actions, by generalized advantage estimation or within a group, and whitening.

A row holds several answers, whose tokens are the actions. Legend: B rows, T tokens, P prompts, A answers to a prompt.
"""

import jax
import jax.numpy as jnp
import numpy as np


def continues(mask_BxT: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
    """Returns True, [B, T], for tokens whose next token belongs to the same answer: all tokens of an answer but its last."""
    mask_BxT = mask_BxT > 0
    same_BxT = (segment_ids_BxT[:, :-1] == segment_ids_BxT[:, 1:]) & mask_BxT[:, :-1] & mask_BxT[:, 1:]
    return jnp.pad(same_BxT, ((0, 0), (0, 1)))


def gae(
    rewards_BxT: jax.Array,
    values_BxT: jax.Array,
    mask_BxT: jax.Array,
    continues_BxT: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (advantages, returns) of each action, float32 [B, T]: generalized advantage estimation (arXiv:1506.02438).

    The advantage is the sum of (gamma * lam)^k delta over this and the answer's later actions, where delta = reward + gamma
    * next value - value. After an answer's last action the value is 0. The return, the target of the value, is advantage +
    value. Both are 0 outside answers, where `mask_BxT` is 0.

    Args:
      continues_BxT: the result of `continues`.
      lam: 0 for one-step differences, 1 for sums of all later rewards.
    """
    answers_BxT = mask_BxT > 0
    rewards_BxT, values_BxT = (jnp.where(answers_BxT, x, 0).astype(jnp.float32) for x in (rewards_BxT, values_BxT))
    on_BxT = continues_BxT.astype(jnp.float32)
    delta_BxT = rewards_BxT + gamma * on_BxT * jnp.roll(values_BxT, -1, axis=1) - values_BxT

    def back(after_B: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_B, on_B = inputs
        advantage_B = delta_B + gamma * lam * on_B * after_B
        return advantage_B, advantage_B

    by_token = (delta_BxT.T, on_BxT.T)
    _, advantages_TxB = jax.lax.scan(back, jnp.zeros(delta_BxT.shape[0], jnp.float32), by_token, reverse=True)
    return advantages_TxB.T, jnp.where(answers_BxT, advantages_TxB.T + values_BxT, 0)


def whiten(x_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
    """Returns `x_BxT` with mean 0 and variance 1 over the tokens of the mask, and 0 elsewhere, float32 [B, T].

    The variance is unbiased (divided by the count - 1), as in TRL. A single token becomes 0.
    """
    chosen_BxT = mask_BxT > 0
    count = jnp.sum(chosen_BxT)
    x_BxT = jnp.where(chosen_BxT, x_BxT, 0).astype(jnp.float32)
    mean = jnp.sum(x_BxT) / jnp.maximum(count, 1)
    centred_BxT = jnp.where(chosen_BxT, x_BxT - mean, 0)
    variance = jnp.sum(jnp.square(centred_BxT)) / jnp.maximum(count - 1, 1)
    return centred_BxT * jax.lax.rsqrt(variance + 1e-8)


def explained_variance(values_BxT: jax.Array, returns_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
    """Returns the share of the returns' variance that the values explain, a float32 scalar; 0 if all returns are equal.

    1: the values equal the returns; 0: they are no better than the mean return; below 0: worse.
    """
    chosen_BxT = mask_BxT > 0
    count = jnp.maximum(jnp.sum(chosen_BxT), 1)

    def variance(x_BxT: jax.Array) -> jax.Array:
        mean = jnp.sum(jnp.where(chosen_BxT, x_BxT, 0)) / count
        return jnp.sum(jnp.where(chosen_BxT, jnp.square(x_BxT - mean), 0)) / count

    whole = variance(returns_BxT)
    size = jnp.sum(jnp.where(chosen_BxT, jnp.square(returns_BxT), 0)) / count
    varied = whole > 1e-10 * size  # beyond rounding
    return jnp.where(varied, 1 - variance(returns_BxT - values_BxT) / jnp.where(varied, whole, 1), 0)


def group_advantages(rewards_PxA: np.ndarray, scale: bool) -> np.ndarray:
    """Returns each answer's reward minus the mean reward of its prompt's answers, float32 [P, A] (GRPO, arXiv:2402.03300).

    `scale` divides by the group's standard deviation (ddof = 1), to which 1e-4 is added as in TRL.
    """
    rewards_PxA = np.asarray(rewards_PxA, np.float64)
    advantages_PxA = rewards_PxA - rewards_PxA.mean(axis=1, keepdims=True)
    if scale:
        advantages_PxA = advantages_PxA / (rewards_PxA.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return advantages_PxA.astype(np.float32)
