"""scripts/bench_recipe.py: its statistics, the plan, going on where it stopped, arms that a checkout does not know."""

import concurrent.futures
import fcntl
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import bench_recipe
import bench_recipe_arms as arms
import bench_recipe_peers as peers
import bench_recipe_report as report
import bench_recipe_runs as runs
import bench_recipe_stats as stats
import pytest
import tiny_data
from bench_recipe_arms import Arm
from bench_recipe_runs import Run

from jaxlm.config import ConfigError

BASE = {1: {0: 5.0, 1: 5.2, 2: 5.1}, 2: {0: 4.6, 1: 4.8, 2: 4.7}, 4: {0: 4.2, 1: 4.4, 2: 4.3}}


def faster(curve: stats.Curve, times: float) -> dict[int, dict[int, float]]:
    """The curve of an arm that takes so many times the tokens of a base that loses .4 nats with each doubling."""
    return {tokens: {seed: loss + 0.4 * math.log2(times) for seed, loss in at.items()} for tokens, at in curve.items()}


# ------------------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("of_base", [True, False])
def test_an_arm_against_itself_is_exactly_1(tokens, of_base):
    noisy = {1: {0: 5.013, 1: 5.247, 2: 5.171}, 2: {0: 4.9, 1: 5.4, 2: 4.731}, 4: {0: 5.0, 1: 4.87, 2: 5.3}}
    for curve in (BASE, noisy):  # the second is no falling curve for every draw of seeds
        found = stats.ratio(curve, curve, tokens, of_base)
        assert (found.value, found.low, found.high, found.seeds) == (1.0, 1.0, 1.0, 3)


def test_half_the_tokens_are_found_between_finished_budgets():
    found = stats.ratio(faster(BASE, 0.6), BASE, 4)  # between 2 and 4: a line in log tokens
    # Each seed says the same: pairing takes their spread out.
    assert (found.value, found.low, found.high) == pytest.approx((0.6, 0.6, 0.6), abs=1e-9)
    assert (found.target, found.tokens, found.base_tokens) == pytest.approx((4.3, 2.4, 4))
    alone = stats.ratio(faster({1: BASE[1]}, 0.5), BASE, 1, of_base=False)  # one budget, read off the curve of its base
    assert (alone.value, alone.base_tokens) == pytest.approx((0.5, 2))


@pytest.mark.parametrize(
    ("gains", "value", "low", "high"),
    [
        # Each seed gains .1, though the seeds are .2 apart: unpaired, the interval would hold no gain.
        ({0: -0.1, 1: -0.1, 2: -0.1}, -0.1, -0.1, -0.1),
        ({0: -0.3, 1: 0.1, 2: -0.1}, -0.1, -0.3, 0.1),  # with three seeds: their range
        ({seed: 0.01 * (seed - 4.5) for seed in range(10)}, 0, -0.0178, 0.0178),  # with many: 1.96 standard errors
    ],
)
def test_seeds_are_paired(gains, value, low, high):
    base = BASE[1] if len(gains) == 3 else dict.fromkeys(gains, 0.0)
    found = stats.difference({seed: base[seed] + gain for seed, gain in gains.items()}, base)
    assert (found.value, found.low, found.high) == pytest.approx((value, low, high), rel=0.12, abs=1e-9)


def test_nothing_is_extrapolated():
    for losses, target, tokens in (
        ([5.0, 4.6, 4.3], 4.29, math.inf),
        ([5.0, 4.6, 4.3], 5.01, 0),
        ([5.0, 4.6, 4.3], 4.6, 2),
        ([math.inf, 4.6, 4.3], 4.7, 2),  # the first diverged: here at the latest
    ):
        assert stats.tokens_to([1, 2, 4], losses, target) == tokens
    assert stats.ratio(faster(BASE, 1.2), BASE, 4).shown() == "not reached: >1.00 [>1.00, >1.00]"
    early = stats.ratio(faster(BASE, 0.4), BASE, 2)  # .8 of the first budget
    assert (early.value, early.shown(1.5)) == (0, "<0.75 [<0.75, <0.75]")
    # The other way round: the base did not come to the arm's loss, or was there before its first budget.
    assert stats.ratio(faster({1: BASE[1]}, 0.2), BASE, 1, of_base=False).shown() == "<0.25 [<0.25, <0.25]"
    assert stats.ratio(faster({1: BASE[1]}, 1.5), BASE, 1, of_base=False).shown().startswith("not reached: >1.00")


