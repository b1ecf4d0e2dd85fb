"""metrics.jsonl, the progress line, speed and dollars."""

import io
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError, HardwareConfig, LogConfig
from jaxlm.plan import flops
from jaxlm.train import metrics


def test_json_lines_drop_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "wall_s": 2.5}\n{"step": 2, "wal')
    lines = metrics.JsonLines(path)
    assert lines.last == {"step": 1, "wall_s": 2.5}
    lines.write({"step": 2, "train/loss": float("nan")})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {"step": 2, "train/loss": None}


def test_held_out_losses_are_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.held_out_losses(path) == {}
    lines = [
        '{"step": 1, "val/loss": 3.0}',
        '{"step": 2, "train/loss": 1}',
        '{"step": 1, "val/loss": 2.5}',
        "{broken val/",
    ]
    lines += ['{"step": 4, "val/loss": null}', '{"step": 5, "val/a/loss": 2}', '{"step": 6, "val/lo']
    path.write_text("\n".join(lines))
    found = metrics.held_out_losses(path)
    assert {step: loss for step, loss in found.items() if loss == loss} == {1: 2.5}
    assert sorted(found) == [1, 4, 5]  # evaluated, though without a loss to compare


def test_later_lines_of_a_step_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "b": 3}\n{"step": 2, "a": 4}\n')
    assert metrics.read(path) == {1: {"step": 1, "a": 1}, 2: {"step": 2, "a": 4, "b": 3}}


class Terminal(io.StringIO):
    def isatty(self):
        return True


RECORD = {"step": 5, "train/loss": 2.0, "tokens_per_second": 1500.0, "mfu_palm": 0.5, "cost_usd": 1.5, "eta_s": 3725}


def test_progress_is_one_line_in_a_terminal_and_plain_lines_elsewhere():
    for stream, ends in ((Terminal(), 0), (io.StringIO(), 2)):
        progress = metrics.Progress(10, stream)
        progress.update(RECORD)
        progress.update(RECORD)
        assert stream.getvalue().count("\n") == ends
        for part in ("step 5/10", "loss 2.0000", "1.5k tokens/s", "MFU 50.0%", "$1.50", "ETA 1h02m"):
            assert part in stream.getvalue()
    terminal = Terminal()
    progress = metrics.Progress(10, terminal)
    progress.update(RECORD)
    progress.message("held-out 3")
    assert terminal.getvalue().endswith("\rheld-out 3\n")


def test_meter_counts_dollars_of_earlier_starts_and_leaves_pauses_out_of_the_speed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    meter = metrics.Meter(
        tokens_per_step=100, flops_palm=10.0, flops_causal=5.0, peak_flops=2000.0, usd_per_hour=3600.0, wall_s=50.0
    )
    now[0] = 10.0
    assert "tokens_per_second" not in meter.measure(1, 11)
    now[0] = 30.0
    meter.pause(10.0)
    record = meter.measure(6, 11)
    assert record == {
        "step": 6,
        "tokens": 600,
        "wall_s": 80.0,
        "cost_usd": 80.0,
        "tokens_per_second": 50.0,
        "eta_s": 10.0,
        "mfu_palm": 0.25,
        "mfu_causal": 0.125,
    }


def test_a_run_of_a_config_is_metered_on_all_devices():
    c = config.resolve(config_files.load("quickstart", ["workdir=w", "train.batch_size=16", "train.seq_len=128"]))
    meter = metrics.make_meter(c.model, c.train, HardwareConfig(3600.0, 2.0, "", ()), wall_s=50.0)
    record = meter.clock(3)
    assert record["tokens"] == 3 * 16 * 128
    assert record["cost_usd"] == pytest.approx(record["wall_s"], abs=1e-2)
    assert 50 <= record["wall_s"] < 60
    meter.measure(3, 10)
    record = meter.measure(4, 10)
    peak = 2e12 * jax.device_count()
    per_token = flops.flops_per_token(c.model, 128)
    assert record["mfu_palm"] == pytest.approx(record["tokens_per_second"] * per_token.palm / peak)
    assert record["mfu_causal"] == pytest.approx(record["tokens_per_second"] * per_token.causal / peak)


def test_tensorboard_files_hold_the_scalars(tmp_path):
    writer = metrics.Writer(tmp_path, LogConfig(every_steps=1, tensorboard=True, wandb=""), {})
    writer.write({"step": 3, "train/loss": 1.25})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()


def test_wandb_offline_writes_one_run_over_restarts(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    program = f"""
import pathlib
from jaxlm.config import LogConfig
from jaxlm.train import metrics
log = LogConfig(every_steps=1, tensorboard=False, wandb="offline")
writer = metrics.Writer(pathlib.Path({str(tmp_path)!r}), log, {{"seed": 1}})
writer.write({{"step": 3, "train/loss": 1.25}})
writer.close()
"""
    for _ in range(2):  # a process of its own each time, as in a run: the client talks to a service in the background
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"WANDB_SILENT": "true"}, check=True, timeout=120
        )
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_wandb_missing_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        metrics.check(LogConfig(every_steps=1, tensorboard=False, wandb="offline"))
    metrics.check(LogConfig(every_steps=1, tensorboard=False, wandb=""))
