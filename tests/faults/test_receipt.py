"""`jaxlm verify`: a run repeats to the bit, also one that was killed or rolled back; 200 single changes are named."""

import hashlib
import json
import pathlib
import subprocess
import sys

import pytest
import tiny_receipt
from faults.harness import STEPS, curve, digests
from faults.test_stability import NAN

from jaxlm.run import ledger

pytestmark = pytest.mark.faults


def verify(place, name: str, *words: str, code: int = 0, devices: int = 1) -> list[str]:
    """What `jaxlm verify` prints; it changes no file of the run or its data."""
    before = files(place.root / name) | files(place.root / "data")
    settles = place.root / "settles"  # or such fast steps would be done before their save
    settles.write_text(json.dumps({"hold": None, "spoil": [], "settle": True}))
    command = [sys.executable, "-m", "jaxlm.cli.cli", "verify", str(place.root / name), *words]
    done = subprocess.run(
        command, env=place.environment(devices) | {"INSIDE": str(settles)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert files(place.root / name) | files(place.root / "data") == before
    return done.stdout.splitlines()


def files(folder: pathlib.Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def killed(place) -> str:
    place.stopped("killed", 10)
    place.run("killed")
    return "killed"


def test_a_run_that_was_killed_repeats_from_step_0(place, killed):
    said = verify(place, killed, f"--steps={STEPS}")
    assert said[0].startswith("A receipt shows")
    assert said[1].startswith("unchanged: ")
    assert said[2].startswith(f"replaying steps 1 to {STEPS} from its beginning: {STEPS} steps, ")
    states = [line for line in said if line.endswith(": all arrays are equal to the bit")]
    assert len(states) == len(ledger.read(place.root / killed)["receipt"]) >= 5
    assert said[-1] == f"steps 1 to {STEPS} (all of them) repeat"


def test_the_last_steps_repeat_from_a_kept_checkpoint(place, killed):
    said = verify(place, killed, "--until-digest")
    assert said[2].startswith("replaying steps 21 to 24 from checkpoint 20: 4 steps, ")
    assert said[-2:] == ["step 24: all arrays are equal to the bit", "steps 21 to 24 repeat"]


def test_on_another_machine_the_weights_are_measured_by_the_way_of_the_steps(place, killed):
    said = verify(place, killed, "--until-digest", devices=2)
    assert "hardware devices: 1 then, 2 now" in said
    assert any(line.startswith("step 24: the weights differ by ") for line in said)
    assert said[-1] == "steps 21 to 24 repeat"
    said = verify(
        place, killed, f"--steps={STEPS}", devices=2, code=3
    )  # no checkpoint has the weights of its beginning
    assert said[-1] == f"steps 1 to {STEPS} (all of them) can't be judged on this machine"


def test_what_the_run_did_not_train_does_not_repeat(place, killed):
    """Without a receipt, as older runs are, and with a metric that no step gave; with one, and another seed."""
    folder = place.copy("older", killed)
    book = json.loads((folder / "run.json").read_text())
    del book["receipt"], book["starts"][0]["link"], book["starts"][1]["link"], book["starts"][1]["ended"]["link"]
    (folder / "run.json").write_text(json.dumps(book))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if '"step": 23,' in line and "train/loss" in line)
    lines[at] = json.dumps(json.loads(lines[at]) | {"train/loss": 1.0}) + "\n"
    (folder / "metrics.jsonl").write_text("".join(lines))
    said = verify(place, "older", "--steps=4", code=3)
    assert said[1].startswith("no receipt: ")
    assert any(line.startswith("metrics: train/loss first differs at step 23: 1.0 and ") for line in said)
    assert said[-1] == "steps 21 to 24 do not repeat"
    said = verify(place, killed, "--steps=24", "--config.seed=1", code=3)
    assert any(line.startswith("metrics: train/loss first differs at step ") for line in said)
    assert any(line.endswith(" of their way since 0") or line.endswith("the arrays differ") for line in said)


def test_a_run_that_was_rolled_back_repeats(place):
    place.run("back", inside={"spoil": [[10, 11, "nan"]]}, **NAN)
    book = ledger.read(place.root / "back")
    assert len(book["rollbacks"]) == 1
    assert verify(place, "back", f"--steps={STEPS}")[-1] == f"steps 1 to {STEPS} (all of them) repeat"


def test_200_single_changes(place, killed):
    lines, named = tiny_receipt.missed(place.root / killed, 200, seed=0, data=place.root / "data")
    assert lines == []
    assert named > 150


def test_a_run_with_a_moving_average_that_was_killed_and_rolled_back_repeats(place):
    """Its checkpoints hold the average: of an update every fourth step, the first of which is at step 4."""
    moving = {"checkpoint__average": 0.2, "train__seq_len": 256, "train__eval_every_steps": 6, **NAN}
    place.run("even", inside={"spoil": [[13, 14, "nan"]]}, **moving)
    place.stopped("moving", 10, **moving)
    assert any(name.startswith("train/average/") for name in digests(place.root / "moving", 8))
    place.run("moving", inside={"spoil": [[13, 14, "nan"]]}, **moving)
    assert len(ledger.read(place.root / "moving")["rollbacks"]) == 1
    place.assert_exact("moving", of="even")
    assert sum("val_average/loss" in record for record in curve(place.root / "moving").values()) == 4
    assert verify(place, "moving", f"--steps={STEPS}")[-1] == f"steps 1 to {STEPS} (all of them) repeat"
    said = verify(place, "moving", "--until-digest")
    assert said[-2:] == ["step 24: all arrays are equal to the bit", "steps 21 to 24 repeat"]
