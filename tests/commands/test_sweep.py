"""`jaxlm sweep` from the command line to its table and page: with runs that are only written down, then with real ones."""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import same_bits
import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.commands import sweep as command
from jaxlm.config import Config, ConfigError, config_files, resolve, to_json
from jaxlm.host import files
from jaxlm.plan import lower
from jaxlm.plan.sweep import sweep
from jaxlm.run import metrics
from jaxlm.run.survive import supervisor, train_in_child

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = keys("""
    model.n_layers=1 model.d_model=32 model.n_heads=4 model.d_ff=64 train.steps=20 train.batch_size=8
    train.seq_len=32 optim.warmup_steps=4 eval.batch_size=8 eval.max_mb=0.002 plan.measure=never
""")
SWEPT = ("--config.optim.lr=1e-3,2e-3", "--config.model.qk_norm=False,True")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("sweep") / "data"
    tiny_data.make(folder, {"web": 2.0, "code": 1.0}, documents=200)
    return folder


def argv(data: pathlib.Path, folder: pathlib.Path, *more: str) -> list[str]:
    given = TINY | {"data.dir": data, "workdir": folder}
    return ["sweep", "base", *(f"--config.{key}={value}" for key, value in given.items()), *more]


class Trainer:
    """Writes down the loss of a run: 3, less .5 at the higher rate, and what its name and its seed add."""

    def __init__(self):
        self.configs, self.codes = [], {}

    def __call__(self, config: Config) -> int:
        folder = pathlib.Path(config.workdir)
        self.configs.append(config)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / train_in_child.OUTPUT).write_text("3 steps in a row are not finite\n")
        if code := self.codes.get(folder.name):
            return code
        (folder / "config.json").write_text(to_json(config))
        noise = 0.001 * (len(self.configs) * 7 % 5) + 0.2 * config.seed
        loss = 3.0 - 0.5 * (config.optim.lr > 1.5e-3) + noise
        lines = metrics.JsonLines(folder / "metrics.jsonl")
        lines.write({"step": config.train.steps, "val/loss": loss, "val/web/loss": loss, "wall_s": 360.0})
        lines.close()
        return 0

    @property
    def names(self) -> list[str]:
        return [pathlib.Path(config.workdir).name for config in self.configs]


@pytest.fixture
def trained(monkeypatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: trainer(self.config))
    return trainer


def test_all_combinations_are_trained_on_each_seed_and_the_keys_are_judged(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=2")) == 0
    out, err = capsys.readouterr()
    assert len(set(trained.names)) == len(trained.names) == 8
    assert trained.names[:2] == ["lr_0.001-qk_norm_False-seed_0", "lr_0.001-qk_norm_True-seed_0"]
    assert {config.seed for config in trained.configs} == {0, 1}
    assert {(config.data.seed, config.data.dir) for config in trained.configs} == {(-1, str(data))}
    assert "8 runs of 4 arms, 0 done; the others take an unknown time" in err
    assert "times a run's scatter; half of it takes" in err
    rate, norm = [line for line in out.splitlines() if " -> " in line]
    assert "  better  " in rate
    assert norm.startswith("model.qk_norm False -> True")
    assert "  can't be told apart  " in norm
    folder = tmp_path / "sweeps" / "optim.lr-model.qk_norm"
    page = (folder / "report.html").read_text()
    assert "What can be told apart" in page
    assert "can&#x27;t be told apart" in page or "can't be told apart" in page
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=3", "--json")) == 0  # more seeds: only these are trained
    assert json.loads(capsys.readouterr().out) == sweep.read(folder)
    assert len(trained.names) == 12
    assert cli.main(argv(data, tmp_path, *SWEPT, "--plan")) == 0  # of three seeds, if none is given
    assert capsys.readouterr().out.startswith("12 runs of 4 arms, 12 done\n")


def test_one_at_a_time_compares_with_the_configs_own(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path, "--config.optim.lr=2e-3;4e-3", SWEPT[1], "--one-at-a-time", "--seeds=1")) == 0
    own = [name for name in trained.names if name.endswith("seed_0")]
    assert own == [f"lr_{lr}-qk_norm_{norm}-seed_0" for lr, norm in (("0.001", False), ("0.002", False))] + [
        "lr_0.004-qk_norm_False-seed_0",
        "lr_0.001-qk_norm_True-seed_0",
    ]
    assert "optim.lr 0.001 -> 0.004" in capsys.readouterr().out


def test_the_plan_alone_does_nothing(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path / "run", *SWEPT, "--plan")) == 0
    assert "half of it takes" in capsys.readouterr().out
    assert not trained.names
    assert not (tmp_path / "run").exists()


