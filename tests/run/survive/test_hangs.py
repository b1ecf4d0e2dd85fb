"""Budgets learned from the run's own times (the clock is not real); what is told of a death, what counts as progress."""

import random
import signal
import time

import pytest

from jaxlm.run import clock
from jaxlm.run.survive import children
from jaxlm.run.survive.children import MINUTE, Sign, Watch


class Simulated:
    """A run that is looked at once a second, as the supervisor does."""

    def __init__(self, hang_s=0.0, timeout_s=300.0, mirror_s=3600.0, meeting_s=0.0):
        self.watch = Watch(hang_s, timeout_s, mirror_s, meeting_s)
        self.now, self.step, self.processor = 1000.0, 0, 0.0
        self.sign = Sign(0, self.now)
        self.watch.begin(self.now)
        self.alarms = []

    def spend(self, activity, seconds, detail="", busy=0.0):
        """The run does something for so long; each alarm is kept with how long it had taken by then."""
        self.sign = Sign(self.step, self.now, activity, detail)
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1, end)
            self.processor += busy
            if self.watch.look(self.sign, self.now, self.processor) > 0:
                self.alarms.append((activity, self.now - self.sign.when))
                return False
        return True

    def steps(self, n, seconds):
        for _ in range(n):
            self.spend(clock.STEP, seconds)
            self.step += 1


def test_no_alarm_in_a_long_run_with_slow_starts_compiles_evaluations_and_saves():
    run, draw = Simulated(), random.Random(0)
    run.spend(clock.START, 5 * 3600, "tokenize", busy=0.9)  # data is made
    run.spend(clock.RESTORE, 40 * MINUTE, "checkpoints/7")
    run.spend(clock.COMPILE, 3 * 3600, busy=1.0)
    for save in range(8):
        for _ in range(60):
            run.spend(clock.STEP, 0.3 * draw.lognormvariate(0, 1))
            run.step += 1
        run.spend(clock.STEP, 70)  # a hiccup of the storage or the network
        run.spend(clock.DATA, 290, "prose/00017")
        run.spend(clock.EVALUATE, 100 * draw.uniform(0.5, 4), "held-out")
        run.spend(clock.SAVE, 20 * draw.uniform(0.5, 8), f"checkpoints/{save}")
    run.spend(clock.EVALUATE, 50 * MINUTE, "benchmarks")  # the first of its kind
    run.steps(50, 90.0)  # the device slows down 100 times
    assert run.alarms == []


@pytest.mark.parametrize(
    ("activity", "at_least", "at_most"),
    [
        (clock.START, 60 * MINUTE, 61 * MINUTE),
        (clock.RESTORE, 60 * MINUTE, 61 * MINUTE),
        (clock.COMPILE, 60 * MINUTE, 61 * MINUTE),
        (clock.STEP, 120, 125),
        (clock.REPEATED, 120, 125),
        (clock.DATA, 720, 725),
        (clock.EVALUATE, 20 * MINUTE, 21 * MINUTE),
        (clock.SAVE, 10 * MINUTE, 11 * MINUTE),
    ],
)
def test_an_alarm_for_what_stands_still(activity, at_least, at_most):
    run = Simulated()
    run.steps(30, 0.5)
    run.spend(clock.EVALUATE, 120, "held-out")
    run.spend(clock.SAVE, 10, "checkpoints/10")
    run.spend(clock.STEP, 0.5)
    assert run.alarms == []
    run.spend(activity, 10 * 3600, "held-out" if activity == clock.EVALUATE else "")
    ((name, after),) = run.alarms
    assert name == activity
    assert at_least <= after <= at_most


def test_steps_of_minutes_get_budgets_of_an_hour():
    run = Simulated()
    run.steps(21, 200.0)
    assert run.watch.budget(Sign(activity=clock.STEP)) == 4000


def test_one_budget_for_all():
    run = Simulated(hang_s=30)
    assert run.spend(clock.SAVE, 29)
    assert not run.spend(clock.STEP, 60, busy=1.0)
    assert run.alarms == [(clock.STEP, 31)]


@pytest.mark.parametrize("activity", [clock.START, clock.COMPILE])
def test_a_start_or_a_compilation_that_works_is_no_hang_under_one_budget_either(activity):
    """A machine that others load makes both long; to end them and begin anew would make them longer."""
    run = Simulated(hang_s=30)
    assert run.spend(activity, 300, busy=0.2)
    assert not run.spend(activity, 60)
    assert run.alarms == [(activity, 31)]


def test_a_supervisor_that_did_not_run_blames_nobody():
    """The machine slept, or the job was stopped and goes on: silence counts from then."""
    run = Simulated()
    run.steps(30, 0.5)
    run.now += 7200
    assert run.spend(clock.STEP, 100)


def test_a_new_process_begins_with_what_was_learned():
    run = Simulated()
    run.steps(30, 0.5)
    run.watch.begin(run.now)
    run.spend(clock.START, 60, busy=0.5)
    assert run.watch.budget(Sign(activity=clock.STEP)) == 120


@pytest.mark.parametrize(("hang_s", "mirror_s", "alarm"), [(0.0, 7200.0, 7321), (30.0, 600.0, 721), (900.0, 60.0, 901)])
def test_the_wait_for_the_mirror_ends_before_it_is_a_hang(hang_s, mirror_s, alarm):
    run = Simulated(hang_s, mirror_s=mirror_s)
    assert run.spend(clock.MIRROR, mirror_s + 100)
    assert not run.spend(clock.MIRROR, 10 * 3600)
    assert run.alarms == [(clock.MIRROR, alarm)]


def test_the_wait_for_other_processes_ends_before_it_is_a_hang():
    run = Simulated(hang_s=30, meeting_s=300)
    assert run.spend(clock.START, 329)
    assert run.spend(clock.STEP, 29)
    assert not run.spend(clock.STEP, 40)
    assert not Simulated(hang_s=30).spend(clock.START, 40)


def test_the_wait_doubles_up_to_five_minutes():
    assert [children.backoff(5, n) for n in (1, 2, 3, 7, 2000)] == [5, 10, 20, 300, 300]
    assert children.backoff(0, 9) == 0


KILLED = children.Death(-signal.SIGKILL, 7, clock.STEP, out_of_memory=True)


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (children.Death(1, 7, clock.STEP), "training failed (exit code 1) after step 7"),
        (KILLED, "training was ended by SIGKILL after step 7 (the machine is out of memory)"),
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
    faults = {0: False, 1: True, 16: True, 30: True, 32: True, 33: False, 34: True, 63: True}
    for minutes, fault in faults.items():
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
