"""The loop with a step and batches of its own: stops, hooks, watches, and what is made up for after a resume."""

import dataclasses
import pathlib
import time
import types

import jax.numpy as jnp
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.run import clock, metrics, signals
from jaxlm.train import hooks, loop, phases, stability, watches
from jaxlm.train import recorder as recorder_lib
from jaxlm.train.recorder import Meter


class Recorder:
    """Stands for the checkpointer, the writer and the evaluations; remembers what happened."""

    failing, verify_s = "", 0.0

    def __init__(self):
        self.events, self.saved, self.checks, self.records = [], {}, 0, []

    def save(self, state, meta):
        if int(state.step) not in self.saved:
            self.events.append(("save", int(state.step)))
            self.saved[int(state.step)] = meta

    def save_last(self, step, state, meta):
        self.save(state, meta)
        return ""

    def skips(self, step):
        return False

    def wants_save(self):
        return False

    def hangs(self):
        return ""

    def steps(self):
        return sorted(self.saved)

    def check(self):
        self.checks += 1

    def close(self):
        pass

    def write(self, record):
        self.events.append(("write", record["step"]))
        self.records.append(record)

    def evaluate(self, variables):
        self.events.append(("evaluate", None))
        return {"val/loss": 1.0}

    def sample(self, variables, step):
        self.events.append(("sample", step))
        return [], {}


class Stop(signals.StopSignal):
    """A wish to stop after a step."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def requested(self, step):
        return step == self._at


class At(hooks.Hook):
    """Does something after one step."""

    name = "at"

    def __init__(self, step, action):
        self._step, self._action = step, action

    def due(self, step, end):
        return step == self._step

    def __call__(self, moment):
        return self._action(moment)


class WhenLoss(loop.Watch):
    """Ends the run at a loss."""

    reads = ("loss",)

    def __init__(self, above, ending):
        self._above, self._ending, self.seen = above, ending, []

    def __call__(self, step, record):
        self.seen.append((step, record["loss"]))
        return self._ending if record["loss"] > self._above else None


def run(
    recorder, *, steps=8, first=0, stop_at=None, bad_from=None, log_every=1, losses=None,
    more_hooks=(), more_watches=(), loss=lambda step: 1.0, folder="nowhere", no_batch=(0, None),
    draw_s=0.0,
):  # fmt: skip
    """(how the run ended, its last state): evaluations and saves every four steps, three bad steps end it."""
    keys = ["data.path=x", f"workdir={folder}", "optim.warmup_steps=0", f"train.steps={steps}", "sample.prompts=('x',)"]
    c = config.resolve(config_files.load("base", keys))
    row = 0

    def train_step(frozen, state, batch):
        nonlocal row
        step = int(state.step) + 1
        assert batch == {"of step": step}
        row = row + 1 if bad_from and step >= bad_from else 0
        found = {"loss": jnp.float32(loss(step)), "skipped_in_a_row": jnp.float32(row), "lr": jnp.float32(1)}
        return types.SimpleNamespace(step=jnp.int32(step), params={}, average={}), found

    class Batches:
        activity, from_state = (clock.ROLLOUT, True) if draw_s else (clock.DATA, False)

        def __call__(self, state):
            step = int(state.step) + 1
            time.sleep(draw_s)
            if step == no_batch[0]:
                raise no_batch[1]
            return {"of step": step}

        def close(self):
            pass

    losses = {} if losses is None else losses
    hooked = [
        hooks.Save(recorder, dataclasses.replace(c.checkpoint, every_steps=4), 0.0, {"note": 1}),
        hooks.HeldOut(recorder.evaluate, loop.Every(4), losses),
        hooks.Sample(
            recorder.sample, loop.Every(c.sample.every_steps, c.sample.at_steps), pathlib.Path(folder, "samples")
        ),
        *more_hooks,
    ]
    watching = [watches.SaveInFlight(recorder, c.checkpoint), stability.NonFinite(3, c.stability), *more_watches]
    spent = clock.Clock()
    meter = Meter(spent, tokens_per_step=1, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0)
    reads = [name for watch in watching for name in watch.reads]
    job = loop.Run(
        mesh=sharding.make_mesh(config.MeshConfig(8, 1, 1, 1)),
        steps=steps,
        train_step=train_step,
        frozen={},
        batches=Batches(),
        hooks=hooked,
        watches=watching,
        recorder=recorder_lib.Recorder(
            meter, recorder, first=first + 1, steps=steps, every_steps=log_every, reads=reads
        ),
        clock=spent,
        stop=Stop(stop_at),
        owed=hooks.owed(hooked, first, steps),
    )
    try:
        state, ending = loop.run(job, types.SimpleNamespace(step=jnp.int32(first), params={}, average={}))
    finally:
        job.recorder.writer = None  # what is written stays as the loop leaves it
        job.recorder.close()
    return ending, int(state.step)


def of(recorder, kind):
    return [step for name, step in recorder.events if name == kind]


def test_a_whole_run_saves_evaluates_and_samples_in_this_order():
    r = Recorder()
    assert run(r) == (loop.Ending(loop.DONE), 8)
    assert of(r, "save") == [4, 8]
    assert len(of(r, "evaluate")) == 2
    assert of(r, "sample") == [8]
    assert r.checks == 8  # a save that failed is known at the next step
    assert r.saved[8] == {"note": 1}
    assert [name for name, _ in r.events if name != "write"] == ["save", "evaluate", "save", "evaluate", "sample"]


def test_a_start_shows_its_first_step_and_the_run_its_last():
    r = Recorder()
    run(r, first=2, log_every=5)
    assert [step for step in of(r, "write") if step not in (4,)] == [3, 5, 8, 8]  # 4 and one 8 are evaluations


def test_the_speed_of_each_step_counts_the_drawing_of_its_own_answers():
    """Each but the first, which has none: no step is read together with the next, or after the next one's answers are drawn."""
    r = Recorder()
    run(r, draw_s=0.05)
    speeds = [record["tokens_per_second"] for record in r.records if "tokens_per_second" in record]
    assert len(speeds) == 7
    assert max(speeds) <= 1 / 0.05


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_a_stop_saves_at_its_step_and_loses_no_evaluation(stop_at):
    r, losses = Recorder(), {}
    ending, step = run(r, stop_at=stop_at, losses=losses)
    assert (ending.code, step) == (loop.PREEMPTED, stop_at)
    assert max(r.saved) == stop_at
    evaluations = len(of(r, "evaluate"))
    assert evaluations == (stop_at == 5)
    again = Recorder()
    again.saved = dict(r.saved)
    assert run(again, first=stop_at, losses=losses)[0].code == loop.DONE
    assert evaluations + len(of(again, "evaluate")) == 2
    assert sorted(losses) == [4, 8]


