"""`jaxlm ladder` from the command line to ladder.json: with runs that are only written down, then with real ones."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.config import Config
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import ladder
from jaxlm.plan.rules import Law
from jaxlm.run import metrics
from jaxlm.run.survive import supervisor, train_in_child

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRUE = Law("known", 1.2, 20.0, 60.0, 0.35, 0.3)
TINY = keys("""
    model.n_layers=2 model.d_model=64 model.n_heads=4 model.d_ff=128 train.steps=40 train.batch_size=8
    train.seq_len=32 optim.warmup_steps=4 eval.batch_size=8 eval.max_mb=0.002 plan.measure=never
""")
TOKENS = "--tokens=1k,2k,4k"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("ladder") / "data"
    tiny_data.make(folder, {"web": 2.0, "code": 1.0}, documents=200)
    return folder


def argv(data: pathlib.Path, folder: pathlib.Path, *more: str, **changed) -> list[str]:
    given = TINY | {"data.dir": data, "workdir": folder} | {key.replace("__", "."): v for key, v in changed.items()}
    return ["ladder", "base", *more, *(f"--config.{key}={value}" for key, value in given.items())]


class Trainer:
    """Writes down what a run of TRUE would have been measured to be. `codes`: name -> how it ends instead."""

    def __init__(self):
        self.names, self.codes = [], {}

    def __call__(self, config: Config) -> int:
        folder = pathlib.Path(config.workdir)
        self.names.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / train_in_child.OUTPUT).write_text("3 steps in a row are not finite\n")
        if code := self.codes.get(folder.name):
            return code
        t = config.train
        loss = TRUE.loss(count_params(config.model), t.steps * t.batch_size * t.seq_len)
        record = {"step": t.steps, "val/loss": loss, "wall_s": 36.0}
        for source in ("web", "code"):
            record |= {f"val/{source}/loss": loss, f"val/{source}/bits_per_byte": loss / 2.0}
        lines = metrics.JsonLines(folder / "metrics.jsonl")
        lines.write(record)
        lines.close()
        return 0


@pytest.fixture
def trained(monkeypatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: trainer(self.config))
    return trainer


def test_all_runs_are_done_once_and_what_they_foretell_is_printed_and_kept(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path, TOKENS)) == 0
    out, err = capsys.readouterr()
    assert len(trained.names) == len(set(trained.names)) == 11
    assert trained.names[:3] == ["d16-1k-rate0.5", "d16-1k", "d16-1k-rate2"]
    assert "FORETOLD base" in out
    assert "11 runs, for an unknown time, foretell base: " in err
    assert "run 11 of 11, d32-4k: came to " in err
    found = ladder.read(tmp_path / "ladder")
    row = found["foretold"][2]
    assert row["low"] < TRUE.loss(row["parameters"], row["tokens"]) < row["high"]
    assert found["hours"]["spent"] == pytest.approx(11 * 0.01)
    assert found["held_out"]["mixture"] == {"web": 2.0, "code": 1.0}
    # Again: nothing is left to do, and the same is printed, as JSON too.
    assert cli.main(argv(data, tmp_path, "--json")) == 0
    assert len(trained.names) == 11
    assert json.loads(capsys.readouterr().out) == found


def test_the_plan_alone_does_nothing(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path / "run", TOKENS, "--plan")) == 0
    assert "d32-4k" in capsys.readouterr().out
    assert not trained.names
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_is_4_and_the_same_command_goes_on_with_it(data, tmp_path, trained, capsys):
    trained.codes["d16-2k"] = 4
    assert cli.main(argv(data, tmp_path, TOKENS)) == 4
    assert "d16-2k: interrupted; the same command resumes" in capsys.readouterr().err
    trained.codes.clear()
    begun = len(trained.names)
    assert cli.main(argv(data, tmp_path)) == 0
    assert trained.names[begun] == "d16-2k"
    assert len(set(trained.names)) == len(trained.names) - 1 == 11


def test_a_rate_that_diverges_is_told_and_a_run_of_the_grid_that_does_is_the_end(data, tmp_path, trained, capsys):
    trained.codes |= {"d16-1k-rate2": 3, "d24-1k": 3}
    assert cli.main(argv(data, tmp_path, TOKENS)) == 3
    err = capsys.readouterr().err
    assert "d16-1k-rate2: 3 steps in a row are not finite, <1 min" in err
    assert "d24-1k: ended with code 3: 3 steps in a row are not finite" in err
    del trained.codes["d24-1k"]
    assert cli.main(argv(data, tmp_path, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["tried"][-1]["loss"] is None
    assert trained.names.count("d16-1k-rate2") == 1
    assert found["foretold"]


@pytest.mark.parametrize(
    ("more", "keys", "words"),
    [
        (["--tokens=1k,2k"], {}, "--tokens=1k,2k: give at least 3 different numbers"),
        (["--tokens=10,20,30"], {}, "--tokens: 10 are less than 5 steps; give "),
        (["--tokens=1k,2k,lots"], {}, "'lots' is no number such as 500k, 1.5M or 2B"),
        (["--sizes=16,24,33"], {}, "33 is no multiple of 8"),
        (["--hours=0"], {}, "--hours=0 must be above 0"),
        ([], {}, "how fast this machine trains d_model=16 is not known (plan.measure=never): give --tokens=N,N,N"),
        (["--tokens=100k,200k,1M"], {}, "times through the data in"),
        ([TOKENS], {"model__d_model": 8, "model__n_heads": 1}, "too narrow for a ladder: name three by --sizes"),
        ([TOKENS], {"program": "sft"}, "a ladder is of pretraining; this config is of sft"),
        ([TOKENS], {"data__dir": "nowhere"}, "no data in nowhere: make it with jaxlm prepare"),
        ([TOKENS], {"model__vocab_size": 123}, "has 300 tokens: set --config.model.vocab_size=300"),
    ],
)
def test_bad_input_is_one_line(data, tmp_path, trained, capsys, more, keys, words):
    assert cli.main(argv(data, tmp_path, *more, **keys)) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("jaxlm: ")]
    assert words in line
    assert (out, trained.names) == ("", [])


def test_an_unknown_config_is_one_line(capsys):
    assert cli.main(["ladder", "quikstart"]) == 2
    assert "did you mean 'quickstart'?" in capsys.readouterr().err


@pytest.mark.recipe
def test_a_ladder_that_is_killed_in_the_middle_goes_on(data, tmp_path):
    """Real runs, each a process: after SIGKILL what is done stays as it is, the rest is done, and no process is left."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxlm.cli.cli", *argv(data, tmp_path, TOKENS, "--json")]
    folder = tmp_path / "ladder"
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: (found := ladder.read(folder)) and sum(bool(one["loss"]) for one in found["runs"]) >= 2, first)
        until(lambda: len(list((folder / "runs").glob("*/run.json"))) >= 3, first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    done = {path: path.read_bytes() for path in sorted((folder / "runs").glob("*/metrics.jsonl"))}
    kept = [folder / "runs" / one["name"] for one in ladder.read(folder)["runs"] if one["loss"]]
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)
    assert all(one["loss"] > 0 for one in found["runs"])
    assert found["foretold"][2]["low"] <= found["foretold"][2]["loss"] <= found["foretold"][2]["high"]
    for run in kept:
        assert (run / "metrics.jsonl").read_bytes() == done[run / "metrics.jsonl"]
        saved = json.loads((run / "run.json").read_text())
        assert len(saved["starts"]) == 1
    grid = [one for one in found["runs"] if one["kind"] == "grid"]
    largest = max(grid, key=lambda one: (one["parameters"], one["tokens"]))
    losses = metrics.held_out_losses(folder / "runs" / largest["name"] / "metrics.jsonl")
    assert largest["loss"] == losses[largest["steps"]]


def until(condition, process: subprocess.Popen, seconds: float = 500) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.1)
