"""What is told of a death, what counts as progress, and how long the next start waits."""

import signal
import time

import pytest

from jaxlm.run import clock
from jaxlm.run.survive import children


def test_the_wait_doubles_up_to_five_minutes():
    assert [children.backoff(5, n) for n in (1, 2, 3, 7, 2000)] == [5, 10, 20, 300, 300]
    assert children.backoff(0, 9) == 0


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (children.Death(1, 7, clock.STEP), "training failed (exit code 1) after step 7"),
        (children.Death(-signal.SIGKILL, 7, clock.STEP), "training was ended by SIGKILL after step 7"),
        (
            children.Death(-signal.SIGKILL, 7, clock.STEP, out_of_memory=True),
            "training was ended by SIGKILL after step 7 (the machine is out of memory)",
        ),
        (children.Death(-63, 7, clock.STEP), "training was ended by signal 63 after step 7"),
        (children.Death(4, 7, clock.SAVE, hung=60.0), "training hung after step 7"),
    ],
)
def test_a_death_is_told(death, words):
    assert death.words() == words


def test_progress_is_a_newer_checkpoint_or_another_step(tmp_path):
    """Temporary folders of a save that did not finish are no checkpoint."""
    (tmp_path / "10").mkdir()
    progress = children.Progress(tmp_path, 60.0)
    seen = []
    for step, saved in ((12, ""), (13, ""), (12, "20.tmp"), (12, "20"), (0, ""), (12, ""), (0, "")):
        if saved:
            (tmp_path / saved).mkdir()
        progress.note(children.Death(1, step, clock.STEP))
        seen.append((progress.newer, progress.again))
    no, again, newer = (False, False), (False, True), (True, False)
    assert seen == [no, no, again, newer, no, again, again]


def test_a_fault_of_the_storage_at_the_start_is_waited_out(tmp_path, monkeypatch):
    """For 30 minutes since the first of them in a row. Other deaths count as ever, before them and after."""
    now = [100.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    progress, seen = children.Progress(tmp_path, 1800.0), []
    for minutes, fault in (
        (0, False),
        (1, True),
        (16, True),
        (30, True),
        (32, True),
        (33, False),
        (34, True),
        (63, True),
    ):
        now[0] = 100.0 + 60 * minutes
        progress.note(children.Death(1, 0, clock.START, fault=fault))
        seen.append(progress.again)
    assert seen == [False, False, False, False, True, True, False, False]


def test_storage_that_hangs_or_fails_has_no_answer():
    def fails():
        raise OSError("stale")

    assert children.within(1, lambda: 3) == 3
    assert children.within(1, fails) is None
    assert children.within(0.05, lambda: time.sleep(0.5)) is None
