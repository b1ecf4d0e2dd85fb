"""Which checkpoints go."""

import pytest

from jaxlm.config import CheckpointConfig
from jaxlm.train.checkpoints import keep

STEPS, LOSSES = [1, 2, 3, 4, 5, 6], {1: 3.0, 2: 1.0, 3: 2.0, 5: 1.0, 9: 0.1}


@pytest.mark.parametrize(
    ("last", "every", "best", "kept"),
    [
        (1, 0, 0, [6]),
        (2, 0, 0, [5, 6]),
        (1, 2, 0, [2, 4, 6]),
        (1, 0, 1, [2, 6]),  # of equals the earliest
        (1, 0, 2, [2, 5, 6]),
        (1, 0, 9, [1, 2, 3, 5, 6]),  # 4 was never evaluated
        (9, 0, 0, STEPS),
    ],
)
def test_what_stays(last, every, best, kept):
    config = CheckpointConfig(every_steps=1, keep_last=last, keep_every=every, keep_best=best)
    assert keep.obsolete(STEPS, LOSSES, config) == [step for step in STEPS if step not in kept]


def test_a_loss_that_is_not_finite_never_hides_the_best():
    """NaN has no place in an order: sorted with it, the best one would go."""
    losses = {1: float("nan"), 2: 1.0, 3: 2.0, 4: float("inf")}
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_every=0, keep_best=1)
    assert keep.obsolete([1, 2, 3, 4], losses, config) == [1, 3]
    assert keep.best([1, 2, 3, 4], losses) == 2
    assert keep.best([1, 4], losses) is None


def test_the_best():
    assert keep.best(STEPS, LOSSES) == 2
    assert keep.best(STEPS, {9: 0.1}) is None
    assert keep.best([], LOSSES) is None