def test_what_the_last_step_still_owes_is_made_up_for(tmp_path):
    r = Recorder()
    r.saved[8] = {}
    ending, _ = run(r, first=8, folder=tmp_path)
    assert ending.code == loop.DONE
    assert (len(of(r, "evaluate")), of(r, "sample"), of(r, "save")) == (1, [8], [])
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/8.jsonl").write_text("{}\n")
    r = Recorder()
    r.saved[8] = {}
    run(r, first=8, folder=tmp_path, losses={8: 1.0})
    assert r.events == []


def test_an_evaluation_without_a_finite_loss_is_not_owed_for_ever(tmp_path):
    r = Recorder()
    r.evaluate = lambda variables: {"val/loss": float("nan")}
    file = metrics.JsonLines(tmp_path / "metrics.jsonl")
    r.write = file.write
    run(r)
    file.close()
    again = Recorder()
    again.saved = dict(r.saved)
    run(again, first=8, losses=metrics.held_out_losses(tmp_path / "metrics.jsonl"))
    assert len(of(again, "evaluate")) == 0


def test_a_stop_at_the_last_step_is_a_whole_run():
    r = Recorder()
    assert run(r, stop_at=8)[0].code == loop.DONE
    assert len(of(r, "evaluate")) == 2


@pytest.mark.parametrize("bad_from", [2, 5])
def test_too_many_bad_steps_stop_and_keep_the_last_good_checkpoint(bad_from):
    r = Recorder()
    ending, _ = run(r, bad_from=bad_from)
    assert ending.code == loop.ROLL_BACK
    assert ending.why.count("3 steps in a row") == 1
    assert of(r, "save") == ([4] if bad_from > 2 else [])


def fails(error):
    def action(*args):
        raise error

    return action


def test_a_hook_that_fails_costs_no_step_and_the_exit_code_says_so(capsys):
    r = Recorder()
    r.evaluate = fails(OSError("the held-out shard can't be read"))
    assert run(r)[0] == loop.Ending(loop.FAILED, "the held-out shard can't be read")
    assert of(r, "save") == [4, 8]
    assert of(r, "sample") == [8]  # what comes after the hook is done all the same
    said = capsys.readouterr().err
    assert "held-out failed after step 4: the held-out shard can't be read; it is left out" in said
    assert "held-out failed after step 8: the held-out shard can't be read; the next start makes up for it" in said
    r.evaluate = fails(config.ConfigError("a bad held-out shard"))
    assert run(r, first=8)[0].code == loop.REFUSED


