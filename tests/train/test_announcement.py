"""What a start says, and how long the run takes once a few steps are known."""

import dataclasses
import types

import pytest

from jaxlm import config, models
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan.lower import Room
from jaxlm.plan.tune import machines
from jaxlm.plan.tune.tune import Program
from jaxlm.run import clock
from jaxlm.train import announcement


@pytest.fixture
def mesh():
    return sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))


def quickstart(*keys):
    c = config.resolve(config_files.load("quickstart", ["workdir=w", *keys]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))


def said(c, mesh, program=None, done=0, tokens=None, passes=None):
    made = types.SimpleNamespace(config=c, mesh=mesh, frozen={})
    passes = {"text": 2.048} if passes is None else passes
    return announcement.lines(made, tokens or {"text": 500_000}, passes, program, done)


def test_five_lines(mesh):
    c = quickstart("train.steps=1000", "train.batch_size=8", "train.seq_len=128", "train.microbatch_size=2")
    program = Program(None, int(4.9e9), int(0.41e9), int(4.49e9), Room(21.4e9, "free for each device"))
    assert said(c, mesh, program, done=7) == [
        "model: llama, 2,820,608 parameters, 3 layers of d 256; 8 x cpu (fsdp 8)",
        "data: text 500k tokens, read 2 times",
        "memory: a step needs 4.9 GB a device (410 MB for state and batch, 4.49 GB for temporaries); there are 21.4 GB free "
        "for each device",
        "chosen: attention blocked, float32, remat none, microbatch 2 of 8",
        "length: resuming at step 7, to step 1,000, 1.02M tokens, 1,024 a step",
    ]


def test_sources_by_what_is_read_of_them_and_a_warning(mesh):
    tokens = {"a": 100, "b": 1000, **{f"s{i}": 10 for i in range(6)}}
    passes = {"a": 27.3, "b": 0.412, **{f"s{i}": 1.0 for i in range(6)}}
    lines = said(quickstart(), mesh, tokens=tokens, passes=passes)
    assert lines[1].startswith(
        "data: a 100 tokens, read 27 times; b 1k tokens, read 0.41 times; s0 10 tokens, read once"
    )
    assert lines[1].endswith("; 2 more sources")
    assert lines[-1].startswith("a is read 27 times: beyond about 4 times")
    assert len(said(quickstart(), mesh, passes={"text": 4.0})) == len(lines) - 1
    assert said(quickstart(), mesh, passes={})[1] == "data: 500k tokens"


def test_a_speed_that_was_measured_here_before(mesh, monkeypatch):
    known = {"tokens_per_second": 1024.0}
    monkeypatch.setattr(machines, "known", lambda *key: known)
    c = quickstart("train.steps=1000", "hardware.usd_per_hour=3.6")
    assert said(c, mesh, done=640)[-1].endswith("; about 6m00s, $0.36 at 1.02k tokens/s, as measured here before")


def test_the_table_of_parameters():
    model = quickstart("model.n_layers=3").model
    shown = announcement.table({"params": models.abstract_params(models.build(model, model.attention))})
    assert "layers/attn" in shown
    assert "layers_0" not in shown


class Time:
    """A clock whose seconds are set by hand."""

    def __init__(self, **spent: float):
        self.spent = dict.fromkeys(clock.ACTIVITIES, 0.0) | spent

    def seconds(self) -> dict[str, float]:
        return dict(self.spent)

    def usual_s(self, detail: str) -> float:
        return {"often": 7.0}.get(detail, 0.0)


def rate(time, price=0.0, first=1, steps=1000, each=3.0, most=20):
    lines = []
    watch = announcement.FirstRate(time, (), steps, lambda: (100.0, 0.5), price, lines.append)
    for step in range(first, min(first + most, steps + 1)):
        assert watch(step, {}) is None
        time.spent["step"] += each
    return lines


def test_the_first_rate_is_said_once():
    """The first step does not count; at the third 6 s are known: 997 steps of 3 s are left."""
    assert rate(Time(step=60.0)) == ["3 s a step: 49m51s to step 1,000, without evaluations and saves"]
    assert rate(Time(), price=3.6) == [
        "3 s a step: 49m51s to step 1,000, $3.49 for the whole run, without evaluations and saves"
    ]


def test_evaluations_and_saves_count_as_they_did():
    """Over 100 steps 200 s went into them: 2 s more for each of the 897 steps that are left."""
    assert rate(Time(evaluate=150.0, save=50.0), first=101) == ["3 s a step: 1h14m to step 1,000"]


def test_a_run_that_is_over_at_once_says_no_rate():
    assert rate(Time(), steps=30, each=0.01) == []
    assert rate(Time(), steps=3) == []
