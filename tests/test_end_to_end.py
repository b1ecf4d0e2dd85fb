"""Whole runs as a user starts them, in processes of their own: resumed, and of several processes."""

import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import zipfile

import pytest
import tiny_data
from documented import ROOT

from jaxlm.cli import cli
from jaxlm.run import metrics

STEPS = 24
TINY = {
    "model": {"n_layers": 1, "d_model": 64, "n_heads": 4, "d_ff": 128, "vocab_size": 384},
    "train": {"steps": STEPS, "batch_size": 8, "seq_len": 64, "eval_every_steps": 12},
    "eval": {"at_start": True, "batch_size": 8, "max_mb": 0.003},
    "checkpoint": {"every_steps": 4},
    "runs": {"supervise": "off"},
    "optim": {"warmup_steps": 4, "schedule": "constant"},  # so that the steps do not depend on how many follow
    "log": {"every_steps": 1, "tensorboard": False},
    "sample": {"prompts": "('one ',)", "every_steps": 0, "max_new_tokens": 8},
    "data": {"val_fraction": 0.1},
}
# Without evaluation and samples, which are programs to compile.
LOSSES_ALONE = {"train__eval_every_steps": 0, "eval__at_start": False, "sample__prompts": "()"}
# Keys of a record that tell of the machine, not of the model.
CLOCKS = ("time", "goodput", "wall_s", "cost_usd", "tokens_per_second", "mfu_palm", "mfu_causal")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with raw text of two sources, and a config for it."""
    root = tmp_path_factory.mktemp("e2e")
    rng, lines = random.Random(0), ["from jaxlm.configs import base", "def get_config():", "    c = base.get_config()"]
    for source, weight, documents in (("a", 3.0, 300), ("b", 1.0, 100)):
        texts = (" ".join(rng.choices(tiny_data.WORDS.split(), k=rng.randint(5, 120))) for _ in range(documents))
        (root / f"{source}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        lines.append(f"    c.data.sources.{source} = dict(path={str(root / source)!r} + '.jsonl', weight={weight})")
    lines += [f"    c.data.dir = {str(root / 'data')!r}", "    return c"]
    (root / "tiny.py").write_text("\n".join(lines) + "\n")
    return root


def command(place: pathlib.Path, workdir: str, **overrides) -> list[str]:
    keys = {f"{section}.{key}": value for section, own in TINY.items() for key, value in own.items()}
    keys |= {"workdir": place / workdir, "hardware.compile_cache": place / "cache"}
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "jaxlm.main", f"--config={place / 'tiny.py'}", *words]


def environment(devices: int = 1) -> dict:
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}


def finish(words: list[str], devices: int = 1) -> subprocess.CompletedProcess:
    done = subprocess.run(words, env=environment(devices), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train(place, workdir, *, devices: int = 1, **overrides) -> str:
    return finish(command(place, workdir, **overrides), devices).stderr


def train_in_turn(place, *runs: tuple[str, dict]) -> str:
    """Runs (workdir, overrides) one after the other in one process; what they said."""
    jobs = [{"argv": command(place, workdir, **overrides)[3:], "code": 0} for workdir, overrides in runs]
    return finish([sys.executable, str(ROOT / "tests/several_runs.py"), json.dumps(jobs)]).stderr


def results(place, workdir) -> dict[int, dict]:
    """Step -> metrics without those that depend on the clock."""
    steps = metrics.read(place / workdir / "metrics.jsonl")
    return {
        step: {k: v for k, v in record.items() if k not in CLOCKS and not k.startswith("time/")}
        for step, record in steps.items()
    }


@pytest.fixture(scope="module")
def whole(place) -> tuple[dict[int, dict], str]:
    """(Metrics of a run that nothing happened to, what it said; it was started again at its end)."""
    said = train_in_turn(place, ("whole", {}), ("whole", {}))
    return results(place, "whole"), said


@pytest.fixture(scope="module")
def uninterrupted(whole) -> dict[int, dict]:
    return whole[0]


def test_the_run_learns_evaluates_samples_and_is_then_complete(place, whole):
    found, said = whole
    assert list(found) == list(range(STEPS + 1))
    assert found[STEPS]["val/loss"] < found[0]["val/loss"] - 1
    last = found[STEPS]
    assert {"val/a/loss", "val/a/bits_per_byte", "val/b/bits_per_byte", "train/grad_norm/layers/mlp"} <= set(last)
    sample = json.loads((place / "whole/samples" / f"{STEPS}.jsonl").read_text())
    assert sample["prompt"] == "one "
    assert sample["text"]
    assert "complete" in said
    steps = [json.loads(line)["step"] for line in (place / "whole/metrics.jsonl").read_text().splitlines()]
    assert steps.count(STEPS - 1) == 1


def test_sample_trace_and_tokenize_read_the_run(place, uninterrupted, capsys):
    run = f"--config.workdir={place / 'whole'}"
    sample = [sys.executable, "-m", "jaxlm.cli.cli", "sample", run, "--prompt=one two", "--checkpoint=best", "--json"]
    record = json.loads(finish(sample).stdout)
    assert record["prompt"] == "one two"
    assert record["text"]
    texts = {
        source: [json.loads(line)["text"] for line in (place / f"{source}.jsonl").read_text().splitlines()]
        for source in "ab"
    }
    assert cli.main(["trace", run, "--step=5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["slot"] for row in rows} == set(range(8))
    for row in rows:
        file, line = row["document"].rsplit(":", 1)
        assert file.endswith(f"{row['source']}.jsonl")
        assert row["text"].strip("\N{REPLACEMENT CHARACTER}") in texts[row["source"]][int(line) - 1]
    sizes = ["--config.model.vocab_size=384", "--config.data.val_fraction=0.1"]
    assert cli.main(["tokenize", f"--config={place / 'tiny.py'}", run, *sizes]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["source", "a", "b"]


def test_more_steps_continue_and_the_comparison_can_fail(place, uninterrupted):
    half, seed = {"train__steps": STEPS // 2}, {"seed": 1, "train__steps": 6, "data__dir": place / "data_seed"}
    runs = ("more", LOSSES_ALONE | half), ("more", LOSSES_ALONE), ("seed", LOSSES_ALONE | seed)
    assert f"resuming at step {STEPS // 2}" in train_in_turn(place, *runs)
    more, other = results(place, "more"), results(place, "seed")
    steps = range(1, STEPS + 1)
    assert [more[s]["train/loss"] for s in steps] == [uninterrupted[s]["train/loss"] for s in steps]
    assert other[3]["train/loss"] != uninterrupted[3]["train/loss"]


def test_a_wheel_carries_the_configs_and_prompts(tmp_path):
    """So `jaxlm train --config=quickstart` works from any folder after `pip install .`."""
    root, source = ROOT, tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for name in ("jaxlm", "configs"):
        shutil.copytree(root / name, source / name, symlinks=True)
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", *build], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"jaxlm/configs/{p.name}" for p in (root / "configs").glob("*.py")} <= set(names)
    assert {"jaxlm/configs/published.toml", "jaxlm/eval/redteam.toml"} <= set(names)
    assert not any(name.startswith(("configs/", "tests/")) for name in names)


@pytest.mark.faults
def test_several_processes_equal_one(place, uninterrupted):
    """Two processes hold each row's first half, the others its second one."""
    n, workdir = 4, "processes"
    with socket.socket() as server:
        server.bind(("localhost", 0))
        keys = {"distributed__coordinator": f"localhost:{server.getsockname()[1]}", "distributed__num_processes": n}
    keys |= {"mesh__fsdp": 2, "mesh__context": 2, "mesh__data": 1}
    keys |= {"checkpoint__every_steps": 6, "checkpoint__keep_last": 1}
    commands = [command(place, workdir, distributed__process_id=i, **keys) for i in range(n)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(words, env=environment(), stderr=pipe, text=True) for words in commands]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * n, "\n".join(error[-3000:] for error in errors)
    found = results(place, workdir)
    for step, record in uninterrupted.items():
        for key in ("train/loss", "train/grad_norm", "val/loss", "val/b/bits_per_byte"):
            if key in record:
                assert found[step][key] == pytest.approx(record[key], rel=1e-6), (step, key)
    losses = {step: record["val/loss"] for step, record in found.items() if "val/loss" in record and step}
    kept = {STEPS, min(losses, key=losses.get)}  # the last one, and the best one that was evaluated
    assert {int(path.name) for path in (place / workdir / "checkpoints").iterdir()} == kept
    said = [(place / run / "samples" / f"{STEPS}.jsonl").read_text() for run in (workdir, "whole")]
    assert said[0] == said[1]