@pytest.mark.parametrize("error", [OSError("No space left on device"), config.ConfigError("bad"), ValueError("a bug")])
def test_a_decoration_that_fails_is_a_line(capsys, error):
    class Decoration(At):
        decoration = True

        def close(self, moment, ending):
            raise error

    r = Recorder()
    r.sample = fails(error)
    assert run(r, more_hooks=[Decoration(step, fails(error)) for step in (5, 8)])[0].code == loop.DONE
    said = capsys.readouterr().err
    assert f"samples failed after step 8: {error}; it is left out" in said
    assert f"at failed after step 5: {error}; it is left out" in said
    assert f"at can't be ended: {error}" in said


def test_samples_that_choose_the_best_checkpoint_are_no_decoration():
    for chooses in (True, False):
        assert hooks.Sample(None, loop.Every(0), pathlib.Path(), chooses=chooses).decoration is not chooses


@pytest.mark.parametrize(
    ("error", "code"), [(OSError("No space left on device"), loop.FAILED), (config.ConfigError("bad"), loop.REFUSED)]
)
def test_a_vital_hook_that_fails_ends_the_run_and_the_next_start_owes_it(error, code):
    class Vital(At):
        vital = True

    r, called = Recorder(), []
    ending, step = run(r, more_hooks=[Vital(5, fails(error)), At(5, called.append)])
    assert (ending, step, called) == (loop.Ending(code, str(error)), 5, [])
    assert of(r, "save") == [4, 5]
    ending, _ = run(r, first=5, more_hooks=[Vital(5, lambda moment: called.append("made up for"))])
    assert (ending.code, called) == (loop.DONE, ["made up for"])
    assert phases.Phases.vital


def test_a_bug_in_a_hook_ends_the_run_with_its_state_saved(caplog):
    r = Recorder()
    ending, step = run(r, more_hooks=[At(5, fails(ZeroDivisionError("by zero")))])
    assert (ending.code, step) == (loop.FAILED, 5)
    assert "at at step 5: by zero" in ending.why
    assert of(r, "save") == [4, 5]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (config.RunError("no batch within 10 s"), loop.FAILED),
        (ValueError("a bug"), loop.FAILED),
        (config.ConfigError("a damaged shard"), loop.REFUSED),
    ],
)
def test_a_batch_that_cannot_be_had_ends_the_run_with_its_state_saved(error, code):
    r = Recorder()
    ending, step = run(r, no_batch=(7, error))
    assert (ending.code, step) == (code, 6)
    assert str(error) in ending.why
    assert of(r, "save") == [4, 6]


def test_all_hooks_are_closed_though_one_fails():
    closed = []

    class Bad(At):
        def close(self, moment, ending):
            closed.append("bad")
            raise OSError("disk full")

    class Good(At):
        def close(self, moment, ending):
            closed.append("good")

    with pytest.raises(OSError, match="disk full"):
        run(Recorder(), more_hooks=[Bad(0, None), Good(0, None)])
    assert closed == ["bad", "good"]


def test_a_hook_says_lines_and_leaves_figures(capsys):
    r = Recorder()
    run(r, more_hooks=[At(3, lambda moment: moment.say("half of it")), At(6, lambda moment: {"eval/arc": 0.5})])
    assert of(r, "write").count(6) == 2
    said = capsys.readouterr().err
    assert "half of it" in said
    assert "step 6  at: arc 0.5000" in said


def test_a_watch_sees_what_it_reads_of_every_step_one_step_late():
    r, watch = Recorder(), WhenLoss(9.0, loop.Ending(loop.ROLL_BACK, "a spike", keep=False))
    ending, step = run(r, log_every=100, more_watches=[watch], loss=lambda step: 10.0 if step == 6 else step / 10)
    assert (ending.code, step) == (loop.ROLL_BACK, 7)
    assert watch.seen == [(s, pytest.approx(10.0 if s == 6 else s / 10)) for s in range(1, 7)]
    assert of(r, "save") == [4]  # not the state that the spike spoiled
    assert of(r, "write") == [1, 4]  # reading is not logging


def test_nothing_is_due_before_the_first_step_but_what_asks_for_it():
    whole = config.resolve(config_files.load("base", ["data.path=x", "checkpoint.every_steps=4"]))
    held_out = hooks.HeldOut(lambda variables: {}, loop.Every(4), {})
    save = hooks.Save(Recorder(), whole.checkpoint, 0.0, {})
    assert hooks.owed([save, held_out], 0, 8) == []
    at_start = hooks.HeldOut(lambda variables: {}, loop.Every(4, {0}), {})
    assert hooks.owed([save, at_start], 0, 8) == [at_start]
