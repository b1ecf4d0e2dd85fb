"""TensorBoard and Weights & Biases: nothing is lost over restarts, and nothing that fails there stops a run."""

import contextlib
import json
import os
import struct
import subprocess
import sys

import pytest

from jaxlm.config import ConfigError, LogConfig
from jaxlm.run import metrics

BOARD = LogConfig(every_steps=1, parameters=False, tensorboard=True, wandb="")


def events(path):
    """The events of a TensorBoard file, as tensorboardX's protocol buffers; checks each checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, found = path.read_bytes(), []
    while data:
        size = struct.unpack("<Q", data[:8])[0]
        body, crcs = data[12 : 12 + size], (data[8:12], data[12 + size : 16 + size])
        assert crcs == tuple(struct.pack("<I", masked_crc32c(part)) for part in (data[:8], body))
        found.append(Event.FromString(body))
        data = data[16 + size :]
    return found


def curve(folder, name):
    """The (step, value) that TensorBoard shows: of all files in order, without what a later start did again."""
    shown = []
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in events(path):
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                shown = [(step, value) for step, value in shown if step < event.step]
            shown += [(event.step, v.simple_value) for v in event.summary.value if v.tag == name]
    return shown


def two_starts(folder, config):
    """A start that logs steps 1 to 30, and one that goes on from step 20 to 30 with other values."""
    for first, value in ((1, 1.0), (21, 2.0)):
        writer = metrics.Writer(folder, config, {"seed": 1}, first=first)
        for step in range(first, 31):
            writer.write({"step": step, "time": 1.7e9, "train/loss": value, "note": "no scalar"})
        writer.close()


def test_tensorboard_shows_the_second_start_of_what_was_done_twice(tmp_path):
    two_starts(tmp_path, BOARD)
    assert curve(tmp_path, "train/loss") == [(s, 1.0) for s in range(1, 21)] + [(s, 2.0) for s in range(21, 31)]
    assert not curve(tmp_path, "time")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 31), *range(21, 31)]


def test_tensorboard_itself_reads_them_so(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    two_starts(tmp_path, BOARD)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in found] == curve(tmp_path, "train/loss")


def test_a_full_disk_blocks_no_logger_and_is_made_up_for(tmp_path, monkeypatch):
    """tensorboardX's own writer waits for ever at the eleventh scalar."""
    writer, write = metrics.Writer(tmp_path, BOARD, {}), os.write

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    writer.write({"step": 1, "train/loss": 1.0})
    monkeypatch.setattr(metrics.os, "write", full)
    for step in range(2, 50):
        writer.write({"step": step, "train/loss": 1.0, "train/lr": 2.0})
    monkeypatch.setattr(metrics.os, "write", write)
    writer.write({"step": 50, "train/loss": 1.0})
    writer.close()
    assert [step for step, _ in curve(tmp_path, "train/loss")] == list(range(1, 51))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50


def test_one_that_can_t_be_closed_leaves_the_others_whole(tmp_path, monkeypatch):
    writer = metrics.Writer(tmp_path, BOARD, {})

    def broken(self):
        raise RuntimeError("broken")

    monkeypatch.setattr(metrics.TensorBoard, "close", broken)
    closed = []
    monkeypatch.setattr(metrics.JsonLines, "close", lambda self: closed.append(True))
    with contextlib.suppress(RuntimeError):
        writer.close()
    assert closed


def offline(path):
    """The records of an offline run's file: the log format of LevelDB, with W&B's header."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


@pytest.mark.faults
def test_wandb_keeps_what_was_done_twice_and_no_secret(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    program = f"""
import pathlib, sys
from jaxlm.host.redact import redact
from jaxlm.config import LogConfig
from jaxlm.run import metrics
first, last, value = map(int, sys.argv[1:4])
config = redact({{"notify": {{"urls": ("https://hooks.example.org/s3cret",)}}}})
writer = metrics.Writer(pathlib.Path({str(tmp_path)!r}), LogConfig(1, False, False, "offline"), config, first=first)
for step in range(first, last + 1):
    writer.write({{"step": step, "train/loss": value}})
writer.close()
"""
    for numbers in (("1", "30", "1"), ("21", "30", "2")):  # a process each, as in a run: W&B's client is a service
        command = [
            sys.executable,
            "-c",
            program,
            *numbers,
            "--config.notify.urls=('https://hooks.example.org/s3cret',)",
        ]
        subprocess.run(command, env=os.environ | {"WANDB_SILENT": "true"}, check=True, timeout=120)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # one run
    rows = []
    for file in files:
        records = offline(file)
        rows += [
            {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        metrics = [record.metric for record in records if record.HasField("metric")]
        assert {m.glob_name: m.step_metric for m in metrics if m.glob_name} == {"*": "step"}
    shown = [(row["step"], row["train/loss"]) for row in rows]
    assert shown == [(s, 1) for s in range(1, 31)] + [(s, 2) for s in range(21, 31)]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


def test_a_client_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    class Broken:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, values):
            raise BrokenPipeError("the service is gone")

        def finish(self):
            raise ConnectionResetError("the service is gone")

    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setattr(wandb, "init", lambda **settings: Broken())
    writer = metrics.Writer(
        tmp_path, LogConfig(every_steps=1, parameters=False, tensorboard=False, wandb="offline"), {}
    )
    for step in (1, 2):
        writer.write({"step": step, "train/loss": 1.0})
    writer.close()
    assert capsys.readouterr().err == "W&B can't be written to: the service is gone; training goes on\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_client_that_does_not_start_is_one_line(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")

    def refuse(**settings):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(wandb, "init", refuse)
    (tmp_path / "wandb_id").write_bytes(b"\x00\xff")
    writer = metrics.Writer(tmp_path, LogConfig(every_steps=1, parameters=False, tensorboard=False, wandb="online"), {})
    writer.write({"step": 1, "train/loss": 1.0})
    writer.close()
    assert capsys.readouterr().err == "W&B can't be used: no network; training goes on\n"


def test_wandb_missing_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        metrics.check(LogConfig(every_steps=1, parameters=False, tensorboard=False, wandb="offline"))
    metrics.check(LogConfig(every_steps=1, parameters=False, tensorboard=False, wandb=""))
