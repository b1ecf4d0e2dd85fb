"""The story's four phases, shrunk to the CPU, with real processes: gate, budget, off-ramp; and a branch that is killed."""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from faults.harness import Started, curve, digests, steps

pytestmark = pytest.mark.faults


class Runs:
    """Commands in one folder."""

    def __init__(self, root: pathlib.Path):
        self.root = root

    def start(self, *arguments: str) -> Started:
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
        cache = f"--config.hardware.compile_cache={self.root / 'cache'}"
        command = [sys.executable, "-m", "jaxlm.main", *arguments, cache]
        with open(self.root / "said.txt", "w") as said:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
            )
        return Started(process, self.root / "said", None, self.root / "inside", self.root / "said.txt")

    def run(self, *arguments: str, code: int = 0) -> str:
        return self.start(*arguments).end(code, seconds=500)  # 160 steps of a model that was compiled fast, not well


def contents(folder: pathlib.Path) -> dict[str, str]:
    """Path -> sha256 of all files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """The shrunk run, stopped by the gate of its second phase."""
    found = Runs(tmp_path_factory.mktemp("runs"))
    new = ("--config=gpuburnout_1b", "--config.phases.shrink=cpu", "--config.workdir=run")
    said = found.run(*new, "--config.phases.plan.pilot.max_val_loss=5", code=3)
    assert len(re.findall(r"^shrunk: 2 layers of d 128, .* steps and dollars over 500", said, re.MULTILINE)) == 1
    assert "phase pilot ended at step 20 with a held-out loss of " in said
    return found


def test_gate_budget_and_all_four_phases(runs):
    refused = runs.run("run", code=3)  # at once, with the same line
    assert "phase pilot ended at step 20 with a held-out loss of " in refused
    assert steps(runs.root / "run")[-1] == 20
    said = runs.run("run", "--config.phases.accept=pilot", "--config.phases.plan.main.usd=1e-6", code=3)
    assert "phase main has spent " in said
    assert steps(runs.root / "run")[-1] <= 22  # one step beyond, and saved
    runs.run("run", "--config.phases.accept=main", "--config.phases.plan.finish.usd=100.0")
    assert {2, 20, 120, 180} <= set(steps(runs.root / "run"))
    bill = json.loads((runs.root / "run/run.json").read_text())["phases"]
    latest = {row["phase"]: row for row in bill}
    assert [(row["last_step"], row["ended"], row["loss"]) for row in latest.values()] == [
        (2, True, "val"),
        (20, True, "val"),
        (120, True, "val"),
        (180, True, "val"),
    ]
    assert sum(row["usd"] for row in latest.values()) == pytest.approx(bill[-1]["cost_usd"])
    samples = [json.loads(line) for line in (runs.root / "run/samples/120.jsonl").read_text().splitlines()]
    assert [line["temperature"] for line in samples] == [0.0] * 8 + [0.7] * 8


def test_a_branch_that_is_killed_ends_as_one_that_was_not_and_its_trunk_is_only_read(runs):
    before = contents(runs.root / "run")
    ask = ("run", "--branch=decay", "--steps=20", "--checkpoint=20", "--config.checkpoint.every_steps=5")
    off = "--config.runs.supervise=off"
    runs.run(*ask, "--config.workdir=whole")
    killed = runs.start(*ask, off)
    branch = runs.root / "run-decay-20"
    killed.wait_for(lambda: steps(branch)[-1:] >= [30], "a checkpoint of step 30")
    killed.process.kill()
    killed.process.wait()
    runs.run(*ask)  # the same command
    runs.run("run-decay-20")  # and the folder alone: it is complete
    assert contents(runs.root / "run") == before
    whole = runs.root / "whole"
    assert digests(branch, 40) == digests(whole, 40)
    assert curve(branch) == curve(whole)
    rates = {step: record["train/lr"] for step, record in curve(whole).items() if "train/lr" in record}
    assert rates[40] == pytest.approx(rates[21] / 20, rel=1e-4)
