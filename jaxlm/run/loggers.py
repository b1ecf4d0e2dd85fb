"""Writes a run's records to metrics.jsonl, TensorBoard and Weights & Biases. None of them can stop or delay training."""

import contextlib
import importlib.util
import math
import pathlib
import platform
import re
import secrets
import struct
import sys
import time
import typing
from collections.abc import Callable

from jaxlm.config import ConfigError, LogConfig, pip_install
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.host.redact import redact
from jaxlm.run.metrics import Appender, JsonLines

_FINISH_S = 60.0  # how long the end of a run waits for W&B's servers


class Writer:
    """Writes each record to metrics.jsonl, and to TensorBoard and W&B if the config asks for them."""

    def __init__(
        self,
        workdir: pathlib.Path,
        config: LogConfig,
        run_config: dict,
        first: int = 1,
        on_full: Callable[[], None] | None = None,
    ):
        self._json = JsonLines(workdir / "metrics.jsonl", on_full)
        self._others: list[TensorBoard | WandB] = []
        if config.tensorboard:
            self._others.append(TensorBoard(workdir / "tensorboard", first, on_full))
        if config.wandb:
            self._others.append(WandB(workdir, config.wandb, run_config))

    def write(self, record: dict[str, float]) -> None:
        """Writes one record, which must have `step`. Does not raise."""
        self._json.write(record)
        scalars = {k: v for k, v in record.items() if k not in ("step", "time") and isinstance(v, int | float)}
        for other in self._others:
            other.write(record["step"], scalars)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # if one fails, the others are still closed
            for each in (*self._others, self._json):
                stack.callback(each.close)


def check(config: LogConfig) -> None:
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"config.log.wandb={config.wandb!r} needs Weights & Biases: {pip_install('wandb')}")


class _Guarded:
    """A third-party logger: if it fails, one line says so, and the run goes on."""

    _failed = False

    @contextlib.contextmanager
    def _guard(self, problem: str) -> typing.Iterator[None]:
        try:
            yield
        except Exception as error:  # it may raise anything, from its own errors to a broken pipe
            if not self._failed:
                say(f"{problem}: {str(error).strip() or type(error).__name__}; training goes on".replace("\n", " "))
            self._failed = True


class TensorBoard(_Guarded):
    """Writes an event file for TensorBoard, one for each start. tensorboardX creates the events.

    tensorboardX's writer is not used: once the disk was full its thread is dead, and writing an eleventh scalar hangs.
    """

    def __init__(self, folder: pathlib.Path, first: int, on_full: Callable[[], None] | None = None):
        self._file: Appender | None = None
        with self._guard("TensorBoard can't be used"):
            self._open(folder, first, on_full)

    def _open(self, folder: pathlib.Path, first: int, on_full: Callable[[], None] | None) -> None:
        # tensorboardX imports PyTorch if it is installed, for the name of a type, which takes seconds. With None in
        # sys.modules that import fails at once.
        absent = "torch" not in sys.modules
        if absent:
            sys.modules["torch"] = None
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        finally:
            if absent:
                del sys.modules["torch"]
        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._scalar, self._crc = summary.scalar, record_writer.masked_crc32c
        # TensorBoard reads the files in the order of their names.
        self._file = Appender(folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}", on_full)
        self._append(file_version="brain.Event:2")
        self._append(step=first, session_log=self._session(status=self._session.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        # Non-finite values are no points of a curve, and tensorboardX would warn each time.
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        if self._file and finite:
            with self._guard("TensorBoard can't be written to"):
                summaries = [self._scalar(name, value) for name, value in finite.items()]
                for other in summaries[1:]:
                    summaries[0].MergeFrom(other)
                self._append(step=step, summary=summaries[0])

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _append(self, **parts) -> None:
        """Appends an event as a TFRecord: its length and its bytes, each with a checksum."""
        data = self._event(wall_time=time.time(), **parts).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.append(length + struct.pack("<I", self._crc(length)) + data + struct.pack("<I", self._crc(data)))


class WandB(_Guarded):
    """Writes to Weights & Biases, which drops records of steps before its latest step.

    So `step` is a metric, the x axis of the others: after a resume, the repeated steps appear twice.
    """

    def __init__(self, workdir: pathlib.Path, mode: str, run_config: dict):
        self._run: typing.Any = None
        with self._guard("W&B can't be used"):
            import wandb  # here, because it is large and seldom used

            settings = {"finish_timeout": _FINISH_S, "finish_timeout_raises": True}
            if redact(sys.argv) != sys.argv:
                settings["x_disable_meta"] = True  # W&B would send the command line
            self._run = wandb.init(
                project="jaxlm",
                name=workdir.name,
                id=_wandb_id(workdir / "wandb_id"),
                resume="allow",
                dir=str(workdir),
                mode=mode,
                config=run_config,
                settings=wandb.Settings(**settings),
            )
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._run:
            with self._guard("W&B can't be written to"):
                self._run.log({"step": step} | scalars)

    def close(self) -> None:
        """Ends W&B's run; waits up to a minute for its servers."""
        if self._run:
            with self._guard("W&B did not finish (`wandb sync` sends what is left)"):
                self._run.finish()


def _wandb_id(path: pathlib.Path) -> str:
    """Returns one id for all starts of a run, so that W&B shows one curve."""
    saved = path.read_text(errors="replace") if path.exists() else ""
    if not re.fullmatch(r"[0-9a-z]{8}", saved):
        saved = secrets.token_hex(4)
        files.write_atomically(path, saved.encode())
    return saved
