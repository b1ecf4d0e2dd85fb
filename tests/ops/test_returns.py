"""Advantages, packed and one answer at a time; whitening; groups. The expected numbers are sums written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import returns

B, T = 3, 12
ANSWERS = [(0, 2, 5), (0, 5, 6), (0, 8, 12), (1, 0, 12), (2, 3, 4), (2, 4, 9)]  # row, first token, end
GAMMA, LAM = 0.9, 0.7


def packed(seed: int = 0) -> tuple:
    """(rewards, values, mask, segment ids) of rows of answers, some side by side; junk stands outside answers."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, B, T)).astype(np.float32)
    mask, ids = np.zeros((B, T), np.float32), np.full((B, T), 9, np.int32)
    for number, (row, first, end) in enumerate(ANSWERS):
        mask[row, first:end], ids[row, first:end] = 1, number + 1
    return rewards, values, mask, ids


@jax.jit
def gae(rewards, values, mask, ids):
    return returns.gae(rewards, values, mask, returns.continues(mask, ids), gamma=GAMMA, lam=LAM)


def by_hand(rewards, values) -> np.ndarray:
    """The double sum of the paper's equation 16, cut off at the answer's end."""
    after = np.append(values[1:], 0)
    delta = rewards + GAMMA * after - values
    return np.asarray(
        [sum((GAMMA * LAM) ** k * delta[t + k] for k in range(len(delta) - t)) for t in range(len(delta))]
    )


def test_gae_of_packed_answers_is_the_sum_of_each_alone():
    rewards, values, mask, ids = packed()
    advantages, found = gae(rewards, values, mask, ids)
    want = np.zeros((2, B, T))
    for row, first, end in ANSWERS:
        here = (row, slice(first, end))
        want[0][here] = by_hand(rewards[here].astype(float), values[here].astype(float))
        want[1][here] = want[0][here] + values[here]
    np.testing.assert_allclose(advantages, want[0], atol=1e-6)
    np.testing.assert_allclose(found, want[1], atol=1e-6)
    assert (advantages.dtype, found.dtype) == (jnp.float32, jnp.float32)
    # Mutation: answers that stand side by side, taken for one.
    joined, _ = gae(rewards, values, mask, np.ones_like(ids))
    assert np.abs(joined - want[0]).max() > 0.1


def test_what_stands_outside_answers_is_not_read():
    rewards, values, mask, ids = packed()
    spoiled = [np.where(mask > 0, x, np.nan) for x in (rewards, values)]
    for got, want in zip(gae(*spoiled, mask, ids), gae(rewards, values, mask, ids), strict=True):
        np.testing.assert_array_equal(got, want)


def test_with_lambda_1_advantages_are_discounted_rewards_less_values_and_with_0_differences():
    rewards, values, mask = (np.asarray([x], np.float32) for x in ([1, 0, 2], [0.5, 3, 1], [1, 1, 1]))
    on = returns.continues(mask, np.ones_like(mask))
    np.testing.assert_array_equal(on, [[True, True, False]])
    found = returns.gae(rewards, values, mask, on, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(found, ([[1 + 0.25 * 2 - 0.5, 1 - 3, 2 - 1]], [[1.5, 1, 2]]), rtol=1e-6)
    found, _ = returns.gae(rewards, values, mask, on, gamma=0.5, lam=0.0)
    np.testing.assert_allclose(found, [[1 + 1.5 - 0.5, 0.5 - 3, 2 - 1]], rtol=1e-6)


def test_an_answer_goes_on_only_to_a_token_of_its_own():
    mask, ids = np.asarray([[0, 1, 1, 1, 0, 1]]), np.asarray([[1, 1, 1, 2, 2, 2]])
    np.testing.assert_array_equal(returns.continues(mask, ids), [[False, True, False, False, False, False]])


def test_whitening():
    x, _, mask, _ = packed()
    got = np.asarray(jax.jit(returns.whiten)(3 + 2 * np.where(mask > 0, x, np.nan), mask))
    chosen = x[mask > 0]
    np.testing.assert_allclose(got[mask > 0], (chosen - chosen.mean()) / chosen.std(ddof=1), rtol=1e-5)
    assert not got[mask == 0].any()
    assert np.var(got[mask > 0], ddof=1) == pytest.approx(1, rel=1e-5)
    assert np.var(got[mask > 0]) < 0.97  # what a variance without Bessel's correction would make 1


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_of_no_token_or_one_is_0(count):
    mask = np.arange(4)[None] < count
    np.testing.assert_array_equal(returns.whiten(np.full((1, 4), 5.0), mask), np.zeros((1, 4)))


def test_explained_variance():
    values, _, mask, _ = packed()
    of = jax.jit(returns.explained_variance)
    noise = np.asarray(packed(1)[0])
    assert float(of(values, values, mask)) == 1
    assert float(of(np.where(mask > 0, values, 7), values, mask)) == 1  # outside answers nothing is read
    assert float(of(0 * values, values, mask)) == pytest.approx(0, abs=1e-6)
    got, chosen = float(of(values + noise, values, mask)), mask > 0
    assert got == pytest.approx(1 - noise[chosen].var() / values[chosen].var(), rel=1e-5)
    assert float(of(values, np.ones_like(values), mask)) == 0


def test_advantages_within_a_group():
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.1] * 4, [3.0, 0.0, 0.0, 0.0]]
    plain, scaled = (returns.group_advantages(rewards, scale) for scale in (False, True))
    np.testing.assert_allclose(plain, [[0.5, -0.5, -0.5, 0.5], [0] * 4, [2.25, -0.75, -0.75, -0.75]], atol=1e-7)
    np.testing.assert_allclose(scaled[0], plain[0] / (3**-0.5 + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(scaled[2], plain[2] / (1.5 + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(scaled[1], 0, atol=1e-7)  # equal rewards teach nothing
    assert plain.dtype == scaled.dtype == np.float32


def test_returns_that_are_equal_but_for_rounding_have_no_variance():
    values = jnp.asarray([[0.3, -2.0, 1.5, 0.1]])
    equal = jnp.asarray([[1.0, 1.0000002, 0.9999998, 1.0]])
    assert float(returns.explained_variance(values, equal, jnp.ones((1, 4)))) == 0
