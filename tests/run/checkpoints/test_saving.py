"""Saves that fail, hang, or hold what is not to be kept: in one process, without a real bad disk."""

import contextlib
import dataclasses
import errno
import resource
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm import config
from jaxlm.config import RunError, config_files
from jaxlm.run.checkpoints import keep, saving, store, verify
from jaxlm.run.checkpoints.damage import ToldError
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states
from jaxlm.train import hooks, loop, watches

KEYS = ["data.path=x", "checkpoint.reserve_mb=0.001", "checkpoint.keep_best=0", "checkpoint.every_steps=1"]
KEEP = config.resolve(config_files.load("base", KEYS)).checkpoint


def make(step, value=0.0):
    made = states.init({"params": {"a": jnp.full((4, 4), value + step)}}, optax.sgd(1.0))
    return dataclasses.replace(made, step=jnp.int32(step))


def moment(step, said):
    return loop.Moment(step, make(step), {}, said.append)


def garble(monkeypatch, when):
    """From now on what is written is garbled on its way to the disk, as long as `when()`."""
    flush = verify.flush

    def bad(folder):
        flush(folder)
        file = max((folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        if when():
            content[len(content) // 2] ^= 4
            file.write_bytes(content)

    monkeypatch.setattr(verify, "flush", bad)


def test_what_does_not_read_back_is_moved_away_and_nothing_whole_goes(tmp_path, monkeypatch, capsys):
    checkpointer, bad = Checkpointer(tmp_path / "checkpoints", KEEP), False
    garble(monkeypatch, lambda: bad)
    for step in range(1, 7):
        bad = step in (3, 4, 5)
        checkpointer.save(make(step), {})
        checkpointer.wait()
        assert bool(checkpointer.failing) == bad
    checkpointer.close()
    assert checkpointer.steps() == [2, 6]  # 1 went when 6 was whole
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("checkpoint")]
    assert len(said) == 3
    assert said[0].startswith("checkpoint 3 is not what was saved: params/a")
    assert said[0].endswith("training goes on, step 2 stays")
    assert [p.name for p in (tmp_path / "damaged").iterdir() if "deleting" not in p.name] == ["5.0"]


def test_a_save_that_failed_is_owed_and_tried_again(tmp_path, monkeypatch):
    checkpointer, now = Checkpointer(tmp_path / "checkpoints", KEEP), 1000.0
    monkeypatch.setattr(store.time, "monotonic", lambda: now)
    checkpointer.save(make(1), {})
    checkpointer.wait()

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    probe = saving.probe
    monkeypatch.setattr(saving, "probe", full)
    now += 100
    checkpointer.save(make(2), {})
    checkpointer.wait()
    assert checkpointer.failing.startswith("checkpoint 2 can't be saved: No space left on device")
    assert (checkpointer.steps(), checkpointer.unprotected_s()) == ([1], pytest.approx(100))
    assert not checkpointer.reserve.held  # freed for logs
    assert not checkpointer.wants_save()
    now += 11
    assert checkpointer.wants_save()
    monkeypatch.setattr(saving, "probe", probe)
    checkpointer.save(make(3), {})
    checkpointer.close()
    assert (checkpointer.failing, checkpointer.wants_save(), checkpointer.steps()) == ("", False, [1, 3])
    assert checkpointer.reserve.held


def test_the_end_of_a_run_that_can_not_be_saved_is_an_error(tmp_path, monkeypatch):
    said = []
    checkpointer = Checkpointer(tmp_path / "checkpoints", KEEP)
    hook = hooks.Save(checkpointer, dataclasses.replace(KEEP, max_unprotected_minutes=1e-3), 2.0, {})
    hook(moment(1, said))
    monkeypatch.setattr(saving, "probe", lambda folder: open("/dev/full", "w").write("x" * 10**5))
    with pytest.raises(RunError, match="step 2 is not saved: checkpoint 2 can't be saved: No space left"):
        hook.close(moment(2, said), loop.Ending(loop.DONE))
    hook.close(moment(2, said), loop.Ending(loop.STOPPED))
    assert said[-1].startswith("step 2 is not saved")
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize("how", ["moved", "deleted", "another"])
def test_nothing_is_made_where_the_folder_was(tmp_path, how):
    said, folder = [], tmp_path / "run"
    checkpointer = Checkpointer(folder / "checkpoints", KEEP)
    save = hooks.Save(checkpointer, dataclasses.replace(KEEP, every_steps=1), 2.0, {})
    here = hooks.Here(checkpointer.moved, [save])
    assert (here.due(1, 3), here(moment(1, said))) == (True, None)
    folder.rename(tmp_path / "new")
    if how == "another":
        folder.mkdir()
    ending = here(moment(1, said))
    assert (ending.code, ending.keep, ending.cause) == (loop.FAILED, False, loop.MOVED)
    assert f"{folder} was moved or deleted under the run" in ending.why
    save.close(moment(1, said), ending)
    with pytest.raises(RunError, match=r"step 1 is not saved: .* was moved or deleted"):
        save.close(moment(1, said), loop.Ending(loop.PREEMPTED))
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_disk_is_full_if_it_does_not_take_the_bytes_of_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "a").write_bytes(bytes(3000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit, full in ((2000, True), (3000, False)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            assert keep.is_full(tmp_path, 60.0) is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        assert not keep.is_full(tmp_path, 0.0)  # it took too long to tell
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["8"]
    assert not keep.is_full(tmp_path / "none", 60.0)
    (tmp_path / keep.RESERVE).mkdir()  # a disk that fails otherwise
    assert not keep.is_full(tmp_path, 60.0)


def test_the_run_ends_when_too_much_is_unsaved(tmp_path, monkeypatch):
    now = 0.0
    checkpointer = Checkpointer(tmp_path / "checkpoints", KEEP)
    monkeypatch.setattr(checkpointer, "unprotected_s", lambda: now)
    by_time = watches.SaveInFlight(checkpointer, dataclasses.replace(KEEP, max_unprotected_minutes=10.0))
    money = dataclasses.replace(KEEP, max_unprotected_minutes=0.0, max_unprotected_usd=1.0)
    by_money = watches.SaveInFlight(checkpointer, money, usd_per_hour=3.0)
    now = 1e6
    assert by_time(5, {}) is None  # saving works: nothing is due
    checkpointer.failing, now = "checkpoint 4 can't be saved: X", 599.0
    assert by_time(5, {}) is None
    now = 601.0
    ending = by_time(5, {})
    assert (ending.code, ending.cause) == (loop.FAILED, "disk")
    assert ending.why.endswith("the work of 10 minutes is unsaved, and checkpoint 4 can't be saved: X")
    assert by_money(5, {}) is None
    now = 1201.0
    assert by_money(5, {}).code == loop.FAILED


def test_what_is_not_finite_is_never_saved(tmp_path, capsys):
    checkpointer = Checkpointer(tmp_path / "checkpoints", KEEP)
    assert checkpointer.save(make(1), {})
    assert not checkpointer.save(make(2, np.nan), {})
    assert not checkpointer.save(dataclasses.replace(make(3), opt_state={"nu": jnp.array([1.0, np.inf])}), {})
    checkpointer.close()
    assert checkpointer.steps() == [1]
    said = capsys.readouterr().err
    assert "step 2 is not saved: params/a has a number that is not finite" in said
    assert "step 3 is not saved: train/opt_state/nu has a number that is not finite" in said


def test_a_save_that_hangs_is_told_skipped_and_given_up(tmp_path, monkeypatch, capsys):
    checkpointer, go_on = Checkpointer(tmp_path / "checkpoints", KEEP), threading.Event()
    monkeypatch.setattr(verify, "flush", lambda folder: go_on.wait(60))
    checkpointer.save(make(1), {})
    assert checkpointer.skips(2)
    assert "step 2 is not saved now: the save of step 1 has taken" in capsys.readouterr().err
    assert not checkpointer.wants_save()
    monkeypatch.setattr(store, "_PATIENCE_S", 0.5)
    assert checkpointer.hangs() == ""
    monkeypatch.setattr(store, "_HANGS_S", 0.0)
    assert "the save of step 1 hangs" in checkpointer.hangs()
    assert checkpointer.save_last(2, make(2), {}).startswith("checkpoint 1 was not done after")
    assert checkpointer.left_behind
    go_on.set()


def test_a_wait_tells_and_ends_soon_after_a_wish_to_stop(tmp_path, monkeypatch):
    """Time runs fast here: a quarter of a second is ten."""
    now, said, stop = 0.0, [], False

    class Never:
        def wait(self, seconds):
            nonlocal now, stop
            now += 40 * seconds
            stop = now > 500
            return False

    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    job = saving.Saving.__new__(saving.Saving)
    job.step, job.at, job.folder = 7, "writing", tmp_path
    assert not saving.wait(job, Never(), said.append, lambda: stop, 1200.0)
    assert said == [f"waiting for {s} s for checkpoint 7: writing ({tmp_path})" for s in (60, 360)]
    assert now == pytest.approx(540, abs=15)


@pytest.mark.parametrize("failed", ["", "process 1 has no room"])
def test_orbax_is_waited_for_until_another_process_fails(failed):
    checkpointer = types.SimpleNamespace(close=lambda: time.sleep(0.7 if not failed else 5.0))
    votes = types.SimpleNamespace(failed=lambda: failed)
    began = time.monotonic()
    with pytest.raises(ToldError, match=failed) if failed else contextlib.nullcontext():
        saving.Saving._finish(None, checkpointer, votes)
    assert 0.7 <= time.monotonic() - began < 4.5