def test_a_budget_counts_once_all_seeds_have_finished_it():
    arm = {**faster(BASE, 0.6), 2: {0: 1.0}}  # one seed of the second budget, far too good
    assert stats.ratio(arm, BASE, 4).value == pytest.approx(stats.ratio({k: arm[k] for k in (1, 4)}, BASE, 4).value)
    two = stats.ratio({1: {0: 4.6, 1: 4.8}}, BASE, 1, of_base=False)  # the third seed is still to come
    assert (two.value, two.seeds) == (pytest.approx(0.5), 2)
    assert stats.ratio({}, BASE, 4) is None
    assert stats.ratio(BASE, {1: {7: 5.0}}, 1) is None  # no seed in common


# ------------------------------------------------------------------------------------------------ plan, resuming, arms


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("recipe") / "data", {"web": 1.0, "code": 1.0}).path


@pytest.fixture
def small(monkeypatch, tmp_path, data):
    """Three arms with rates of their own at one small shape, on a small data directory; returns the command's options."""
    lrs = {"reference": 1e-3, "adamw": 3e-3, "speed": 5e-3}
    table = {name: Arm("reference", {"optim.lr": lr}, "") for name, lr in lrs.items()}
    table["rest"] = Arm("adamw", {"optim.lr": 1e-2}, "")
    shape = {"model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 32, "model.vocab_size": 300}
    own = {"train.seq_len": 32, "train.batch_size": 4, "eval.batch_size": 4, "log.every_steps": 1}
    changed = {"ARMS": table, "SHAPES": {"S0": shape, "S1": shape | {"model.d_model": 32}}, "COMMON": arms.COMMON | own}
    changed |= {
        "BUDGETS": (1024, 2048),
        "SEEDS": (0, 1),
        "SEQ_LEN": 32,
        "BATCH": 4,
        "WEIGHTS": {"web": 1.0, "code": 1.0},
    }
    for name, value in changed.items():
        monkeypatch.setattr(arms, name, value)
    return [f"--runs={tmp_path / 'runs.jsonl'}", f"--data={data}"]


@pytest.fixture
def trained(monkeypatch):
    """Stands for training: a list of what was trained; losses fall with tokens and with the rate, a little by seed."""
    made = []

    def train(settings, steps, folder, held):
        keys = dict(word.split("=", 1) for word in settings)
        made.append((float(keys["optim.lr"]), keys["model.d_model"], steps, int(keys["seed"])))
        loss = 5 - 0.1 * steps / 8 - 0.05 * math.log2(float(keys["optim.lr"]) / 1e-3) + 0.01 * int(keys["seed"])
        stamp = {"seconds": 3.0, "machine": "m", "others": 0.0, "loaded": False, "commit": "c", "when": "now"}
        return {"loss": loss, "bits_per_byte": loss / 2, "sources": {}, "tokens_per_second": 1000, **stamp}

    monkeypatch.setattr(runs, "train", train)
    return made


def test_the_plan_begins_with_what_tells_most_and_gives_hours(small, capsys):
    assert bench_recipe.main(["plan", *small, "--tokens_per_second=512"]) == 0
    said = capsys.readouterr().out
    planned = re.findall(r"^ *\d+  (.*?)  .* h so far$", said, re.MULTILINE)
    first = [f"{arm} S0 0.001024M seed {seed}" for seed in (0, 1) for arm in ("reference", "adamw", "speed")]
    assert planned[:6] == first
    assert planned[6] == "reference S0 0.001024M seed 0, rate x 0.5"
    assert planned[18] == "reference S0 0.002048M seed 0"
    assert len(planned) == len(set(planned)) == 3 * 2 * (3 + 1 + 1) + 2 * 3
    assert "36 to come" in said
    assert "0.8 min (given speed)" in said  # two or four seconds and the start
    assert "held out, all of which are measured" in said


def test_new_keys_leave_finished_runs_as_they_are_and_runs_of_other_data_do_not_count(small, trained, tmp_path):
    bench_recipe.main(["run", *small, "--only=reference"])
    path = tmp_path / "runs.jsonl"
    finished = runs.read(path)

    def again(lines) -> int:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        trained.clear()
        bench_recipe.main(["run", *small, "--only=reference"])
        return len(trained)

    assert again([line | {"data": "other"} for line in finished]) == 12
    for line in finished:
        assert line["asked"].pop("optim.eps")  # as if the line were older than the key
        line["asked"]["optim.gone"] = 1
    finished[0]["asked"]["optim.b1"] = 0.5  # another value
    finished[1]["asked"].pop("model.d_model")  # the line does not know a key that is not at its default
    finished[2]["asked"] = {}
    assert again(finished) == 3


def test_it_goes_on_where_it_stopped(small, trained, monkeypatch, capsys):
    assert bench_recipe.main(["run", *small, "--only=reference"]) == 0
    assert len(trained) == 12
    path = pathlib.Path(small[0].removeprefix("--runs="))
    path.write_bytes(path.read_bytes()[:-30])  # killed while it wrote the last line
    trained.clear()
    assert bench_recipe.main(["run", *small, "--only=reference"]) == 0
    assert len(trained) == 1
    lines = path.read_text().splitlines()
    assert len(lines) == 13
    assert len(runs.read(path)) == 12  # the cut line is passed over, and the next stands on a line of its own
    row = json.loads(lines[-1])
    assert row["held_out_tokens"] > 0
    names = (
        "arm shape tokens seed factor loss bits_per_byte seconds tokens_per_second commit machine loaded lr data epochs"
    )
    assert row.keys() >= {*names.split()}
    trained.clear()
    monkeypatch.setitem(arms.ARMS, "reference", Arm("reference", {"optim.lr": 2e-3}, ""))  # another arm of that name
    assert bench_recipe.main(["run", *small, "--only=reference", "--hours=0.0001"]) == 0
    assert not trained
    assert "10 runs are left, and none ends within --hours=0.0001" in capsys.readouterr().out


def test_a_failed_run_costs_the_others_nothing(small, trained, monkeypatch, capsys):
    train = runs.train

    def failing(settings, steps, folder, held):
        if "seed=1" in settings:
            raise ConfigError("exit code 1: no room")
        return train(settings, steps, folder, held)

    monkeypatch.setattr(runs, "train", failing)
    assert bench_recipe.main(["run", *small, "--only=reference"]) == 1
    assert len(trained) == 5
    assert capsys.readouterr().out.count("FAILED, exit code 1: no room") == 5


def test_two_at_once_are_refused(small, trained, tmp_path):
    with runs.lock(tmp_path / "runs.jsonl") as held:
        with pytest.raises(SystemExit, match="another process works on"):
            bench_recipe.main(["run", *small])
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(held.fileno(),))
    try:  # the script was killed, but not the run that it had begun
        with pytest.raises(SystemExit, match="another process works on"):
            bench_recipe.main(["run", *small])
        assert not trained
    finally:
        child.communicate(b"\n", timeout=60)
    assert bench_recipe.main(["run", *small, "--only=reference"]) == 0


