"""Room held back on the disk: real bytes, freed when a write meets a full disk; a warning where a run can't fit."""

import dataclasses
import errno
import shutil
import types

import pytest

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.train.checkpoints import damage, keep

CONFIG = config_lib.resolve(config_files.load("base", ["data.path=x", "checkpoint.reserve_mb=0.2"])).checkpoint


def test_the_reserve_is_real_and_is_freed_once(tmp_path):
    reserve = keep.Reserve(tmp_path, 0.2)
    assert reserve.make()
    path = tmp_path / keep.RESERVE
    assert path.stat().st_size == 200_000
    assert len(set(path.read_bytes())) == 256  # no zeros, which some file systems do not store
    assert reserve.free()
    assert not reserve.held
    assert not reserve.free()
    assert reserve.make(most=1000)
    assert path.stat().st_size == 1000  # no larger than a checkpoint


def test_it_is_not_made_of_the_last_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=300_000))
    assert not keep.Reserve(tmp_path, 0.2).make()
    assert keep.Reserve(tmp_path, 0.1).make()


def test_a_run_that_does_not_fit_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=39e9))
    config = dataclasses.replace(CONFIG, keep_last=2, keep_best=1)
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
        (
            ValueError('RESOURCE_EXHAUSTED: Error writing "k" in "/c/d" [OS error 28: ENOSPC No space left on device]'),
            errno.ENOSPC,
            "No space left on device: /c/d",
        ),
        (
            ValueError("UNKNOWN: Failed to fsync: Input/output error [os_error_code='5']"),
            errno.EIO,
            "Input/output error: here",
        ),
        (ValueError("a shape\nand more"), None, "a shape: here"),
        (damage.ToldError("process 1: x: /y"), None, "process 1: x: /y"),
    ],
)
def test_errors_in_words(error, number, words):
    assert damage.number(error) == number
    assert damage.passing(error) == (number is not None)
    assert damage.words(error, "here") == words
    wrapped = RuntimeError("Orbax says much")
    wrapped.__cause__ = error
    assert damage.words(wrapped, "here") == words
