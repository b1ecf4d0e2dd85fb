"""Checkpoints that commit b4c35ec wrote resume to the bit: the present code goes on as if it had made them itself.

Muon has another orthogonalisation since then. Its checkpoints resume with parameters and momentum as they were.

The commit's code runs in a git worktree of its own, once for all tests, on data that the present code then reads too.
"""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
import same_bits
import tiny_data

pytestmark = pytest.mark.engines
COMMIT = "b4c35ecab25f0e74c6210f56dc053f1f1468ea5f"
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIMIZERS = ("adamw", "adamw8bit", "muon")
TO_THE_BIT = ("adamw", "adamw8bit")
# The stop falls on an evaluation and samples that are then owed, and on no checkpoint of its own.
STEPS, CHECKPOINT, STOP = 8, 4, 6
TINY = {
    "model.n_layers": 2,
    "model.d_model": 64,
    "model.n_heads": 4,
    "model.d_ff": 128,
    "model.vocab_size": 384,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.seq_len": 64,
    "train.eval_every_steps": 3,
    "eval.batch_size": 8,
    "eval.max_batches": 2,
    "checkpoint.every_steps": CHECKPOINT,
    "optim.warmup_steps": 2,
    "log.every_steps": 1,
    "log.tensorboard": False,
    "sample.every_steps": STOP,
    "sample.max_new_tokens": 4,
    "data.val_fraction": 0.1,
}
FINGERPRINT = {"data", "mixture", "seed", "seq_len", "batch_size", "sha256"}


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    """A worktree of the commit."""
    tree = tmp_path_factory.mktemp("worktree") / "old"
    git = ["git", "-C", str(ROOT), "worktree"]
    try:
        made = subprocess.run([*git, "add", "--detach", str(tree), COMMIT], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if made.returncode:
        pytest.skip(f"no worktree of commit {COMMIT[:7]} (a shallow clone, or no clone?): {made.stderr.strip()}")
    yield tree
    subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with raw text, and a config for it; the runs go there too."""
    root, rng = tmp_path_factory.mktemp("older"), random.Random(0)
    words = tiny_data.WORDS.split()
    lines = (" ".join(rng.choices(words, k=rng.randint(5, 120))) for _ in range(300))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (root / "tiny.py").write_text(
        "from jaxlm.configs import base\n\n\ndef get_config():\n    c = base.get_config()\n"
        f"    c.data.path = {str(root / 'text.jsonl')!r}\n    c.data.dir = {str(root / 'data')!r}\n    return c\n"
    )
    return root


def job(place: pathlib.Path, run: str, optimizer: str, code: int = 0, **more) -> dict:
    """A run for several_runs.py, in the folder `run-optimizer`."""
    keys = TINY | {"optim.name": optimizer, "workdir": place / f"{run}-{optimizer}"}
    # Samples take a program more to compile: one optimizer shows them.
    keys |= {"sample.prompts": "('one ',)" if optimizer == "adamw" else "()", "hardware.compile_cache": place / "cache"}
    argv = [f"--config={place / 'tiny.py'}", *(f"--config.{key}={value}" for key, value in keys.items())]
    return {"argv": argv, "code": code, **more}


def start(tree: pathlib.Path, jobs: list[dict]) -> subprocess.Popen:
    """Begins a process that does all jobs with the code of `tree`."""
    env = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, str(ROOT / "tests/several_runs.py"), json.dumps(jobs)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen) -> None:
    try:
        said = process.communicate(timeout=400)[1]
    finally:
        process.kill()  # where it hangs; one that has ended feels nothing
    assert process.returncode == 0, said[-3000:]


@pytest.fixture(scope="module")
def runs(place, old_tree) -> pathlib.Path:
    """The folder of all runs, NAME-OPTIMIZER each: `old` and `new` are whole; `stopped` was stopped by SIGTERM in the old code,
    `saved` is `old` as it was at its first checkpoint; `stopped-resumed` and `saved-resumed` are what the present code made
    of them.
    """
    stopped = [job(place, "stopped", name, code=4, stop_at=STOP) for name in OPTIMIZERS]
    with start(old_tree, stopped + [job(place, "old", name, stop_at=None) for name in OPTIMIZERS]) as old:
        finish(old)
    for name in OPTIMIZERS:
        shutil.copytree(place / f"old-{name}", place / f"saved-{name}")
        shutil.rmtree(place / f"saved-{name}/checkpoints/{STEPS}")
        metrics = place / f"saved-{name}/metrics.jsonl"
        lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= CHECKPOINT]
        metrics.write_text("".join(line + "\n" for line in lines))
        for run in ("stopped", "saved"):
            shutil.copytree(place / f"{run}-{name}", place / f"{run}-resumed-{name}")
    resumed = [job(place, f"{run}-resumed", name) for name in OPTIMIZERS for run in ("stopped", "saved")]
    with start(ROOT, [job(place, "new", name) for name in OPTIMIZERS]) as new, start(ROOT, resumed) as later:
        finish(new)
        finish(later)
    return place


def meta(run: pathlib.Path, step: int) -> dict:
    return json.loads((run / f"checkpoints/{step}/meta/metadata").read_text())


def last(run: pathlib.Path) -> dict[str, str]:
    """The digests of all arrays of the last checkpoint."""
    return same_bits.arrays(run / f"checkpoints/{STEPS}")


def metrics(run: pathlib.Path) -> dict[str, dict]:
    return same_bits.metrics(run / "metrics.jsonl")


@pytest.mark.parametrize("optimizer", TO_THE_BIT)
def test_the_same_run_from_the_start(runs, optimizer):
    """Else neither of the tests below would say anything of resuming."""
    old, new = runs / f"old-{optimizer}", runs / f"new-{optimizer}"
    assert list(metrics(old)) == [str(step) for step in range(1, STEPS + 1)]
    assert metrics(new) == metrics(old)
    assert last(new) == last(old)


@pytest.mark.parametrize("optimizer", TO_THE_BIT)
@pytest.mark.parametrize(("run", "step", "interrupted"), [("saved", CHECKPOINT, False), ("stopped", STOP, True)])
def test_an_older_checkpoint_resumes_to_the_bit(runs, optimizer, run, step, interrupted):
    before, after = runs / f"{run}-{optimizer}", runs / f"{run}-resumed-{optimizer}"
    assert meta(before, step)["interrupted"] is interrupted
    assert list(metrics(before)) == [str(s) for s in range(1, step + 1)]
    starts = json.loads((after / "run.json").read_text())["starts"]
    assert [s["step"] for s in starts] == [0, step]  # it did not begin anew
    assert metrics(after) == metrics(runs / f"new-{optimizer}")
    assert last(after) == last(runs / f"new-{optimizer}")


@pytest.mark.parametrize(("run", "step"), [("saved", CHECKPOINT), ("stopped", STOP)])
def test_an_older_checkpoint_of_muon_resumes_where_it_was(runs, run, step):
    """The next step sees the old parameters to the bit; it moves them by the new optimizer, about as far as the old one did."""
    resumed, old, new = (metrics(runs / f"{name}-muon") for name in (f"{run}-resumed", "old", "new"))
    starts = json.loads((runs / f"{run}-resumed-muon/run.json").read_text())["starts"]
    assert [s["step"] for s in starts] == [0, step]
    assert list(resumed) == list(old) == list(new) == [str(s) for s in range(1, STEPS + 1)]
    here, there = (found[str(step + 1)] for found in (resumed, old))
    for name in ("train/loss", "train/grad_norm"):
        assert here[name] == there[name] != new[str(step + 1)][name]
    assert here["train/update_norm"] == pytest.approx(there["train/update_norm"], rel=0.2)
    assert resumed[str(STEPS)]["train/loss"] == pytest.approx(old[str(STEPS)]["train/loss"], rel=0.02)
    assert last(runs / f"{run}-resumed-muon").keys() == last(runs / "old-muon").keys()


@pytest.mark.parametrize("optimizer", TO_THE_BIT)
def test_what_was_owed_at_the_stop_is_made_up_for(runs, optimizer):
    before, after = runs / f"stopped-{optimizer}", runs / f"stopped-resumed-{optimizer}"
    assert "val/loss" not in metrics(before)[str(STOP)]
    assert metrics(after)[str(STOP)]["val/loss"] == metrics(runs / f"new-{optimizer}")[str(STOP)]["val/loss"]
    samples = f"samples/{STOP}.jsonl"
    assert not (before / samples).exists()
    if optimizer == "adamw":
        assert (after / samples).read_text() == (runs / f"new-{optimizer}" / samples).read_text()


def test_the_fingerprint_is_the_same(runs):
    """A run of the old code could also go on from here, and neither refuses the other's data."""
    old, new = (meta(runs / f"{run}-adamw", STEPS)["fingerprint"] for run in ("old", "new"))
    assert new == old
    assert set(new) == FINGERPRINT
