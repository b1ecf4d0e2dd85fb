"""A run in a process of its own: what came of it, and what it said. The process itself: tests/commands/test_ladder.py."""

import json
import math
import os
import pathlib
import signal
import threading
import time

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.run import metrics
from jaxlm.run.survive import supervisor, train_in_child

MIXTURE = {"web": 3.0, "code": 1.0}


def resolve(folder: pathlib.Path, *overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", [f"workdir={folder}", *overrides]))


def write(folder: pathlib.Path, *records: dict) -> None:
    lines = metrics.JsonLines(folder / "metrics.jsonl")
    for record in records:
        lines.write(record)
    lines.close()


def last(step: int = 460, loss: float = 4.5) -> dict:
    found = {"step": step, "val/loss": loss, "wall_s": 360.0}
    for source, nats, length in (("web", 4.0, 3.0), ("code", 6.0, 2.0)):
        found |= {f"val/{source}/loss": nats, f"val/{source}/bits_per_byte": nats / math.log(2) / length}
    return found


def test_a_run_that_is_done_has_its_loss_its_bytes_and_its_hours(tmp_path):
    c = resolve(tmp_path)
    assert train_in_child.result(c, MIXTURE) is None
    write(tmp_path, {"step": 230, "val/loss": 5.0, "wall_s": 180.0})
    assert train_in_child.result(c, MIXTURE) is None  # half of its steps
    write(tmp_path, last())
    found = train_in_child.result(c, MIXTURE)
    assert (found.loss, found.hours) == (4.5, 0.1)
    assert found.bytes_per_token == pytest.approx((3 * 3.0 + 1 * 2.0) / 4)
    assert found.bits_per_byte.keys() == MIXTURE.keys()


def test_a_loss_that_is_not_finite_is_none(tmp_path):
    write(tmp_path, last(loss=math.nan))
    assert train_in_child.result(resolve(tmp_path), MIXTURE).loss is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=1e-3", "optim.lr=0.01 where now it is 0.001"),
        ("model.qk_norm=False", "model.qk_norm=True where now it is False"),
        ("loss.z_loss=1e-4", "loss.z_loss=0.0 where now it is 0.0001"),
        ("train.steps=600", "train.steps=460 where now it is 600"),
        ("seed=3", "seed=0 where now it is 3"),
    ],
)
def test_the_folder_of_another_run_is_refused(tmp_path, override, said):
    (tmp_path / "config.json").write_text(config.to_json(resolve(tmp_path)))
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE)
    other = resolve(tmp_path, override)
    for ask in (train_in_child.supervised, lambda c: train_in_child.result(c, MIXTURE)):
        with pytest.raises(ConfigError, match=rf"holds another run, with {said}: delete it"):
            ask(other)


def test_what_changes_no_loss_or_is_left_to_the_rule_that_the_run_followed_is_no_other_run(tmp_path):
    (tmp_path / "config.json").write_text(config.to_json(resolve(tmp_path)))
    write(tmp_path, last())
    for keys in (["optim.offload=True", "model.remat=full", "log.every_steps=7"], ["optim.b2=0", "optim.lr=0"]):
        assert train_in_child.result(resolve(tmp_path, *keys), MIXTURE)


def test_a_run_from_before_a_key_existed_has_its_default(tmp_path):
    saved = json.loads(config.to_json(resolve(tmp_path)))
    del saved["optim"]["rates"], saved["model"]["qkv_bias"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE)
    with pytest.raises(ConfigError, match=r"with optim\.lr=0\.01"):
        train_in_child.result(resolve(tmp_path, "optim.lr=9"), MIXTURE)


def test_the_last_words_are_the_last_line(tmp_path):
    assert train_in_child.last_words(tmp_path) == ""
    (tmp_path / train_in_child.OUTPUT).write_text("x" * 5000 + "\nbefore\njaxlm: out of memory\n\n")
    assert train_in_child.last_words(tmp_path) == "jaxlm: out of memory"


@pytest.mark.parametrize("text", ["", '{"train"', "[]"])
def test_a_config_that_was_never_written_down_is_no_other_run(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE).loss == 4.5


