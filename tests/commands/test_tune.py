"""`jaxlm tune` from the command line to overrides that train accepts."""

import json
import signal

import pytest
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.models import layers
from jaxlm.ops import attention
from jaxlm.plan.tune import tune as search

TINY = keys("""
    model.attention=xla
    model.n_layers=1 model.d_model=32 model.n_heads=2 model.d_ff=64 model.vocab_size=128 train.batch_size=16
    train.seq_len=16 train.microbatch_size=16 tune.remat=('none',) tune.microbatch_sizes=(8,16)
    tune.attention=('xla',) tune.scan_layers=(False,) tune.tile_tokens=(0,) tune.steps=2 loss.tile_tokens=0
    hardware.usd_per_hour=2.0 hardware.compile_cache=
""")


def tune(tmp_path, **overrides) -> int:
    given = TINY | {"data.dir": tmp_path / "none", "workdir": tmp_path} | overrides
    return cli.main(["tune", "--json", "--config=base", *(f"--config.{k}={v}" for k, v in given.items())])


def test_prints_trials_and_writes_overrides_that_train_accepts(tmp_path, capsys):
    assert tune(tmp_path) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert {(r["microbatch_size"], r["remat"]) for r in rows} == {(8, "none"), (16, "none")}
    first = rows[0]
    assert first["tokens_per_second"] == max(r["tokens_per_second"] for r in rows)
    dollars = 2.0 / 3600 / first["tokens_per_second"] * 1e9
    assert first["usd_per_billion_tokens"] == pytest.approx(dollars, rel=0.02, abs=0.01)
    assert first["predicted_gb"] > 0
    assert first["measured_gb"] is None  # a CPU does not report it
    assert "random tokens instead of data" in said.err
    overrides = [line.removeprefix("--config.") for line in (tmp_path / "tuned.txt").read_text().split()]
    tuned = config.resolve(config_files.load("local_35m", ["workdir=w", *overrides]))
    assert (tuned.train.microbatch_size, tuned.model.remat) == (first["microbatch_size"], first["remat"])


@pytest.mark.parametrize(("program", "quantize"), [("sft", "nf4"), ("dpo", "none"), ("reward", "none")])
def test_post_training_is_tuned_on_batches_of_its_own_shape(program, quantize, tmp_path, capsys):
    given = {"program": program, "adapter.kind": "lora", "adapter.quantize": quantize, "train.seq_len": 64}
    assert tune(tmp_path, **given, **{"tune.microbatch_sizes": "(16,)", "tune.steps": 1}) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["microbatch_size"], row["note"]) == (16, "")
    assert row["tokens_per_second"] > 0


def test_a_backend_that_cannot_run_costs_no_other(tmp_path, capsys, monkeypatch):
    """Such as tokamax where it is not installed: it is found out by trying."""
    real = attention.attention

    def absent(*args, backend, **kwargs):
        if backend == "blocked":
            raise ValueError("attention backend 'blocked' needs the package")
        return real(*args, backend=backend, **kwargs)

    monkeypatch.setattr(layers, "attention", absent)
    given = {"tune.attention": "('xla', 'blocked')", "tune.microbatch_sizes": "(16,)"}
    assert tune(tmp_path, **given) == 0
    rows = {row["attention"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["xla"]["tokens_per_second"] > 0
    assert (rows["blocked"]["tokens_per_second"], rows["blocked"]["note"][:6]) == (None, "failed")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tune.remat": "('some',)"}, "'some': choose one of none, names, dots, full"),
        ({"tune.microbatch_sizes": "(3,)"}, "3 must divide train.batch_size=16"),
        ({"tune.attention": "('cudnn',)"}, "'cudnn' is not one of"),
        ({"tune.tile_tokens": "()"}, "nothing to try for tile_tokens"),
        ({"tune.tile_tokens": "(-5,)"}, "tune.tile_tokens=(-5,)"),
    ],
)
def test_impossible_candidates_are_one_line(tmp_path, capsys, overrides, words):
    assert tune(tmp_path, **{"mesh.data": 1, "mesh.fsdp": -1, **overrides}) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
    assert not (tmp_path / "tuned.txt").exists()


def test_where_the_overrides_go_is_tried_first(tmp_path, capsys):
    (tmp_path / "tuned.txt").mkdir()
    assert tune(tmp_path) == 2
    assert "tuned.txt can't be written: Is a directory; give another file by --out=FILE" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    real = search.Bench.trial

    def interrupted(self, candidate):
        trial = real(self, candidate)
        signal.raise_signal(signal.SIGINT)
        return trial

    monkeypatch.setattr(search.Bench, "trial", interrupted)
    assert tune(tmp_path) == 4
    said = capsys.readouterr()
    (row,) = [json.loads(line) for line in said.out.splitlines()]
    assert "stopped: the results below are of the candidates tried so far" in said.err
    assert f"--config.train.microbatch_size={row['microbatch_size']}" in (tmp_path / "tuned.txt").read_text()


def test_ctrl_c_before_anything_was_timed_blames_no_limit(tmp_path, capsys, monkeypatch):
    def interrupted(self, candidate):
        signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    monkeypatch.setattr(search.Bench, "trial", interrupted)
    assert tune(tmp_path) == 4
    said = capsys.readouterr().err
    assert "stopped: nothing was timed yet" in said
    assert "nothing ran in" not in said


def test_no_time_ends_in_one_line(tmp_path, capsys):
    assert tune(tmp_path, **{"tune.max_seconds": 0, "train.microbatch_size": 16}) == 1
    assert "nothing ran in " in capsys.readouterr().err