def test_an_interrupted_sweep_goes_on_and_a_diverged_arm_is_left_out(data, tmp_path, trained, capsys):
    trained.codes |= {"lr_0.002-qk_norm_False-seed_0": 4}
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1")) == 4
    assert "interrupted; the same command resumes" in capsys.readouterr().err
    trained.codes = {"lr_0.002-qk_norm_False-seed_0": 3}
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1")) == 0
    out, err = capsys.readouterr()
    assert "lr_0.002-qk_norm_False-seed_0: 3 steps in a row are not finite, <1 min" in err
    assert "left out: optim.lr=0.002 model.qk_norm=False" in out
    trained.codes = {"lr_0.001-qk_norm_False-seed_1": 1}
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=2")) == 1
    assert "ended with code 1: 3 steps in a row are not finite" in capsys.readouterr().err


def test_a_run_that_would_pass_the_limit_is_not_begun(data, tmp_path, trained, capsys):
    limits = ("--usd=1", "--config.hardware.usd_per_hour=2")  # half an hour: five runs of six minutes
    assert cli.main(argv(data, tmp_path, SWEPT[0], *limits)) == 3
    assert "run 6 of 6" in (err := capsys.readouterr().err)
    assert "not begun: it takes about 6 min, and 30 min of 30 min are spent; a higher --usd goes on" in err
    assert len(trained.names) == 5
    lines = metrics.JsonLines(tmp_path / "sweeps" / "optim.lr" / "runs" / "lr_0.002-seed_2" / "metrics.jsonl")
    lines.write({"step": 5, "train/loss": 3.0, "wall_s": 180.0})  # half of the sixth was done before: it counts
    lines.close()
    assert cli.main(argv(data, tmp_path, SWEPT[0], "--usd=1.1", limits[1])) == 3
    assert "not begun: it takes about 3 min, and 33 min of 33 min are spent" in capsys.readouterr().err
    assert cli.main(argv(data, tmp_path, SWEPT[0], "--hours=2")) == 0
    assert len(trained.names) == 6


def test_more_runs_than_money_are_refused(data, tmp_path, trained, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "row", lambda config: {"kind": "NVIDIA H200", "hours": 1.0})
    assert cli.main(argv(data, tmp_path, *SWEPT, "--usd=20", "--config.hardware.usd_per_hour=2")) == 2
    assert "these runs take about 12 h ($24.00), and --usd allows 10 h" in capsys.readouterr().err
    assert not trained.names


def test_a_finished_run_tells_the_hours_of_its_arm_alone(data, tmp_path, trained, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "row", lambda config: {"hours": 0.2 if config.optim.lr > 1.5e-3 else 0.05})
    assert cli.main(argv(data, tmp_path, SWEPT[0], "--seeds=1", "--hours=.28")) == 3
    assert "run 2 of 2, lr_0.002-seed_0: not begun: it takes about 12 min, and 6 min of" in capsys.readouterr().err


