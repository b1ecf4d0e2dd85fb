"""The reward model: the score at the last token, Bradley-Terry with margin; packed = text by text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_pairs

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.step.objectives import reward

MODEL = tiny.model_config(n_layers=1)
OURS = models.build(MODEL, "xla")
T, ROWS = 64, 8
PAIRS = tiny_pairs.random_pairs(11, MODEL.vocab_size, 20)
KERNEL = jnp.asarray(np.random.default_rng(3).normal(size=MODEL.d_model), jnp.float32)
VARIABLES = {"params": tiny.random_params(OURS), "score": {"score_head": {"kernel": KERNEL}}}
MARGINS = np.linspace(0, 1, len(PAIRS)).tolist()
OBJECTIVE = reward.make(
    OURS, dataclasses.replace(config.resolve(config_files.load("base", ["data.path=x"])), model=MODEL)
)
SCORES = tiny.jit(lambda tokens: OURS.apply({"params": VARIABLES["params"]}, tokens) @ KERNEL)


SUMS = tiny.jit(lambda v, b: OBJECTIVE.sums(v, b, None))


def sums(batch: dict, variables=VARIABLES):
    return SUMS(variables, batch)


def score(ids: list[int]) -> float:
    """The score of a text alone in its row."""
    row = jnp.asarray([ids + [0] * (T - len(ids))])  # what comes behind is not seen
    return float(SCORES(row)[0, len(ids) - 1])


def test_it_is_bradley_terry_with_margins_text_by_text():
    found = sums(tiny_pairs.batch(PAIRS, T, ROWS, MARGINS, closed=True, room=4))
    scores = np.asarray([[score(prompt + side) for side in sides] for prompt, *sides in PAIRS])
    margins = scores[:, 0] - scores[:, 1]
    want = np.log1p(np.exp(-(margins - np.asarray(MARGINS))))
    assert float(found.weight) == len(PAIRS)
    np.testing.assert_allclose(float(found.loss), want.sum(), rtol=1e-4)
    np.testing.assert_allclose(float(found.metrics["margin"]), margins.sum(), rtol=1e-4)
    np.testing.assert_allclose(float(found.metrics["score"]), scores.mean(1).sum(), rtol=1e-4)
    assert float(found.metrics["accuracy"]) == (margins > 0).sum()
    assert float(found.metrics["length_margin"]) == sum(len(c) - len(r) for _, c, r in PAIRS)


def test_margins_and_the_end_of_a_text_count():
    given = tiny_pairs.batch(PAIRS, T, ROWS, MARGINS, closed=True, room=4)
    loss = float(sums(given).loss)
    assert float(sums(given | {"margin": given["margin"] * 0}).loss) != pytest.approx(loss, rel=1e-3)
    assert float(sums(tiny_pairs.batch(PAIRS, T, ROWS, MARGINS, room=4)).loss) != pytest.approx(loss, rel=1e-3)
