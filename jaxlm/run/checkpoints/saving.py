"""Saves one checkpoint beside the training: writes it, reads it back from the disk, and seals it with checksums."""

import itertools
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp
from jax._src import distributed  # the only way to the coordinator's store, which Orbax takes too

from jaxlm.host.console import Say
from jaxlm.host.files import plain_path
from jaxlm.run.checkpoints import damage, verify
from jaxlm.run.checkpoints.damage import ToldError


class _Quiet(logging.Filter):
    """Drops Orbax's tracebacks of a save that fails: one line tells it, at the next step."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "/orbax/" not in record.getMessage()


_QUIET = _Quiet()
TEMPORARY = "orbax-checkpoint-tmp"  # part of the name of a folder that Orbax has not finished
_TIMEOUT_S = 7200  # Orbax gives up a save after this
_ALIKE = itertools.count()  # all processes make their votes in the same order
_OK = "ok"


class Votes:
    """Lets the threads of several processes, which save one checkpoint together, learn that one of them failed.

    Orbax's own barrier waits for a process that failed until a time-out of 20 minutes. Here each process writes into the
    store of the cluster's coordinator what became of its part, and reads what the others wrote. All processes make it at
    the same step.
    """

    def __init__(self):
        self._prefix, self._stages = f"jaxlm/save/{next(_ALIKE)}", 0

    def barrier(self, *, key: str = "", timeout_ms: int) -> None:
        """Says that this process came so far, and waits for the others. In the place of Orbax's barrier.

        Raises:
          ToldError: another process failed; its message is that process's.
        """
        del key
        if jax.process_count() == 1:
            return
        stage, self._stages = self._stages, self._stages + 1
        self._write(stage, _OK)
        for process in range(jax.process_count()):
            vote = distributed.global_state.client.blocking_key_value_get(self._key(stage, process), timeout_ms)
            if vote != _OK:
                raise ToldError(vote)

    def fail(self, why: str) -> None:
        """Says that this process failed, and will come to no barrier of this save any more."""
        if jax.process_count() > 1:
            line = why if why.startswith("process ") else f"process {jax.process_index()}: {why}"
            self._write(self._stages, line)
            self._write("failed", line)

    def failed(self) -> str:
        """Returns why another process failed; "" if none did so far."""
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

    Args:
      folder: the checkpoint's folder, `checkpoints/<step>`.
      items: the arrays to save, on the devices.
      meta: JSON values; `digests` holds the digest of every array.

    Attributes:
      copied: set when the arrays' memory may be used again.
      left_behind: True if threads of Orbax, here or in another process, may still wait for a process that failed.
      done: set when there is nothing more to wait for; then the others below hold.
      written: True if all processes wrote their parts.
      failed: why the checkpoint could not be written or read back, in one line; "" if it was.
      full: True if it failed because the disk is full.
      differs: what did not read back as it was saved; "" if all did.
      verified: True if all was read back and its checksums are written. On the first process only.
      verify_s: the seconds that verifying took.
    """

    def __init__(self, folder: pathlib.Path, items: dict[str, dict], meta: dict):
        self.folder, self.step, self.began = folder, int(folder.name), time.monotonic()
        self._items, self._meta = items, meta
        self.copied, self.done = threading.Event(), threading.Event()
        self.written, self.left_behind = False, False
        self.failed, self.full, self.differs, self.verified, self.verify_s = "", False, "", False, 0.0
        self.at = "checking the folder"  # what it does right now, for the user
        self._left = False
        # A daemon, and so are the threads that it starts: a save that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"save {self.step}")
        self._thread.start()

    def leave(self) -> None:
        """Stops verifying at the next array."""
        self._left = True

    def _run(self) -> None:
        votes = Votes()
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_QUIET)  # adding it again does nothing
        try:
            self._write(votes)
            if jax.process_index() == 0:
                began = time.monotonic()
                self._verify()
                self.verify_s = time.monotonic() - began
        except Exception as error:  # whatever it is, training must go on, and one line must say it
            self.failed, self.full = damage.words(error, self.folder), damage.full(error)
            votes.fail(self.failed)
            self.left_behind = jax.process_count() > 1
        self._items = None
        self.copied.set()
        self.done.set()

    def _write(self, votes: Votes) -> None:
        """Writes the checkpoint, with all processes. Raises what one of them met."""
        if jax.process_index() == 0:
            probe(self.folder.parent)
        votes.barrier(timeout_ms=_TIMEOUT_S * 1000)  # nobody begins a save that the first process can't
        self.at = "copying the arrays to the host"
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, barrier_sync_fn=votes.barrier)
        # A checkpointer of its own for each save: one that failed can't spoil the next.
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
        """Waits until Orbax is done. Leaves it behind if another process failed: it would wait for that one for minutes."""
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
                thread.join(1.0)  # it may have learnt that, too
                raise ToldError(why)
        if errors:
            raise errors[0]

    def _verify(self) -> None:
        self.at = "reading back"
        verify.flush(self.folder)
        self.differs = verify.read_back(self.folder, self._meta["digests"], lambda: not self._left)
        if not self.differs and not self._left:
            verify.write_checksums(self.folder)
            self.verified = True


def probe(folder: pathlib.Path) -> None:
    """Writes and deletes a small file. Raises OSError if the folder takes none: full, read-only, gone."""
    folder.mkdir(exist_ok=True)  # never the run's folder, which may have been moved
    path = folder / ".probe"
    try:
        with open(path, "wb") as f:
            f.write(bytes(4096))
    finally:
        path.unlink(missing_ok=True)


def remove_partial(directory: pathlib.Path, step: int) -> None:
    """Deletes what a save of `step` that failed left behind. What can't be deleted stays."""
    for path in directory.glob(f"{step}.{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def wait(saving: Saving, event: threading.Event, say: Say, stopping: Callable[[], bool], most_s: float) -> bool:
    """Waits for an event of a save, and says what it waits for: after a minute, then every five. False if it gives up.

    Args:
      stopping: asked four times a second. When it turns true during the wait, at most half a minute is left.
      most_s: the most seconds to wait.
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
