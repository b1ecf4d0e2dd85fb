"""Saves one checkpoint while training goes on: writes it, reads it back from the disk, and seals it with checksums."""

import itertools
import json
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import jax
import orbax.checkpoint as ocp
from jax._src import distributed  # the only way to the coordinator's store; Orbax uses it too

from jaxlm.config import RunError
from jaxlm.devices.processes import together, working
from jaxlm.host.console import Say
from jaxlm.host.files import plain_path
from jaxlm.run.checkpoints import damage, digest, meta, verify


class _Quiet(logging.Filter):
    """Drops Orbax's tracebacks of a save that fails: one line reports the failure, at the next step."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "/orbax/" not in record.getMessage()


_QUIET = _Quiet()
TEMPORARY = "orbax-checkpoint-tmp"  # part of the name of a folder that Orbax has not finished
_TIMEOUT_S = 7200  # Orbax gives up a save after this
_ALIKE = itertools.count()  # numbers the Votes: all processes create them in the same order
_OK = "ok"


class Votes:
    """Lets the threads of several processes, which save one checkpoint together, learn that one of them failed.

    Orbax's own barrier waits for a failed process until a time-out of 20 minutes. Here each process writes into the
    coordinator's key-value store whether it succeeded, and reads the others' votes. All processes create Votes at one step.
    """

    def __init__(self):
        self._prefix, self._stages = f"jaxlm/save/{next(_ALIKE)}", 0

    def barrier(self, *, key: str = "", timeout_ms: int) -> None:
        """Waits until all processes have reached this barrier. Raises ToldError with a failed process's error."""
        for vote in self.exchange(_OK, timeout_ms):
            if vote != _OK:
                raise damage.ToldError(vote)

    def exchange(self, value: str, timeout_ms: int) -> Iterator[str]:
        """Gives a value to all processes, and yields each one's, first this one's; of a process that failed, its error."""
        if jax.process_count() == 1:
            yield value
            return
        stage, self._stages = self._stages, self._stages + 1
        self._write(stage, value)
        here, count = jax.process_index(), jax.process_count()
        for process in (here, *(other for other in range(count) if other != here)):
            yield distributed.global_state.client.blocking_key_value_get(self._key(stage, process), timeout_ms)

    def fail(self, why: str) -> None:
        """Tells the others that this process failed, and will reach no further barrier of this save."""
        if jax.process_count() > 1:
            line = why if why.startswith("process ") else f"process {jax.process_index()}: {why}"
            self._write(self._stages, line)
            self._write("failed", line)

    def failed(self) -> str:
        if jax.process_count() == 1:
            return ""
        votes = distributed.global_state.client.key_value_dir_get(f"{self._prefix}/failed/")
        return next((vote for _, vote in votes), "")

    def _write(self, stage: int | str, vote: str) -> None:
        distributed.global_state.client.key_value_set(self._key(stage, jax.process_index()), vote, allow_overwrite=True)

    def _key(self, stage: int | str, process: int) -> str:
        return f"{self._prefix}/{stage}/{process}"


