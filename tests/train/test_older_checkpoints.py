"""What older commits made is gone on with: checkpoints of b4c35ec; a run, data of seed 1 and a ladder of 26d2768.

Checkpoints resume to the bit: the present code goes on as if it had made them itself.

Muon has another orthogonalisation since then. Its checkpoints resume with parameters and momentum as they were.

Each commit's code runs in a git worktree of its own, once for all tests, on data that the present code then reads too.
"""

import contextlib
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

from jaxlm.data.shards import shards

pytestmark = pytest.mark.engines
COMMIT = "b4c35ecab25f0e74c6210f56dc053f1f1468ea5f"
ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIMIZERS = ("adamw", "adamw8bit", "muon")
TO_THE_BIT = ("adamw", "adamw8bit")
RESUMED = [("stopped", "adamw"), ("saved", "adamw"), ("stopped", "adamw8bit"), ("saved", "muon")]
# The stop falls on an evaluation and samples that are then owed, and on no checkpoint of its own.
STEPS, CHECKPOINT, STOP = 8, 4, 6
TINY = {"model.n_layers": 1, "model.d_model": 64, "model.n_heads": 4, "model.d_ff": 128, "model.vocab_size": 384}
TINY |= {"train.steps": STEPS, "train.batch_size": 8, "train.seq_len": 64, "train.eval_every_steps": 3}
TINY |= {"eval.batch_size": 8, "eval.max_batches": 2, "checkpoint.every_steps": CHECKPOINT, "optim.warmup_steps": 2}
TINY |= {"log.every_steps": 1, "log.tensorboard": False, "sample.every_steps": STOP, "sample.max_new_tokens": 4}
TINY |= {"data.val_fraction": 0.1}
FINGERPRINT = {"data", "mixture", "seed", "seq_len", "batch_size", "sha256"}


@contextlib.contextmanager
def worktree(folder: pathlib.Path, commit: str):
    """A worktree of a commit."""
    tree, git = folder / "old", ["git", "-C", str(ROOT), "worktree"]
    try:
        made = subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if made.returncode:
        pytest.skip(f"no worktree of commit {commit[:7]} (a shallow clone, or no clone?): {made.stderr.strip()}")
    yield tree
    subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    with worktree(tmp_path_factory.mktemp("worktree"), COMMIT) as tree:
        yield tree


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
    stopped = [job(place, "stopped", name, code=4, stop_at=STOP) for name in TO_THE_BIT]
    with start(old_tree, stopped + [job(place, "old", name, stop_at=None) for name in OPTIMIZERS]) as old:
        finish(old)
    for name in OPTIMIZERS:
        shutil.copytree(place / f"old-{name}", place / f"saved-{name}")
        shutil.rmtree(place / f"saved-{name}/checkpoints/{STEPS}")
        metrics = place / f"saved-{name}/metrics.jsonl"
        lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= CHECKPOINT]
        metrics.write_text("".join(line + "\n" for line in lines))
    for run, name in RESUMED:
        shutil.copytree(place / f"{run}-{name}", place / f"{run}-resumed-{name}")
    resumed = [job(place, f"{run}-resumed", name) for run, name in RESUMED]
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


@pytest.mark.parametrize(("run", "optimizer"), RESUMED[:3])
def test_an_older_checkpoint_resumes_to_the_bit(runs, optimizer, run):
    step, interrupted = (STOP, True) if run == "stopped" else (CHECKPOINT, False)
    before, after = runs / f"{run}-{optimizer}", runs / f"{run}-resumed-{optimizer}"
    assert meta(before, step)["interrupted"] is interrupted
    assert list(metrics(before)) == [str(s) for s in range(1, step + 1)]
    starts = json.loads((after / "run.json").read_text())["starts"]
    assert [s["step"] for s in starts] == [0, step]  # it did not begin anew
    assert metrics(after) == metrics(runs / f"new-{optimizer}")
    assert last(after) == last(runs / f"new-{optimizer}")


def test_an_older_checkpoint_of_muon_resumes_where_it_was(runs):
    """The next step sees the old parameters to the bit; it moves them by the new optimizer, about as far as the old one did."""
    run, step = "saved", CHECKPOINT
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


LATER = "26d2768826f8549269f73e75291b1ffb3d1637bc"  # `eval.max_batches` and `seed` said what is held out
OLD_ROWS = {"eval.max_batches": 2, "eval.batch_size": 4}
MAKES_A_LADDER = """
import json, pathlib, sys
from jaxlm.cli import cli; from jaxlm import config; from jaxlm.config import config_files
from jaxlm.data.batches.open import open_order
from jaxlm.plan.ladder import ladder
from jaxlm.commands import ladder as program

name, folder, *overrides = sys.argv[1:]
c = config.resolve(config_files.load(name, overrides))
found, climbed = ladder.begin(c, open_order(c), pathlib.Path(folder), ladder.Asked(budgets=[2048, 4096, 8192]), name)
for place, one in enumerate(found["runs"][:-1]):  # all but the last are done
    one |= {"loss": 6 - place / 10, "bits_per_byte": {"text": 2.0}, "bytes_per_token": 3.0, "hours": 0.1}
program.keep(pathlib.Path(folder), found)
"""


