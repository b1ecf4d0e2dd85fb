"""Which checkpoints go, and the room on the disk for them: real bytes, freed at need, and a warning where a run can't fit."""

import dataclasses
import errno
import shutil
import types

import pytest

from jaxlm import config as config_lib
from jaxlm.config import config_files
from jaxlm.run.checkpoints import damage, keep

BASE = config_lib.resolve(config_files.load("base", ["data.path=x", "checkpoint.reserve_mb=0.2"])).checkpoint
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
    config = dataclasses.replace(BASE, keep_last=last, keep_every=every, keep_best=best)
    assert keep.obsolete(STEPS, LOSSES, config) == [step for step in STEPS if step not in kept]


def test_the_best_which_a_loss_that_is_not_finite_never_hides():
    """NaN has no place in an order: sorted with it, the best one would go."""
    assert keep.best(STEPS, LOSSES) == 2
    assert keep.best(STEPS, {9: 0.1}) is keep.best([], LOSSES) is None
    losses = {1: float("nan"), 2: 1.0, 3: 2.0, 4: float("inf")}
    config = dataclasses.replace(BASE, keep_last=1, keep_every=0, keep_best=1)
    assert keep.obsolete([1, 2, 3, 4], losses, config) == [1, 3]
    assert keep.best([1, 2, 3, 4], losses) == 2
    assert keep.best([1, 4], losses) is None


@pytest.mark.parametrize(
    ("last", "whole", "kept"),
    [
        (2, [], STEPS),  # a disk that garbles: nothing goes
        (2, [1, 2], STEPS),  # what is newer than the whole ones may be whole
        (2, [1, 2, 3], [2, 3, 4, 5, 6]),
        (2, [2, 3, 5, 6], [5, 6]),  # 1 and 4 were never verified, and nobody will miss them
        (1, [4], [4, 5, 6]),
        (3, [4, 6], STEPS),
    ],
)
def test_only_verified_ones_count(last, whole, kept):
    config = dataclasses.replace(BASE, keep_last=last, keep_every=0, keep_best=0)
    assert keep.obsolete(STEPS, {}, config, whole) == [step for step in STEPS if step not in kept]


def test_the_most_that_a_run_has_at_once():
    config = dataclasses.replace(BASE, keep_last=2, keep_every=0, keep_best=1)
    assert keep.most(config, 100, 3) == 2 + 1 + 3 + 1
    assert keep.most(dataclasses.replace(config, keep_every=30), 100, 0) == 2 + 1 + 3 + 1


def test_the_best_is_a_verified_one_and_pinned_ones_stay():
    config = dataclasses.replace(BASE, keep_last=1, keep_every=0, keep_best=1)
    assert keep.obsolete(STEPS, LOSSES, config, [3, 6], pinned={1}) == [2, 4, 5]


def test_the_reserve_is_real_and_is_freed_once(tmp_path):
    reserve = keep.Reserve(tmp_path, 0.2)
    reserve.make()
    path = tmp_path / keep.RESERVE
    assert path.stat().st_size == 200_000
    assert len(set(path.read_bytes())) == 256  # no zeros, which some file systems do not store
    reserve.free()
    assert not path.exists()
    assert not reserve.held
    reserve.free()
    reserve.make(most=1000)
    assert path.stat().st_size == 1000  # no larger than a checkpoint


def test_it_is_not_made_of_the_last_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=300_000))
    for megabytes, fits in ((0.2, False), (0.1, True)):
        reserve = keep.Reserve(tmp_path, megabytes)
        reserve.make()
        assert reserve.held is fits


def test_a_run_that_does_not_fit_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=39e9))
    config = dataclasses.replace(BASE, keep_last=2, keep_best=1)
    assert keep.lacking(tmp_path, 0, 9e9, config) == ""
    told = keep.lacking(tmp_path, 0, 12e9, config)
    assert "has 39 GB free, and the run will need 48 GB: 4 checkpoints of 12 GB" in told.replace(".0 GB", " GB")
    assert keep.lacking(tmp_path, 2, 12e9, config) == ""
    assert keep.lacking(tmp_path, 2, 12e9, config, pinned=2)
    every = dataclasses.replace(config, keep_every=100)
    told = keep.lacking(tmp_path, 0, 9e9, every, steps=350)
    assert "7 checkpoints of" in told
    assert "keep_best=1, keep_every=100, one on its way" in told


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), errno.ENOSPC, "No space left on device: /a/b"),
        (ValueError('RESOURCE_EXHAUSTED: "k" in "/c/d" [OS error 28: ENOSPC No space left on device]'), errno.ENOSPC,
         "No space left on device: /c/d"),
        (ValueError("UNKNOWN: Failed to fsync: Input/output error [os_error_code='5']"), errno.EIO,
         "Input/output error: here"),
        (ValueError("a shape\nand more"), None, "a shape: here"),
        (damage.ToldError("process 1: x: /y"), None, "process 1: x: /y"),
    ],
)  # fmt: skip
def test_errors_in_words(error, number, words):
    assert damage.number(error) == number
    assert damage.passing(error) == (number is not None)
    assert damage.words(error, "here") == words
    wrapped = RuntimeError("Orbax says much")
    wrapped.__cause__ = error
    assert damage.words(wrapped, "here") == words
