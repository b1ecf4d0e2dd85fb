"""What lies where in the mirror, whose it is, and which of its copies are whole. Imports no JAX.

run_id.json                        whose mirror it is: the run, and which start of it writes here
config.json, metrics.jsonl, ...    the newest logs of the run, and logs.json with their sizes and sha256
checkpoints/<step>/                the files of the checkpoint; `workdir/` there holds the logs as they were
checkpoints/<step>/manifest.json   size and sha256 of each of them: written when all are there
checkpoints/<step>/verified.json   written when each was read back: only now the step counts
"""

import hashlib
import pathlib

from jaxlm.files import is_step
from jaxlm.train.checkpoints.remote import Remote, seal, unseal


class Trouble(Exception):
    """What went wrong, in one line. `kind` says what the run does about it: "run" (try again), "config" (refuse), "gone"."""

    kind = "run"


class Refused(Trouble):
    """Only a change of the config mends this."""

    kind = "config"


class Gone(Trouble):
    """The checkpoint to copy is no longer there."""

    kind = "gone"


class Damaged(Trouble):
    """A copy in the mirror is not what was written."""


class Unfinished(Damaged):
    """A copy that was never read back to its end."""


def owner(remote: Remote) -> dict | None:
    """Returns the record of run_id.json; None if it is absent or damaged."""
    try:
        held = unseal(remote.read("run_id.json"))
    except FileNotFoundError:
        return None
    return held if held and {"id", "workdir", "start"} <= held.keys() else None


def check_owner(remote: Remote, job: dict) -> None:
    """Raises Trouble if another run, or a later start of this one, writes to the mirror."""
    held = owner(remote)
    if held is None:
        record = {"id": job["id"], "workdir": pathlib.Path(job["workdir"]).name, "start": job["start"]}
        remote.write("run_id.json", seal(record))
    elif held["id"] != job["id"]:
        raise Trouble(f"the mirror belongs to another run, in a folder called {held['workdir']}")
    elif held["start"] != job["start"]:
        raise Trouble("a later start of this run has taken the mirror over")


def steps(remote: Remote) -> list[int]:
    """Returns the steps of which the mirror holds anything, ascending."""
    return sorted(int(name) for name in remote.folders("checkpoints") if is_step(name))


def manifest(remote: Remote, step: int) -> dict:
    """Returns the manifest of a step. Raises Damaged, or Unfinished if the copy was never read back."""
    try:
        verified = remote.read(f"checkpoints/{step}/verified.json")
        content = remote.read(f"checkpoints/{step}/manifest.json")
    except FileNotFoundError:
        raise Unfinished(f"the mirror's copy of checkpoint {step} is not whole") from None
    record, marker = unseal(content), unseal(verified)
    if record is None or marker != {"manifest": hashlib.sha256(content).hexdigest()} or record["step"] != step:
        raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: its manifest is not what was written")
    return record


def held(remote: Remote) -> dict[str, list[int]]:
    """Returns which steps the mirror holds `whole` by its books, and which only in part. Reads none of their arrays."""
    found = {"whole": [], "partial": []}
    for step in steps(remote):
        try:
            manifest(remote, step)
            found["whole"].append(step)
        except Damaged:
            found["partial"].append(step)
    return found


def remove(remote: Remote, step: int) -> None:
    """Deletes a step. The manifest goes first: what is deleted by half never looks whole."""
    folder = f"checkpoints/{step}"
    first = [f"{folder}/manifest.json", f"{folder}/verified.json"]
    remote.delete(first)
    remote.delete(name for name in remote.names(folder) if name not in first)
    remote.prune(folder)


def below(name: str) -> bool:
    """True if a relative name stays inside the folder that it is relative to."""
    path = pathlib.PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def one_line(error: Exception) -> str:
    """Returns the first line of an error's words, or if it has none, its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