class Runs:
    """Runs that train in no time, or wait until `together` of them train: their cores, and what `after` got."""

    def __init__(self, names: str, together: int = 1, codes: dict[str, int] | None = None):
        self.entries = [{"name": name, "loss": None, "why": "", "hours": 0.0, "planned_hours": 1.0} for name in names]
        self.meet, self.codes, self.cores = threading.Barrier(together, timeout=30), codes or {}, {}
        self.begun, self.ended = [], []

    def config_of(self, run):
        self.begun.append(run["name"])
        return resolve(pathlib.Path(self.folder, run["name"]))

    def after(self, run, config, why):
        self.ended.append(run["name"])
        run["loss"] = None if run["name"] in self.codes else 3.0

    def train(self, folder, monkeypatch, **more) -> int:
        def run(own) -> int:
            name = pathlib.Path(own.config.workdir).name
            self.cores[name] = os.sched_getaffinity(0)
            self.meet.wait()
            time.sleep(0.3 * (name not in self.codes and bool(self.codes)))  # what fails ends first
            return self.codes.get(name, 0)

        self.folder = folder
        monkeypatch.setattr(supervisor.Supervisor, "run", run)
        return train_in_child.train_all(self.entries, self.config_of, self.after, **more)


def test_runs_train_at_a_time_each_on_its_cores_and_the_rest_follows(tmp_path, monkeypatch):
    here = sorted(os.sched_getaffinity(0))
    parts = [here[:1], here[-1:]]
    runs = Runs("abcd", together=2)
    assert runs.train(tmp_path, monkeypatch, cores=parts) == 0
    assert runs.begun == [*"abcd"]
    assert sorted(runs.ended) == [*"abcd"]
    assert {frozenset(cores) for cores in runs.cores.values()} == set(map(frozenset, parts))
    assert os.sched_getaffinity(0) == set(here)  # this thread's own
    alone = Runs("ab")
    assert alone.train(tmp_path, monkeypatch) == 0
    assert alone.cores["a"] == set(here)


@pytest.mark.parametrize(("code", "ended"), [(4, ["b"]), (1, ["a", "b"])])
def test_after_a_run_that_is_interrupted_or_fails_no_other_begins_and_those_that_train_are_taken(
    tmp_path, monkeypatch, code, ended
):
    runs = Runs("abcd", together=2, codes={"a": code})
    assert runs.train(tmp_path, monkeypatch, cores=[os.sched_getaffinity(0)] * 2) == code
    assert (runs.begun, sorted(runs.ended)) == ([*"ab"], ended)
    assert [run["loss"] for run in runs.entries] == [None, 3.0, None, None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("together", [1, 2])
def test_after_a_signal_that_came_as_a_run_ended_no_other_begins(tmp_path, monkeypatch, capsys, number, together):
    runs = Runs("abcd")

    def end() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(runs.meet, "wait", end)
    code = runs.train(tmp_path, monkeypatch, cores=[os.sched_getaffinity(0)] * together)
    if number == signal.SIGUSR1:  # asks for the stacks
        assert (code, runs.ended) == (0, [*"abcd"])
    else:
        assert code == 4
        assert 1 <= len(runs.ended) <= together
        assert "interrupted between two runs; the same command resumes" in capsys.readouterr().err


def test_a_run_that_is_not_begun_ends_it_once_the_others_are_done(tmp_path, monkeypatch, capsys):
    runs = Runs("abc", together=2)
    refused = lambda run: "too dear" * (run["name"] == "c")  # noqa: E731
    assert runs.train(tmp_path, monkeypatch, refused=refused, cores=[os.sched_getaffinity(0)] * 2) == 3
    assert sorted(runs.ended) == [*"ab"]
    assert "run 3 of 3, c: not begun: too dear" in capsys.readouterr().err


def test_a_run_that_is_stopped_for_a_reason_is_no_interruption(tmp_path, monkeypatch, capsys):
    runs, asked = Runs("ab"), threading.Event()
    monkeypatch.setattr(supervisor.Supervisor, "on_signal", lambda self, number: asked.set())
    monkeypatch.setattr(train_in_child, "_LOOK_S", 0.01)

    def train(own) -> int:
        return 4 if pathlib.Path(own.config.workdir).name == "a" and asked.wait(30) else 0

    runs.folder = tmp_path
    runs.codes = {"a": 4}
    monkeypatch.setattr(supervisor.Supervisor, "run", train)
    stopped = lambda run, config: "pruned at step 5" * (run["name"] == "a")  # noqa: E731
    assert train_in_child.train_all(runs.entries, runs.config_of, runs.after, stopped=stopped) == 0
    assert (runs.begun, runs.ended) == ([*"ab"], [*"ab"])
    assert [run["why"] for run in runs.entries] == ["pruned at step 5", ""]
    assert "run 1 of 2, a: pruned at step 5" in capsys.readouterr().err
