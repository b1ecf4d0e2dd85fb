"""What a reference says of pairs is judged once, kept with a digest, and found again; else one line says what is wrong."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.train import reference

MODEL = {"params": {"w": jnp.arange(6.0)}}
OTHER = {"params": {"w": jnp.arange(1.0, 7.0)}}
TRAIN, VAL = np.arange(10, dtype=np.float32).reshape(5, 2), np.full((2, 2), -3, np.float32)


@dataclasses.dataclass(frozen=True)
class Split:
    content: str

    def sha256(self) -> str:
        return self.content


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What `reference` needs of `Packed`."""

    train: Split
    val: Split
    given: tuple | None = None

    def with_reference(self, train, val):
        return dataclasses.replace(self, given=(train, val))


PAIRS = Pairs(Split("a"), Split("b"))


def judge():
    return TRAIN, VAL


def never():
    raise AssertionError("judged again")


def check(pairs: Pairs) -> None:
    np.testing.assert_array_equal(pairs.given[0], TRAIN)
    np.testing.assert_array_equal(pairs.given[1], VAL)


def test_it_is_judged_once_and_found_again(tmp_path):
    check(reference.of_run(tmp_path, PAIRS, 0, MODEL, judge))
    check(reference.of_run(tmp_path, PAIRS, 0, MODEL, never))  # killed before the first checkpoint
    check(reference.of_run(tmp_path, PAIRS, 7, OTHER, never))  # the model has been trained since


def test_before_the_first_step_another_model_or_other_pairs_judge_anew(tmp_path):
    reference.of_run(tmp_path, PAIRS, 0, OTHER, lambda: (TRAIN + 1, VAL + 1))
    check(reference.of_run(tmp_path, PAIRS, 0, MODEL, judge))
    others = dataclasses.replace(PAIRS, val=Split("c"))
    found = reference.of_run(tmp_path, others, 0, MODEL, lambda: (TRAIN, VAL + 1))
    np.testing.assert_array_equal(found.given[1], VAL + 1)


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "other pairs"])
def test_a_run_that_has_begun_needs_its_own(tmp_path, how):
    reference.of_run(tmp_path, PAIRS, 0, MODEL, judge)
    path, pairs = tmp_path / reference.FILE, PAIRS
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "changed":
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **arrays | {"val": VAL + 1e-3})
    else:
        pairs = dataclasses.replace(PAIRS, train=Split("c"))
    word = {"missing": "is missing", "other pairs": "is of other pairs"}.get(how, "is damaged")
    with pytest.raises(ConfigError, match=f"reference.npz {word}: .*put it back, or begin in a new workdir") as error:
        reference.of_run(tmp_path, pairs, 7, MODEL, never)
    assert "\n" not in str(error.value)
