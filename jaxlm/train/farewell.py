"""What is done when a run has ended for good: messages, and the command that stops paying. Imports no JAX.

The outermost process does it, which is the supervisor if there is one, so that it happens after a crash too.
"""

import dataclasses
import datetime
import pathlib
import time

from jaxlm.config import Config, ConfigError, RunError
from jaxlm.files import is_step
from jaxlm.train import deaths, ledger, mirrors, notify
from jaxlm.train.scores import Scores

READ_S = 10.0  # that the storage has for each read of the run's folder; what it does not tell by then is unknown
_AROUND_COPY_S = 60.0  # for all that is read around the copy to the mirror
_LOOK_S = 2.0  # between two looks for the first process's word that all is mirrored
_EVENTS = {0: "end", 3: "gate", 4: "end"}


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of the run, as run.json may know it.

    Attributes:
      pid: the process that trained; None if it may be one of another host.
      since: the Unix seconds before which it did not begin.
    """

    pid: int | None
    since: float

    def ended(self, folder: pathlib.Path) -> dict:
        """Returns how run.json says that this start ended; {} if it died before it could say so, or nothing can be read."""
        books = deaths.within(READ_S, lambda: ledger.read(folder)) or {"starts": []}
        last = books["starts"][-1] if books["starts"] else {}
        try:
            began = datetime.datetime.fromisoformat(last["time"]).timestamp()
        except (LookupError, TypeError, ValueError):
            return {}
        ours = began >= self.since and self.pid in (None, last.get("pid"))
        return (last.get("ended") or {}) if ours else {}


def say_farewell(config: Config, code: int, start: Start, signalled: int | None = None) -> None:
    """Tells how the run ended, and runs `runs.on_exit` once the mirror holds all. Never raises.

    Args:
      code: the exit code.
      start: the run's last start.
      signalled: the signal that asked the run to stop; None if none did.
    """
    folder = pathlib.Path(config.workdir)
    ended = start.ended(folder)
    why, step = ended.get("why") or f"exit code {code}", ended.get("step")
    event = ended.get("cause") if ended.get("cause") == "budget" else _EVENTS.get(code, "crash")
    notify.tell(config.notify, event, f"{folder.name} ended with exit code {code}: {why}", folder, step)
    if any(
        (config.runs.on_exit.done, config.runs.on_exit.gate, config.runs.on_exit.failed, config.runs.on_exit.stopped)
    ):
        by_hand = notify.at_terminal(signalled)
        mirrored = by_hand or is_mirrored(config, folder, start)
        notify.at_exit(config.runs, code, why, mirrored, folder, step=step, by_hand=by_hand)
    notify.wait()


def is_mirrored(config: Config, folder: pathlib.Path, start: Start) -> bool:
    """True if the mirror holds the newest checkpoint, or there is none. Copies it first where a crash prevented that.

    What can't be read may be a checkpoint that the mirror does not hold.
    """
    if not config.checkpoint.mirror:
        return True
    checkpoints = deaths.within(READ_S, lambda: _checkpoints(folder))
    if not checkpoints:
        return checkpoints is not None
    if config.distributed.process_id > 0:
        return _heard(folder, start, config.checkpoint.mirror_timeout_s)
    if start.ended(folder).get("mirrored"):
        return True
    if deaths.within(READ_S, lambda: Scores(config.checkpoint).read(folder)) is None:
        return False
    seconds = config.checkpoint.mirror_timeout_s + _AROUND_COPY_S
    return bool(deaths.within(seconds, lambda: _copied(config, folder, checkpoints)))


def _checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints, whole or not."""
    try:
        return [path for path in (folder / "checkpoints").iterdir() if path.name[:1].isdecimal()]
    except FileNotFoundError:
        return []


def _copied(config: Config, folder: pathlib.Path, checkpoints: list[pathlib.Path]) -> bool:
    """Copies the newest checkpoint that was verified; returns True if the mirror then holds the newest of all."""
    try:
        mirror = mirrors.of_run(config, folder, Scores(config.checkpoint))
        verified = [path for path in checkpoints if (path / "checksums.json").exists()]
        if steps := [int(path.name) for path in verified if is_step(path.name)]:
            mirror.begin(max(steps))
        return mirror.close(config.checkpoint.mirror_timeout_s)
    except (ConfigError, RunError):
        return False


def _heard(folder: pathlib.Path, start: Start, seconds: float) -> bool:
    """Waits for what the first process, on another host, says in run.json."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if start.ended(folder).get("mirrored"):
            return True
        time.sleep(_LOOK_S)
    return False