def test_a_second_process_waits_for_the_data_that_the_first_makes(tmp_path, data, monkeypatch):
    folder = tmp_path / "data"

    def make(words, log, held):
        assert not (folder / "manifest.json").exists()
        shutil.copytree(data, folder, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(runs, "jaxlm", make)
    with (tmp_path / ".data.lock").open("ab") as first, concurrent.futures.ThreadPoolExecutor() as pool:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = pool.submit(runs.make_data, folder, [], None)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        fcntl.flock(first, fcntl.LOCK_UN)
        assert second.result(timeout=60).path == folder
    assert runs.make_data(folder, [], None).path == folder  # it is there: nothing is made


def test_an_arm_that_is_behind_is_stopped_and_it_is_said(small, trained, capsys):
    assert bench_recipe.main(["run", *small, "--only=adamw,rest"]) == 0
    said = capsys.readouterr().out
    assert "stopped" not in said  # a higher rate is better here, and `rest` has the highest
    arms.ARMS["rest"] = Arm("adamw", {"optim.lr": 1e-3}, "")
    trained.clear()
    assert bench_recipe.main(["run", *small, "--only=adamw,rest"]) == 0
    said = capsys.readouterr().out
    assert "rest is stopped: 0.0792 nats [0.0792, 0.0792] behind adamw at 0.001024M tokens" in said
    assert len(trained) == 6  # its three rates were tried: it is stopped by the best of them


def test_the_larger_budgets_run_at_a_better_rate_too(small, trained):
    bench_recipe.main(["run", *small, "--only=reference"])
    found = [(lr, width, steps) for lr, width, steps, _ in trained[6:]]
    assert found == [(2e-3, "16", 16)] * 2 + [(2e-3, "32", 16)] * 2 + [(1e-3, "16", 16)] * 2
    done = arms.look(pathlib.Path(small[0].removeprefix("--runs="))).done
    assert arms.chosen("reference", done) == 2.0


def test_a_report_of_no_file_is_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "typo.jsonl"):
        assert bench_recipe.main(["report", f"--runs={path}"]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert f"{path} is no file: give --runs=FILE" in said.err
    with pytest.raises(SystemExit):
        bench_recipe.main(["report", "--usd_per_hour=nan"])


def test_the_report_tells_tokens_seconds_and_what_is_mixed(small, trained, tmp_path, capsys):
    bench_recipe.main(["run", *small, "--only=reference,adamw"])
    times = {"shape": "S0", "times": {"reference": [1.0, 2.0, 1.0], "adamw": [1.5, 3.0, 1.6]}, "loaded": False}
    loaded = times | {"times": {"reference": [1.0], "adamw": [9.0]}, "loaded": True}
    for line in (times, loaded):
        runs.append(tmp_path / report.STEPTIMES, line | {"machine": "m", "commit": "c"})
    capsys.readouterr()
    assert bench_recipe.main(["report", *small]) == 0
    said = capsys.readouterr().out
    table = said.split("Tokens, seconds and dollars")[1].split("\n\n")[0]
    (row,) = [line for line in table.splitlines() if line.startswith("adamw ") and " at 0.002048M" in line]
    # Its loss is .05 log2(3) = .0792 lower, and the doubling takes .1 off: 2 ** -.792 of the tokens.
    assert "0.577 [0.577, 0.577]" in row
    assert "0.866 [0.866, 0.866]" in row  # times 1.5, the median of the turns
    assert "reference  adamw" not in table  # the first arm has no base
    assert "mixed: tokens measured here x step times measured apart" in said
    assert "step times, S0: ms reference 1000, adamw 1600 (m, idle, c)" in said
    assert "met a loaded machine are left out: measure those of S0 again" in said
    assert "each at the best of its three rates" in said
    assert "with three seeds that is the range of the seeds" in said


def test_arms_are_compared_at_the_best_of_their_rates_and_one_at_the_edge_is_told(small, trained, tmp_path):
    bench_recipe.main(["run", *small, "--only=reference,adamw"])
    done = arms.look(tmp_path / "runs.jsonl").done
    larger = next(row for row in report.losses(done) if (row["arm"], row["shape"]) == ("adamw", "S1"))
    assert (larger["rate"], larger["- its base"]) == ("x2", "-0.0792 [-0.0792, -0.0792] reference x2")

    def best() -> str:
        return next(row for row in report.rates(done) if row["arm"] == "reference")["best"]

    assert best() == "x2, an edge"
    for run, line in done.items():
        line["loss"] += (run.factor == 2) * 1.0
    assert best() == "x1"
    for run in [run for run in done if run.factor == 2]:
        done.pop(run)
    assert best() == "x1"  # not all rates are finished


def test_an_arm_with_keys_that_this_checkout_does_not_know_is_left_out(small, trained, capsys, monkeypatch):
    arms.ARMS["later"] = Arm("reference", {"optim.lr": 1e-3, "optim.from_the_future": 1}, "")
    arms.ARMS["wrong"] = Arm("reference", {"optim.lr": -1.0}, "")
    assert bench_recipe.main(["plan", *small]) == 0
    said = capsys.readouterr().out
    assert "later is left out: unknown key config.optim.from_the_future" in said
    assert "wrong is left out: config.optim.lr=-1.0" in said
    assert "36 to come" in said
    monkeypatch.setattr(arms, "ARMS", {name: arms.ARMS[name] for name in ("later", "wrong")})
    with pytest.raises(SystemExit, match="no arm is left"):
        bench_recipe.main(["run", *small])


def test_the_arms_of_the_table_are_known_or_told(capsys):
    assert bench_recipe.main(["plan", "--runs=absent/runs.jsonl", "--data=absent"]) == 0
    said = capsys.readouterr().out
    for arm in arms.ARMS:
        assert f"{arm} is left out: " in said or f"{arm} S0 1M seed 2, rate x 2 " in said
    with pytest.raises(SystemExit):
        bench_recipe.main(["plan", "--only=sped"])


def test_the_reference_is_as_far_below_the_rule_as_the_first_story():
    lr = {}
    for arm in ("reference", "rate"):
        words = dict(word.split("=", 1) for word in arms.settings(Run(arm, "S0", 1_000_000, 0)))
        lr[arm] = float(words["optim.lr"])
    assert lr["reference"] / lr["rate"] == pytest.approx(3e-4 / 5.5e-4, rel=0.03)


# ------------------------------------------------------------------------------------------------- the real thing, small


@pytest.mark.recipe
def test_real_runs_on_small_data(small, data, tmp_path, capsys):
    for name in ("BUDGETS", "SEEDS"):
        setattr(arms, name, getattr(arms, name)[:1])
    assert bench_recipe.main(["run", *small, "--only=reference,adamw", "--hours=1"]) == 0, capsys.readouterr().out
    lines = runs.read(tmp_path / "runs.jsonl")
    assert len(lines) == 2 * (3 + 1)
    assert {(line["arm"], line["factor"]) for line in lines} >= {("adamw", 0.5), ("reference", 2.0)}
    for line in lines:
        assert 3 < line["loss"] < 7
        assert 0.5 < line["bits_per_byte"] < 10
        assert line["tokens_per_second"] > 0
    assert len({line["loss"] for line in lines}) == len(lines)
    assert not (data.parent / "run").exists()
    assert bench_recipe.main(["report", *small]) == 0
    short = ["--steps=2", "--set=train.batch_size=8"]
    assert bench_recipe.main(["steptime", *small, "--only=reference,adamw", *short]) == 0
    assert "of reference's, turn by turn" in capsys.readouterr().out


@pytest.mark.parity
def test_a_peer_learns_the_same_rows(small, data, tmp_path):
    pytest.importorskip("torch")
    arms.SHAPES["S0"]["model.n_kv_heads"] = 1
    arms.SHAPES["S0"]["model.head_dim"] = 8
    found = {}
    for peer in peers.PEERS:
        folder = tmp_path / peer.replace(":", "_")
        folder.mkdir()
        run = {"arm": peer, "shape": "S0", "tokens": 4096, "seed": 0, "factor": 1.0}
        peers.child(run | {"data": str(data), "folder": str(folder)})
        (found[peer],) = runs.read(folder / "found.json")
    assert found["peer:hf"]["loss"] == pytest.approx(math.log(300), abs=0.1)  # 5e-5 moves nothing in 32 steps
    assert found["peer:nanochat"]["loss"] < found["peer:hf"]["loss"]
    assert found["peer:hf_6e-4_cosine"]["loss"] < found["peer:hf"]["loss"] - 0.05