def keys_of(place: pathlib.Path, run: str, **more) -> list[str]:
    """The overrides of a small run on data of seed 1."""
    keys = TINY | {"seed": 1, "workdir": place / run, "data.dir": place / "data1", "sample.prompts": "()"}
    keys |= {"optim.name": "adamw", "hardware.compile_cache": place / "cache", "plan.measure": "never"}
    keys |= {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in keys.items() if value is not None]


# As a config of today says it: neither how many batches are held out, nor the seed of the data.
TODAY = {"eval__max_batches": None, "eval__batch_size": 4, "eval__max_mb": 0.002}


@pytest.fixture(scope="module")
def later(place, tmp_path_factory) -> pathlib.Path:
    """The folder of what LATER made: the run `whole`, `saved` at its first checkpoint, `data1`, and `ladder`."""
    old_keys = {name.replace(".", "__"): value for name, value in OLD_ROWS.items()}
    with worktree(tmp_path_factory.mktemp("later"), LATER) as tree:
        argv = [f"--config={place / 'tiny.py'}", *(f"--config.{key}" for key in keys_of(place, "whole", **old_keys))]
        with start(tree, [{"argv": argv, "code": 0}]) as whole:
            finish(whole)
        words = [str(place / "tiny.py"), str(place / "ladder"), *keys_of(place, "laddered", **old_keys)]
        env = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        subprocess.run([sys.executable, "-c", MAKES_A_LADDER, *words], env=env, check=True, timeout=400)
    shutil.copytree(place / "whole", place / "saved")
    shutil.rmtree(place / f"saved/checkpoints/{STEPS}")
    lines = (place / "saved/metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "saved/metrics.jsonl").write_text("".join(x for x in lines if json.loads(x)["step"] <= CHECKPOINT))
    return place


def jaxlm(*words: str) -> subprocess.CompletedProcess:
    """`jaxlm WORDS` by the present code."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.run(
        [sys.executable, "-m", "jaxlm.cli.cli", *words], env=env, capture_output=True, text=True, timeout=400
    )


def flags(keys: list[str]) -> list[str]:
    return [f"--config.{key}" for key in keys]


def test_a_run_with_older_keys_resumes_to_the_bit_with_its_old_held_out_rows(later):
    """By a config of today, which says neither how many batches are held out nor by which seed its data was made."""
    shutil.copytree(later / "saved", later / "resumed")
    done = jaxlm("train", str(later / "tiny.py"), *flags(keys_of(later, "resumed", **TODAY)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "held out stays what it was at the beginning: the first 2 batches of 4 rows" in done.stderr
    assert metrics(later / "resumed") == metrics(later / "whole")
    assert last(later / "resumed") == last(later / "whole")
    saved = json.loads((later / "resumed/config.json").read_text())
    assert (saved["eval"]["older_batches"], saved["data"]["seed"]) == ([2, 4], -1)
    rows = [str(later / run) for run in ("whole", "resumed")]
    assert "held-out texts differ" not in jaxlm("diff", *rows).stdout
    by_eval = jaxlm("eval", str(later / "whole"), "--json")
    assert by_eval.returncode == 0, by_eval.stderr[-3000:]
    found = {row["metric"]: row["value"] for row in map(json.loads, by_eval.stdout.splitlines())}
    assert found["val/loss"] == pytest.approx(metrics(later / "whole")[str(STEPS)]["val/loss"], abs=1e-6)


def test_a_rebuild_for_an_older_run_names_the_seed_and_is_not_taken_for_its_data(later):
    """Data of recipe version 4 has another tokenizer: the run does not go on with it, and goes on with its own."""
    shutil.copytree(later / "saved", later / "rebuilt")
    keys = keys_of(later, "rebuilt", **TODAY | {"data__dir": later / "again"})
    refused = jaxlm("train", str(later / "tiny.py"), *flags(keys))
    assert refused.returncode == 2
    assert f"is not in {later / 'again'}: give --config.data.seed=1" in refused.stderr
    refused = jaxlm("train", str(later / "tiny.py"), *flags(keys), "--config.data.seed=1")
    assert refused.returncode == 2
    assert "this run's batches would differ from those it was trained on" in refused.stderr
    texts = [shards.open_data(later / name) for name in ("data1", "again")]
    assert texts[0].sha256 != texts[1].sha256
    assert "held_out" not in texts[0].manifest
    assert texts[1].held_out_texts() == texts[1].manifest["held_out"]
    done = jaxlm("train", str(later / "tiny.py"), *flags(keys_of(later, "rebuilt", **TODAY)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert last(later / "rebuilt") == last(later / "whole")


def test_an_older_ladder_is_gone_on_with(later):
    """Its last run measures the rows that those before it did."""
    before = json.loads((later / "ladder/ladder.json").read_text())
    keys = keys_of(later, "laddered", **TODAY)
    done = jaxlm("ladder", str(later / "tiny.py"), f"--out={later / 'ladder'}", *flags(keys))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "held out stays what it was at the beginning: the first 2 batches of 4 rows" in done.stderr
    after = json.loads((later / "ladder/ladder.json").read_text())
    assert after["foretold"]
    assert after["same"] == before["same"]
    run = json.loads((later / f"ladder/runs/{before['runs'][-1]['name']}/config.json").read_text())
    assert run["eval"]["older_batches"] == [2, 4]
    assert [one["name"] for one in after["runs"]] == [one["name"] for one in before["runs"]]
