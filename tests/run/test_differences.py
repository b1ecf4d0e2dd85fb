"""What differs between two runs, and where they part."""

import json
import random

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.run import differences, ledger


def make_run(folder, losses, *, lr=1e-3, jax="0.10.2", usd=1.0, workdir="x"):
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"optim": {"lr": lr}, "workdir": workdir, "train": {"steps": len(losses)}})
    )
    start = {
        "git": {"commit": "abc", "dirty": False},
        "packages": {"jax": jax},
        "usd_per_hour": usd,
        "manifest_sha256": "m",
    }
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    lines = [{"step": step, "train/loss": loss, "wall_s": random.random()} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def curve(seed, shift=0.0, steps=200):
    rng = random.Random(seed)
    return [3 + 5 / step + rng.gauss(0, 0.05) + shift for step in range(1, steps + 1)]


def test_two_starts_of_one_seed_are_the_same_to_the_last_bit(tmp_path):
    a = make_run(tmp_path / "a", curve(0))
    b = make_run(tmp_path / "b", curve(0), workdir="y")
    for folder in (a, b):  # what is evaluated before the first step belongs to no step
        log = folder / "metrics.jsonl"
        log.write_text('{"step": 0, "val/loss": 9.0}\n' + log.read_text())
    found = differences.compare(a, b)
    assert (found["inputs"], found["parted"], found["steps"]) == ([], None, 200)
    assert "identical to the last bit over all 200 common steps, up to step 200" in found["verdict"]
    log.write_text(log.read_text().replace("9.0", "9.5"))
    assert differences.compare(a, b)["parted"]["step"] == 0


def test_a_changed_key_is_named_with_the_step_at_which_they_part(tmp_path):
    losses = curve(0)
    a = make_run(tmp_path / "a", losses)
    b = make_run(tmp_path / "b", losses[:49] + [loss + 0.2 for loss in losses[49:]], lr=2e-3, jax="0.11.0", usd=2.0)
    found = differences.compare(a, b)
    assert [(row["what"], row["name"], row["a"], row["b"]) for row in found["inputs"]] == [
        ("config", "optim.lr", 1e-3, 2e-3), ("packages", "jax", "0.10.2", "0.11.0"), ("price", "usd_per_hour", 1.0, 2.0),
    ]  # fmt: skip
    assert (found["parted"]["step"], found["parted"]["metric"]) == (50, "train/loss")
    assert "more than noise" in found["verdict"]
    assert found["loss"]["mean"] == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(1, 6))
def test_two_seeds_are_within_the_noise(tmp_path, seed):
    found = differences.compare(make_run(tmp_path / "a", curve(0)), make_run(tmp_path / "b", curve(seed)))
    assert found["parted"]["step"] == 1
    assert abs(found["loss"]["mean"]) < 3 * found["loss"]["error"]


def test_a_real_difference_is_told_from_noise(tmp_path):
    found = differences.compare(make_run(tmp_path / "a", curve(0)), make_run(tmp_path / "b", curve(1, shift=0.05)))
    assert "more than noise" in found["verdict"]


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    a, b = make_run(tmp_path / "a", curve(0)), make_run(tmp_path / "b", [])
    with pytest.raises(ConfigError, match="no step in common"):
        differences.compare(a, b)
    with pytest.raises(ConfigError, match=r"no run in .* has no metrics\.jsonl"):
        differences.compare(a, tmp_path)
    with pytest.raises(ConfigError, match=r"no run in .*/nowhere: there is no such folder"):
        differences.compare(a, tmp_path / "nowhere")


def test_secrets_are_not_shown(tmp_path):
    a, b = (make_run(tmp_path / name, curve(0)) for name in "ab")
    for run, secret in ((a, "HIDE1"), (b, "HIDE2")):
        config = json.loads((run / "config.json").read_text())
        config["notify"] = {"urls": [f"https://{secret}.example.com/{secret}" if run is a else f"mailto://{secret}"]}
        config["checkpoint"] = {"mirror": f"s3://me:{secret}@{run.name}"}
        (run / "config.json").write_text(json.dumps(config))
    found = {row["name"]: (row["a"], row["b"]) for row in differences.compare(a, b)["inputs"]}
    assert found["checkpoint.mirror"] == ("s3://***@a", "s3://***@b")
    assert "HIDE2" not in str(found)


def test_what_changed_since_the_last_start(tmp_path):
    """Choices that follow from a key are told once; what only says how it is logged is not told; nor is the first start."""
    keys = [f"workdir={tmp_path}", f"data.tokenizer={tmp_path}/t", "checkpoint.mirror=s3://b/x"]
    c = config.resolve(config_files.load("quickstart", keys))
    found = {"manifest_sha256": "0", "hardware": {"device_kind": "A100", "devices": 1, "host": "a"}}
    found |= {"choices": {"remat": "none", "attention": "xla"}}
    assert differences.since_last_start(tmp_path, c, found) == []
    ledger.record_start(tmp_path, c, step=0, changed=[], **found)
    assert differences.since_last_start(tmp_path, c, found) == []
    new = [f"data.tokenizer={tmp_path}/../{tmp_path.name}/t"]  # another name of the same folder
    new += ["checkpoint.mirror=s3://b//x"]  # a URL is no path
    new += ["model.remat=full", "log.every_steps=7", "notify.urls=('https://hooks.example/SECRET',)"]
    c = config.resolve(config_files.load("quickstart", [*keys, *new]))
    found |= {"hardware": {"device_kind": "H100", "devices": 1, "host": "b"}}
    found |= {"choices": {"remat": "full", "attention": "cudnn"}}
    changed = differences.since_last_start(tmp_path, c, found)
    assert differences.words(changed) == [
        "model.remat was none, is full",
        "checkpoint.mirror was s3://b/x, is s3://b//x",
        "notify.urls was none, is ['https://hooks.example/***']",
        "hardware.device_kind was A100, is H100",
        "attention was xla, is cudnn",
    ]
    many = [{"name": f"k{i}", "was": 1.0, "is": None} for i in range(20)]
    assert differences.words(many)[-2:] == ["k11 was 1, is none", "8 more, in run.json"]
    commits = [{"name": "code.commit", "was": "0123456789abcdef" * 2 + "01234567", "is": "f" * 40}]
    assert differences.words(commits) == ["code.commit was 012345678, is fffffffff"]
    (tmp_path / "config.json").write_text("{")
    assert differences.since_last_start(tmp_path, c, found) == []