class Saving:
    """One save, in a thread that can be left behind when the storage hangs.

    Attributes:
      left: set it to True to abandon the save: then nothing more is verified or hashed.
      copied: set when the arrays' memory may be used again.
      left_behind: True if threads of Orbax, here or in another process, may still wait for a process that failed.
      done: set when the save has ended, well or not; then the other attributes are final.
      failed: why the checkpoint could not be written or read back, in one line; "" if it could.
      sha256s: name -> sha256 of each array if they are wanted; {} if that failed. For the first process only.
    """

    def __init__(self, folder: pathlib.Path, items: dict[str, dict], meta: dict, hashed: bool = False):
        self.folder, self.step, self.began = folder, int(folder.name), time.monotonic()
        self._items, self._meta = items, meta
        self.copied, self.done = threading.Event(), threading.Event()
        self.written, self.left_behind = False, False
        self.failed, self.full, self.differs, self.verified, self.verify_s = "", False, "", False, 0.0
        self.sha256s, self._hashed = {}, hashed
        self.at = "checking the folder"  # what the save does right now, for the user
        self.left = False
        # A daemon, and so are the threads that it starts: a save that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"save {self.step}")
        self._thread.start()

    def _run(self) -> None:
        votes = Votes()
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_QUIET)  # adding it again does nothing
        try:
            self._write(votes)
            votes.barrier(timeout_ms=_TIMEOUT_S * 1000)  # the folder has its name
            if jax.process_index() == 0:
                self.at, began = "reading back", time.monotonic()
                self.differs = verify.verify(self.folder, self._meta["digests"], lambda: not self.left)
                self.verified, self.verify_s = not self.differs and not self.left, time.monotonic() - began
            if self._hashed and not self.left:
                self._hash(votes)
        except Exception as error:  # whatever the error is, training must go on, and one line must say it
            self.failed, self.full = damage.words(error, self.folder), damage.full(error)
            votes.fail(self.failed)
            self.left_behind = jax.process_count() > 1
        self._items = None
        self.copied.set()
        self.done.set()

    def _write(self, votes: Votes) -> None:
        if jax.process_index() == 0:
            probe(self.folder.parent)
        votes.barrier(timeout_ms=_TIMEOUT_S * 1000)  # no process begins if the first one can't write
        self.at = "copying the arrays to the host"
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, barrier_sync_fn=votes.barrier)
        # A new checkpointer for each save: a failed one can't spoil the next save.
        checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        args = {name: ocp.args.StandardSave(item) for name, item in self._items.items()}
        with plain_path(self.folder.parent) as plain:
            target = plain / self.folder.name
            checkpointer.save(target, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(self._meta)), force=True)
            self._items = None
            self.copied.set()
            self.at = "writing"
            self._finish(checkpointer, votes)
        self.written = True

    def _finish(self, checkpointer: ocp.AsyncCheckpointer, votes: Votes) -> None:
        """Waits until Orbax is done, but not if another process failed: Orbax would wait for that process for minutes."""
        errors = []

        def close() -> None:
            try:
                checkpointer.close()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.5)
            if thread.is_alive() and (why := votes.failed()):
                thread.join(1.0)  # Orbax may have learnt that, too
                raise damage.ToldError(why)
        if errors:
            raise errors[0]

    def _hash(self, votes: Votes) -> None:
        """Sets `sha256s`. Of several processes each hashes its share of the arrays. Never raises: the checkpoint is whole."""
        self.at = "hashing"
        names = sorted(self._meta["digests"])[jax.process_index() :: jax.process_count()]
        try:
            shares = votes.exchange(json.dumps(verify.sha256s(self.folder, names)), _TIMEOUT_S * 1000)
            for share in [next(shares)] if jax.process_index() else shares:
                self.sha256s |= json.loads(share)
        except Exception as error:  # of a disk, of TensorStore, of another process
            self.sha256s = {}
            votes.fail(str(error))


def probe(folder: pathlib.Path) -> None:
    """Writes and deletes a small file. Raises OSError if that fails: the folder is full, read-only or gone."""
    folder.mkdir(exist_ok=True)  # never the run's folder, which may have been moved
    path = folder / ".probe"
    try:
        with open(path, "wb") as f:
            f.write(bytes(4096))
    finally:
        path.unlink(missing_ok=True)


def remove_partial(directory: pathlib.Path, step: int) -> None:
    for path in directory.glob(f"{step}.{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def wait(saving: Saving, event: threading.Event, say: Say, stopping: Callable[[], bool], most_s: float) -> bool:
    """Waits up to `most_s` seconds for an event of a save; True if it came. Says so after a minute, then every five minutes.

    Args:
      stopping: called four times a second. Once it returns True during the wait, at most half a minute is left.
    """
    began, say_at, stopped = time.monotonic(), 60.0, stopping()
    while not event.wait(0.25):
        waited = time.monotonic() - began
        if not stopped and stopping():
            stopped, most_s = True, min(most_s, waited + 30)
        if waited >= most_s:
            return False
        if waited >= say_at:
            say(f"waiting for {waited:.0f} s for checkpoint {saving.step}: {saving.at} ({saving.folder})")
            say_at += 300.0
    return True


def save_weights(
    checkpoints: pathlib.Path, make: Callable[[], dict], config: dict, beside: Callable[[], dict] = dict
) -> None:
    """Saves parameters as checkpoint 0, reads it back and writes its checksums. All processes call it.

    `make` returns the parameters, `beside` further items; both are freed before the read-back. Raises RunError if a number is
    not finite or the save fails.
    """
    checkpoints = checkpoints.resolve()  # TensorStore refuses `..`
    together(lambda: _clear(checkpoints), first_only=True)
    items = {"params": make(), **beside()}
    digests, bad = digest.look(items)
    if bad:
        raise RunError(f"{bad[0].removeprefix('params/')} has a number that is not finite: the model is not imported")
    with working("writing the checkpoint and reading it back"):
        saving = Saving(checkpoints / "0", items, meta.sealed({"config": config}, 0, digests))
        del items
        saving.done.wait()
    if saving.failed or saving.differs:
        mend = "; free some room and run the same command again" if saving.full else ""
        raise RunError(f"the checkpoint in {checkpoints} is not whole: {saving.failed or saving.differs}{mend}")


def _clear(checkpoints: pathlib.Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_partial(checkpoints, 0)
    shutil.rmtree(checkpoints / "0", ignore_errors=True)
