"""What is done when a run has ended for good: messages, and the command that stops paying. Imports no JAX.

The outermost process does it, which is the supervisor if there is one, so that it happens after a crash too.
"""

import pathlib
import time

from jaxlm.config import Config, ConfigError, RunError
from jaxlm.train import ledger, notify
from jaxlm.train.checkpoints import mirror

_LOOK_S = 2.0  # between two looks for the first process's word that all is mirrored
_EVENTS = {0: "end", 3: "gate", 4: "end"}


def say_farewell(config: Config, code: int, signalled: int | None = None) -> None:
    """Tells how the run ended, and runs `runs.on_exit` once the mirror holds all. Never raises.

    Args:
      code: the exit code.
      signalled: the signal that asked the run to stop; None if none did.
    """
    folder = pathlib.Path(config.workdir)
    starts = ledger.read(folder)["starts"] if (folder / "run.json").is_file() else []
    ended = (starts[-1].get("ended") if starts else None) or {}
    why, step = ended.get("why") or f"exit code {code}", ended.get("step")
    event = ended.get("cause") if ended.get("cause") == "budget" else _EVENTS.get(code, "crash")
    notify.tell(config.notify, event, f"{folder.name} ended with exit code {code}: {why}", folder, step)
    if any(
        (config.runs.on_exit.done, config.runs.on_exit.gate, config.runs.on_exit.failed, config.runs.on_exit.stopped)
    ):
        by_hand = notify.at_terminal(signalled)
        mirrored = by_hand or is_mirrored(config, folder)
        notify.at_exit(config.runs, code, why, mirrored, folder, step=step, by_hand=by_hand)
    notify.wait()


def is_mirrored(config: Config, folder: pathlib.Path) -> bool:
    """True if the mirror holds the newest checkpoint, or there is none. Copies it first where a crash prevented that."""
    if not config.checkpoint.mirror or not any((folder / "checkpoints").glob("[0-9]*")):
        return True
    if config.distributed.process_id > 0:
        return _heard(folder, config.checkpoint.mirror_timeout_s)
    starts = ledger.read(folder)["starts"]
    if starts and (starts[-1].get("ended") or {}).get("mirrored"):
        return True
    try:
        found = mirror.Mirror(config.checkpoint.mirror, config.checkpoint, folder)
        found.restore()
        steps = [
            int(p.parent.name) for p in (folder / "checkpoints").glob("*/checksums.json") if p.parent.name.isdigit()
        ]
        if steps:
            found.begin(max(steps))
        return found.close(config.checkpoint.mirror_timeout_s)
    except (ConfigError, RunError, OSError):
        return False


def _heard(folder: pathlib.Path, seconds: float) -> bool:
    """Waits for what the first process, on another host, says in run.json."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        starts = ledger.read(folder)["starts"]
        if starts and (starts[-1].get("ended") or {}).get("mirrored"):
            return True
        time.sleep(_LOOK_S)
    return False
