"""What lies where in the mirror, whose it is, and which of its copies are whole; and the process that copies.

run_id.json                        whose mirror it is: the run, and which start of it writes here
config.json, metrics.jsonl, ...    the newest logs of the run, and logs.json with their sizes and sha256
checkpoints/<step>/                the files of the checkpoint; `workdir/` there holds the logs as they were
checkpoints/<step>/manifest.json   size and sha256 of each of them: written when all are there and were read back
checkpoints/<step>/verified.json   written when its logs were read back too: only now the step counts

The run and the process that copies both import this module, which imports no JAX.
"""

import hashlib
import pathlib
import time
from collections.abc import Callable

from jaxlm.host.child import Child, Died
from jaxlm.host.files import is_step
from jaxlm.host.redact import redact_url
from jaxlm.run.checkpoints.remote import Remote, seal, unseal


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


class Abandoned(Trouble):
    """The process that copies did not answer in time (`late`), or died."""

    def __init__(self, why: str, late: bool):
        super().__init__(why)
        self.late = late


class Worker:
    """The process that copies. It starts with the first job, and anew with the first after it died or was late."""

    def __init__(self, url: str):
        self._url, self.stopped = url, False
        self._child: Child | None = None

    def ask(self, job: dict, timeout_s: float, heard: Callable[[dict], None]) -> dict:
        """Gives a job of `mirror_worker.JOBS` to the worker and returns its result. `heard` gets each event before it.

        Raises:
          Abandoned: no result within `timeout_s`, or the worker died. It was ended then.
          Trouble: the worker can't do it.
        """
        if self.stopped:
            raise Abandoned("its time is up", late=False)
        end = time.monotonic() + timeout_s
        try:
            if self._child is None or self._child.ended:
                self._child = Child("jaxlm.run.checkpoints.mirror_worker:work")
            self._child.send({"url": self._url, **job}, timeout_s)
            while True:
                event = self._child.receive(end - time.monotonic())
                if "done" in event:
                    return event["done"]
                if "error" in event:
                    trouble = {"config": Refused, "gone": Gone}.get(event["kind"], Trouble)
                    raise trouble(event["error"])
                heard(event)
        except TimeoutError:
            raise Abandoned(f"no end after {timeout_s:g} s", late=True) from None
        except Died as death:
            # The last line that it printed is a library's, and may hold the URL with its secrets.
            words = f": {death.said}" if death.said else ""
            why = f"the process that copies died{words}".replace(self._url, redact_url(self._url))
            raise Abandoned(why, late=False) from None
        except OSError as error:
            raise Trouble(f"the process that copies can't be started: {error.strerror}") from error

    def stop(self) -> None:
        """Ends the worker for good. A thread that waits for its answer gets Abandoned, as who asks later does."""
        self.stopped = True
        if self._child:
            self._child.kill()

    def end(self) -> None:
        """Ends the worker; the next job starts another."""
        if self._child:
            self._child.end()


def owner(remote: Remote) -> dict | None:
    """Returns the record of run_id.json; None if it is absent or damaged."""
    try:
        record = unseal(remote.read("run_id.json"))
    except FileNotFoundError:
        return None
    return record if record and {"id", "workdir", "start"} <= record.keys() else None


def own(remote: Remote, run_id: str, job: dict) -> None:
    """Writes run_id.json: from now on the mirror is that of this start of the run."""
    remote.write(
        "run_id.json", seal({"id": run_id, "workdir": pathlib.Path(job["workdir"]).name, "start": job["start"]})
    )


def check_owner(remote: Remote, job: dict) -> None:
    """Raises Trouble if another run, or a later start of this one, writes to the mirror."""
    record = owner(remote)
    if record is None:
        own(remote, job["id"], job)
    elif record["id"] != job["id"]:
        raise Trouble(f"the mirror belongs to another run, in a folder called {record['workdir']}")
    elif record["start"] != job["start"]:
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
    record = unseal(content)
    # The mark names the manifest that was there when all was read back: another one proves nothing.
    mark = {"manifest": hashlib.sha256(content).hexdigest()}
    if record is None or unseal(verified) != mark or record["step"] != step:
        raise Damaged(f"the mirror's copy of checkpoint {step} is damaged: its manifest is not what was written")
    return record


def held(remote: Remote) -> dict[str, list[int]]:
    """Returns which steps the mirror holds `whole` by its books, and which only in part. Reads none of their arrays."""
    of_kind = {"whole": [], "partial": []}
    for step in steps(remote):
        try:
            manifest(remote, step)
            of_kind["whole"].append(step)
        except Damaged:
            of_kind["partial"].append(step)
    return of_kind


def remove(remote: Remote, step: int) -> None:
    """Deletes a step. The manifest goes first: what is deleted by half never looks whole."""
    folder = f"checkpoints/{step}"
    first = [f"{folder}/manifest.json", f"{folder}/verified.json"]
    remote.delete([*first, *(name for name in remote.names(folder) if name not in first)])
    remote.prune(folder)


def below(name: str) -> bool:
    """True if a relative name stays inside the folder that it is relative to."""
    path = pathlib.PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def one_line(error: Exception) -> str:
    """Returns the first line of an error's words, or if it has none, its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