def test_runs_that_train_at_a_time_share_the_machines_hours_and_its_price(data, tmp_path, trained, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "row", lambda config: {"kind": "cpu", "needed": 1e6, "hours": 0.05})
    monkeypatch.setattr(files, "cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)
    monkeypatch.setattr(lower, "available_bytes", lambda: 5e9)
    limits = ("--hours=.4", "--config.hardware.usd_per_hour=2")  # six runs of 6 minutes, two at a time: 18 minutes
    assert cli.main(argv(data, tmp_path, SWEPT[0], *limits)) == 0
    words = (
        "6 runs of 2 arms, 0 done; 2 at a time, on 1 of the machine's cores each; the others take about 18 min, $0.60"
    )
    assert words in capsys.readouterr().err
    assert {config.hardware.usd_per_hour for config in trained.configs} == {1.0}
    assert sweep.read(tmp_path / "sweeps" / "optim.lr")["threads"] == 1
    more = (*limits, "--seeds=4", "--hours=.36")
    assert cli.main(argv(data, tmp_path, SWEPT[0], *more)) == 3
    assert "not begun: it takes about 6 min, and 18 min of 22 min are spent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            [*SWEPT, "--config.optim.lr=4e-3,8e-3"],
            "config.optim.lr=4e-3,8e-3: this key has several values already: give",
        ),
        (["--config.optim.lrr=1,2"], "unknown key config.optim.lrr; did you mean config.optim.lr?"),
        (["--config.optim.lr=1e-3,fast"], "config.optim.lr=fast: expected float"),
        (["--config.model.n_heads=4,5"], "not divisible by model.n_heads=5"),
        (["--config.model.vocab_size=300,400"], "has 300 tokens: set --config.model.vocab_size=300"),
        (["--config.optim.lr=1e-3"], "nothing to compare: give a key several values"),
        (["--config.optim.lr=1e-3,0.001"], "nothing to compare: give a key several values"),
        (
            ["--config.optim.lr=1e-3,2e-3", "--metric=val/loss:best"],
            "--metric=val/loss:best: after the name comes :highest",
        ),
        (["--config.dpo.beta=.1,.2"], "config.dpo.beta changes val/loss itself: --metric=val/accuracy:highest"),
        ([*SWEPT, "--usd=3"], "--usd=3 needs the machine's price: --config.hardware.usd_per_hour=USD"),
        ([*SWEPT, "--hours=0"], "--hours=0 must be above 0"),
        ([*SWEPT, "--seeds=0"], "--seeds=0 must be above 0"),
        ([*SWEPT, "--seed=2"], "unknown argument '--seed=2'"),
        (["--config.optim.lr=1e-3..1e-2"], "config.optim.lr has a range of values: give --search=RUNS, or values with"),
        (["--config.optim.lr=1e-3..1e-2", "--search=0"], "--search=0 must be above 0"),
        (
            [*SWEPT, "--search=5"],
            "--search=5: the values have only 4 combinations: give fewer runs, or leave --search out",
        ),
        (["--config.optim.lr=1e-3,.001,2e-3", "--search=3"], "the values have only 2 combinations"),
        (["--search=5"], "or with --search=5 a range: --config.optim.lr=1e-4..1e-2"),
        ([*SWEPT, "--search=3", "--seeds=2"], "--search chooses what goes together, on one seed: leave --seeds and"),
        ([*SWEPT, "--search=3", "--one-at-a-time"], "leave --seeds and --one-at-a-time out"),
        (["--config.optim.weight_decay=-1..1", "--search=5"], "config.optim.weight_decay=-1.0"),
        (["--config.optim.lrr=1..2", "--search=5"], "unknown key config.optim.lrr"),
        (["--config.model.n_heads=4,8", "--config.model.d_model=32,40", "--search=5"], "model.head_dim=5 must be even"),
    ],
)
def test_bad_input_is_one_line(data, tmp_path, trained, capsys, more, words):
    assert cli.main(argv(data, tmp_path, *more)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxlm: ")]
    assert words in line
    assert not trained.names


@pytest.mark.parametrize(("program", "metric"), [("grpo", "val/reward"), ("ppo", "val/reward"), ("sft", "val/loss")])
def test_rewards_are_compared_by_the_held_out_reward(program, metric):
    given = argparse.Namespace(metric=None, highest=False, arms=[], search=None)
    own = resolve(config_files.load("base", ["workdir=x", "data.path=x"]))
    with pytest.raises(ConfigError, match="nothing to compare"):
        command.run(dataclasses.replace(own, program=program), given)
    assert (given.metric, given.highest) == (metric, metric == "val/reward")


def test_another_config_or_a_metric_that_is_not_measured_is_one_line(data, tmp_path, trained, capsys):
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1", "--metric=val/accuracy")) == 2
    assert "is done and has no val/accuracy: give another --metric" in capsys.readouterr().err
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1")) == 2
    assert (
        "holds a sweep with metric val/accuracy, and now it is one with metric val/loss: set it back"
        in capsys.readouterr().err
    )
    where = f"--out={tmp_path / 'other'}"
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1", where)) == 0
    assert cli.main(argv(data, tmp_path, *SWEPT, "--seeds=1", where, "--config.optim.weight_decay=0.3")) == 2
    assert "holds another run, with optim.weight_decay=" in capsys.readouterr().err


def test_a_search_chooses_the_values_prunes_and_goes_on(data, tmp_path, trained, monkeypatch, capsys):
    pytest.importorskip("optuna")
    more = ("--config.optim.lr=1e-4..1e-2", "--config.model.qk_norm=False,True")
    trained.codes["trial_4"] = 4
    assert cli.main(argv(data, tmp_path, *more, "--search=6")) == 4
    assert "6 runs, 0 done; the others take an unknown time" in capsys.readouterr().err
    folder = tmp_path / "sweeps" / "optim.lr-model.qk_norm"
    fourth = sweep.read(folder)["arms"][3]
    trained.codes = {"trial_5": 3}
    assert cli.main(argv(data, tmp_path, *more, "--search=6")) == 0
    out = capsys.readouterr().out
    found = sweep.read(folder)
    assert found["arms"][3] == fourth
    assert trained.names[-3:] == ["trial_4", "trial_5", "trial_6"]
    assert {config.seed for config in trained.configs} == {0}
    assert [f"{config.optim.lr:.4g}" for config in trained.configs][-1] == found["arms"][5]["optim.lr"]
    best = min((run for run in found["runs"] if run["loss"]), key=lambda run: run["loss"])
    assert out.splitlines()[1].startswith(f"optim.lr={found['arms'][best['arm']]['optim.lr']} model.qk_norm=")
    assert f"left out: optim.lr={found['arms'][4]['optim.lr']} " in out
    assert "trial_5: 3 steps in a row are not finite" in out
    assert "the best of a search is so in part by luck" in out
    assert "in part by luck" in (folder / "report.html").read_text()
    assert cli.main(argv(data, tmp_path, *more, "--search=7", "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 7
    assert cli.main(argv(data, tmp_path, "--config.optim.lr=1e-4..1e-3", more[1], "--search=6")) == 2
    was = "holds a sweep with --search of optim.lr=0.0001..0.01 model.qk_norm=False,True, and now it is one "
    assert f"{was}with --search of optim.lr=0.0001..0.001 model.qk_norm=False,True: set" in capsys.readouterr().err
    assert cli.main(argv(data, tmp_path, *SWEPT)) == 2
    assert f"{was}without --search: set it back, or give another --out" in capsys.readouterr().err


def test_the_pruner_is_asked_once_after_each_evaluation_but_the_last(tmp_path, monkeypatch):
    search = pytest.importorskip("jaxlm.plan.sweep.search", exc_type=ImportError)
    asked = []
    monkeypatch.setattr(search, "pruned", lambda space, plan, folder, arm: asked.append(arm) or len(asked) > 1)
    own = resolve(
        config_files.load("base", [f"workdir={tmp_path}", "data.path=x", "train.steps=30", "optim.warmup_steps=3"])
    )
    given = argparse.Namespace(search=5, space={}, metric="val/loss")
    making = command._Making(given, {}, tmp_path, 0, None, [[0]])
    run, said = {"name": "trial_1", "arm": 0}, []
    for step in (0, 10, 20, 30):
        if step:
            lines = metrics.JsonLines(tmp_path / "metrics.jsonl")
            lines.write({"step": step, "val/loss": 3.0})
            lines.close()
        said += [making.stopped(run, own), making.stopped(run, own)]
    assert said == ["", "", "", "", "pruned at step 20", "", "", ""]
    assert asked == [0, 0]
    given.search = None
    making.seen.clear()
    assert making.stopped(run, own) == ""


@pytest.mark.recipe
def test_a_sweep_that_is_killed_in_the_middle_goes_on(data, tmp_path):
    """Real runs, each a process: after SIGKILL what is done stays as it is, the rest is done, and no process is left."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    more = ("--config.optim.lr=1e-3,1e-2", "--seeds=2", "--json")
    command = [sys.executable, "-m", "jaxlm.cli.cli", *argv(data, tmp_path, *more)]
    folder = tmp_path / "sweeps" / "optim.lr"
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: (found := sweep.read(folder)) and found["runs"][0]["loss"], first)
        until(lambda: len(list((folder / "runs").glob("*/run.json"))) >= 2, first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    done = (folder / "runs" / "lr_0.001-seed_0" / "metrics.jsonl").read_bytes()
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)
    assert (folder / "runs" / "lr_0.001-seed_0" / "metrics.jsonl").read_bytes() == done
    assert found["result"]["seeds"] == 2
    assert found["result"]["differences"][0]["difference"] < 0


@pytest.mark.recipe
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one run at a time")
def test_runs_at_a_time_have_the_bits_that_they_have_alone(data, tmp_path):
    """The same sweep on one core, where one run trains at a time, has the same arrays in each checkpoint."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    more = ("--config.optim.lr=1e-3,1e-2", "--seeds=1", "--json", "--config.plan.measure=auto")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    said = []
    for name, own in (("two", cores), ("one", cores[:1])):
        command = [sys.executable, "-m", "jaxlm.cli.cli", *argv(data, tmp_path, *more, f"--out={tmp_path / name}")]
        pinned = ["taskset", "-c", ",".join(map(str, own)), *command]
        done = subprocess.run(pinned, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append("2 at a time, on 1 of the machine's cores each" in done.stderr)
    assert said == [True, False]
    for run in sweep.read(tmp_path / "two")["runs"]:
        two, one = (
            same_bits.arrays(tmp_path / name / "runs" / run["name"] / "checkpoints/20") for name in ("two", "one")
        )
        assert two == one


def until(condition, process: subprocess.Popen, seconds: float = 500) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.1)
