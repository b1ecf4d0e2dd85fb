"""The loader's batches on the mesh: the same with and without a reserve, which is handed out when the loader has failed."""

import jax
import numpy as np
import pytest

from jaxlm.config import MeshConfig, RunError
from jaxlm.devices import sharding
from jaxlm.train import batches as batches_lib
from jaxlm.train.batches import LoaderBatches


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """How often it waited for the other processes to agree."""
    found = []
    monkeypatch.setattr(batches_lib.time, "sleep", found.append)
    return found


class Loader:
    """Yields `count` batches, then fails."""

    def __init__(self, count):
        self.count, self.given, self.closed = count, 0, False

    def __next__(self):
        if self.given == self.count:
            raise RunError("no batch within 10 s")
        self.given += 1
        return {"tokens": np.full((4, 8), self.given, np.int32)}

    def close(self):
        self.closed = True
        raise OSError("the loader can't be closed")


def make(count, reserve, failed=lambda error: None):
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, context=1, tensor=1), jax.devices()[:1])
    shapes = {"tokens": jax.ShapeDtypeStruct((4, 8), np.int32, sharding=sharding.batch_sharding(mesh))}
    return LoaderBatches(Loader(count), mesh, shapes, failed, reserve)


def drain(batches):
    """The numbers of the batches until one can't be had, and why."""
    numbers = []
    while True:
        try:
            numbers.append(int(batches(None)["tokens"][0, 0]))
        except RunError as error:
            return numbers, str(error)


@pytest.mark.parametrize("reserve", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_every_batch_comes_once_in_order_before_the_error(count, reserve):
    batches = make(count, reserve)
    assert drain(batches) == (list(range(1, count + 1)), "no batch within 10 s")
    assert drain(batches) == ([], "no batch within 10 s")


def test_a_failure_is_told_once_while_two_batches_are_left(waits):
    told, given = [], []
    batches = make(5, 2, lambda error: told.append((str(error), len(given))))
    for _ in range(5):
        given.append(batches(None))
    assert told == [("no batch within 10 s", 3)]  # the fourth and the fifth are left
    with pytest.raises(RunError):
        batches(None)
    assert len(told) == 1
    assert waits == [batches_lib.AGREE_S]


def test_a_loader_that_fails_before_the_first_step_fails_when_the_reserve_is_filled():
    """There, all processes are told at once (`processes.together`)."""
    with pytest.raises(RunError, match="no batch within 10 s"):
        make(2, reserve=2).fill()
    batches = make(3, reserve=2)
    batches.fill()
    assert drain(batches)[0] == [1, 2, 3]


def test_without_a_reserve_nobody_is_told_and_nothing_is_read_ahead():
    told = []
    batches = make(2, 0, told.append)
    batches(None)
    assert batches.loader.given == 1
    assert drain(batches)[0] == [2]
    assert not told


def test_closing_never_hides_an_error_of_the_run():
    batches = make(1, reserve=0)
    batches.close()
    assert batches.loader.closed
