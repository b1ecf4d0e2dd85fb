"""Prompts with answers for tests of PPO and GRPO: random ids, packed as rollouts pack them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import tiny_pairs

Text = tuple[list[int], list[int]]  # prompt, answer


def random_texts(prompts: int, answers: int, vocab_size: int, longest: int, seed: int = 0) -> list[Text]:
    """`answers` answers of 1 to `longest` tokens to each of the prompts, which are as long and begin with 0."""
    rng = np.random.default_rng(seed)

    def ids(least: int) -> list[int]:
        return rng.integers(2, vocab_size, rng.integers(least, longest + 1)).tolist()

    asked = [[0, *ids(0)[1:]] for _ in range(prompts)]
    return [(prompt, ids(1)) for prompt in asked for _ in range(answers)]


def batch(texts: Sequence[Text], seq_len: int, row_count: int) -> dict:
    """Packed rows, each with as many of the texts, in their order."""
    n, left = divmod(len(texts), row_count)
    assert not left
    made = []
    for first in range(0, len(texts), n):
        groups = [[tiny_pairs.segment(prompt, answer)] for prompt, answer in texts[first : first + n]]
        packed, placed = tiny_pairs.pack(groups, seq_len, 1)
        assert len(placed) == n, "the texts of a row do not fit"
        made.append(packed)
    return {name: jnp.asarray(np.concatenate([one[name] for one in made])) for name in made[0]}


def by_token(given: dict, values: Sequence[np.ndarray], elsewhere: float = 0.0) -> jnp.ndarray:
    """[B, T] of the values of each answer's tokens; `elsewhere` outside. `given`: a batch in which all answers count."""
    found = np.full(given["weights"].shape, elsewhere, np.float32)
    found[np.asarray(given["weights"]) > 0] = np.concatenate(values)
    return jnp.asarray(found)


def by_answer(given: dict, x_BxT) -> list[np.ndarray]:
    """The other way round: the values at the tokens of each answer, in the order of the texts."""
    x_BxT, weights, ids = (np.asarray(x) for x in (x_BxT, given["weights"], given["segment_ids"]))
    of_row = [sorted(set(ids[row][weights[row] > 0])) for row in range(len(ids))]
    return [x_BxT[row][(ids[row] == s) & (weights[row] > 0)] for row, found in enumerate(of_row) for s in found]
