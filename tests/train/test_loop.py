"""The loop with a step and batches of its own: stops, milestones and what is made up for after a resume."""

import dataclasses
import types

import jax.numpy as jnp
import pytest

from jaxlm import config, config_files, sharding
from jaxlm.train import loop, metrics


class Recorder:
    """Stands for the checkpointer, the writer and the hooks; remembers what happened."""

    def __init__(self):
        self.events, self.saved, self.checks = [], {}, 0

    def save(self, state, meta, evaluated):
        self.events.append(("save", int(state.step)))
        self.saved[int(state.step)] = (meta, evaluated)

    def check(self):
        self.checks += 1

    def close(self):
        pass

    def write(self, record):
        self.events.append(("write", record["step"]))

    def evaluate(self, params):
        self.events.append(("evaluate", None))
        return {"val/loss": 1.0}

    def sample(self, params, step):
        self.events.append(("sample", step))
        return []


def run(recorder, *, steps=8, first=0, stop_at=None, bad_from=None, interrupted=False, log_every=1, monkeypatch):
    c = config.resolve(config_files.load("base", ["data.path=x", "optim.warmup_steps=0", f"train.steps={steps}"]))
    c = dataclasses.replace(
        c,
        train=dataclasses.replace(c.train, batch_size=8, eval_every_steps=4, max_nonfinite_steps=3),
        checkpoint=dataclasses.replace(c.checkpoint, every_steps=4),
        log=dataclasses.replace(c.log, every_steps=log_every),
    )
    row = 0

    def train_step(state, batch):
        nonlocal row
        step = int(state.step) + 1
        row = row + 1 if bad_from and step >= bad_from else 0
        return types.SimpleNamespace(step=jnp.int32(step), params={}), {
            "loss": jnp.float32(1),
            "skipped_in_a_row": jnp.float32(row),
        }

    class Batches:
        def __next__(self):
            return {}

    monkeypatch.setattr(loop.StopSignal, "requested", lambda self, step: step == stop_at)
    meter = metrics.Meter(tokens_per_step=1, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0)
    hooks = loop.Hooks(recorder.evaluate, recorder.sample, {"note": 1}, interrupted)
    mesh = sharding.make_mesh(config.MeshConfig(8, 1, 1, 1))
    state = types.SimpleNamespace(step=jnp.int32(first), params={})
    return loop.run(c, mesh, state, train_step, Batches(), recorder, meter, recorder, hooks)


def of(recorder, kind):
    return [step for name, step in recorder.events if name == kind]


def test_a_whole_run_evaluates_samples_and_saves(monkeypatch):
    r = Recorder()
    assert run(r, monkeypatch=monkeypatch) == loop.DONE
    assert of(r, "save") == [4, 8]
    assert len(of(r, "evaluate")) == 2
    assert of(r, "sample") == [8]
    assert r.checks == 8  # a save that failed is known at the next step
    assert r.saved[8] == ({"note": 1, "interrupted": False}, {"val/loss": 1.0})


def test_a_start_shows_its_first_step_and_the_run_its_last(monkeypatch):
    r = Recorder()
    run(r, first=2, log_every=5, monkeypatch=monkeypatch)
    assert [step for step in of(r, "write") if step not in (4,)] == [3, 5, 8, 8]  # 4 and one 8 are evaluations


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_a_stop_saves_at_its_step_and_loses_no_evaluation(monkeypatch, stop_at):
    r = Recorder()
    assert run(r, stop_at=stop_at, monkeypatch=monkeypatch) == loop.PREEMPTED
    assert max(r.saved) == stop_at
    due = r.saved[stop_at][0]["interrupted"]
    evaluations = len(of(r, "evaluate"))
    assert evaluations + due == (stop_at >= 4)
    again = Recorder()
    assert run(again, first=stop_at, interrupted=due, monkeypatch=monkeypatch) == loop.DONE
    assert evaluations + len(of(again, "evaluate")) == 2


def test_a_stop_at_the_last_step_is_a_whole_run(monkeypatch):
    r = Recorder()
    assert run(r, stop_at=8, monkeypatch=monkeypatch) == loop.DONE
    assert len(of(r, "evaluate")) == 2


@pytest.mark.parametrize("bad_from", [2, 5, 6])
def test_too_many_bad_steps_stop_and_keep_the_last_good_checkpoint(monkeypatch, bad_from, capsys):
    r = Recorder()
    assert run(r, bad_from=bad_from, monkeypatch=monkeypatch) == loop.STOPPED
    assert all(step < bad_from + 3 for step in of(r, "save"))
    assert capsys.readouterr().err.count("3 steps in a row") == 1
