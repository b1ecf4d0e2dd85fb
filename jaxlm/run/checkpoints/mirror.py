"""Copies a run's verified checkpoints and logs to another folder or URL, and restores them if the run's folder is lost.

A separate process (`mirror_worker`) copies, so that the run can abandon storage that hangs. Nothing here imports JAX.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping

import fsspec

from jaxlm.config import CheckpointConfig, ConfigError, RunError, pip_install
from jaxlm.host.child import Child, Died
from jaxlm.host.console import duration, say
from jaxlm.host.redact import redact_url
from jaxlm.run.checkpoints import keep, remote
from jaxlm.run.checkpoints.damage import ToldError
from jaxlm.run.checkpoints.mirror_worker import Gone, Refused, Trouble

_ANSWER_S = 20.0  # a start with local checkpoints waits no longer to learn which run owns the mirror
_MODULES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}  # of a protocol
_EXTRAS = {"s3fs": "mirror-s3", "gcsfs": "mirror-gs", "huggingface_hub": "mirror-hf"}  # of this package
_NOT_KEPT = ("memory", "http", "https", "data")  # gone with the process, or only read


class Abandoned(Trouble):
    """The process that copies did not answer in time (`late`), or died."""

    def __init__(self, why: str, late: bool):
        super().__init__(why)
        self.late = late


class Mirror:
    """The mirror of one run: on the first process only, which sees all files of a checkpoint.

    A mirror that is full, read-only or out of reach never stops the training: one line says so (`failing`), and the next
    checkpoint tries again. `pinned` (milestones) and `scores` are as in `keep.obsolete`; the caller may add steps to them.
    Raises ConfigError if such a URL can't hold a mirror. No message contains the URL's secrets.
    """

    def __init__(
        self,
        url: str,
        config: CheckpointConfig,
        workdir: pathlib.Path,
        *,
        pinned: Collection[int] = (),
        scores: Mapping[int, float] | None = None,
    ):
        check(url, workdir)
        self._url, self._config, self._workdir = url, config, pathlib.Path(workdir).resolve()
        self._pinned, self._scores = pinned, {} if scores is None else scores
        self._child: Child | None = None  # the process that copies
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the next attributes, up to the empty line
        self._wanted: list[int] = []  # steps to copy
        self._copying: int | None = None
        self._due, self._busy, self._closing = False, False, False
        self._page: Callable[[], object] | None = None
        self.failing = ""

        self._whole: set[int] = set()  # steps that were read back
        self._partial: set[int] = set()  # steps that are only partly there
        self._stale: set[int] = set()  # whole steps that a rollback undid
        self._start = secrets.token_hex(8)  # identifies this start among those of the run
        self._run_id = ""  # set once this start owns the mirror

    def latest(self) -> int | None:
        """Returns the newest step whose copy was read back; None if there is none."""
        return max(self._whole - self._stale, default=None)

    def wanted(self) -> frozenset[int]:
        """Returns the steps whose copies are under way or wait: a checkpoint deleted now gets no copy."""
        with self._lock:
            return frozenset({*self._wanted, self._copying} - {None})

    def restore(self, alive: Callable[[], None] = lambda: None) -> int | None:
        """Makes this start the mirror's only writer, and restores the run if its folder has no checkpoints.

        Call it at each start, before anything else looks into the folder. Returns the restored step, or None. `alive` is
        called at each answer of the storage. Raises ConfigError if the mirror is another run's, or no copy in it is whole;
        RunError if the folder has no checkpoints, and the mirror can't be read.
        """
        local, shown = self._local_steps(), redact_url(self._url)
        try:
            if unwritable := self._claim(_ANSWER_S if local else self._config.mirror_timeout_s):
                self._fail(unwritable)  # the mirror can still be read
            if local:
                return None
            say(f"no checkpoints in {self._workdir}: looking into the mirror {shown}")
            began = time.monotonic()
            alive()
            step = self._fetch(alive)
        except Trouble as error:
            if local and error.kind != "config":
                self._fail(str(error))
                return None
            self._end()
            if error.kind == "config":
                raise ConfigError(f"config.checkpoint.mirror={shown}: {error}") from error
            raise RunError(
                f"the mirror {shown} can't be read: {error}. The same command tries again; with "
                "--config.checkpoint.mirror= it starts anew"
            ) from ToldError(str(error))
        if step is None:
            say("the mirror holds no whole checkpoint yet: training starts anew")
        else:
            took = duration(time.monotonic() - began)
            say(f"checkpoint {step} and the logs came back from the mirror in {took}")
        return step

    def _fetch(self, alive: Callable[[], None]) -> int | None:
        """Restores the newest whole checkpoint; returns its step or None. Restarts a late or dead worker while files arrive."""
        came = []

        def note(event: dict) -> None:
            came.extend(event.keys() & {"fetched"})
            alive()

        while True:
            before = len(came)
            try:
                return self._ask("restore", note)["step"]
            except Abandoned as error:
                if len(came) == before:
                    raise
                say(f"mirror: {error}; going on with the files that are missing")
                alive()

    def begin(self, step: int) -> None:
        """Queues a copy of a verified checkpoint, in place of waiting steps that are not pinned. Returns at once."""
        with self._lock:
            self._wanted = [old for old in self._wanted if old in self._pinned and old != step] + [step]
        self._wake()

    def show(self, write_page: Callable[[], object]) -> None:
        """Has `write_page` called on the mirror's own thread, and the logs copied after it. Returns at once."""
        with self._lock:
            self._page = write_page
        self._wake()

    def roll_back(self, step: int) -> None:
        """Notes that the run went back to `step` (0: to its start). Newer copies no longer count, and are deleted later."""
        self._stale |= {other for other in self._whole if other > step}
        self._stale.discard(step)
        if step and step not in self._whole:
            self.begin(step)
            return
        with self._lock:
            self._wanted = [old for old in self._wanted if old <= step]
        self._wake()

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds while copies are under way. Returns False if they still are."""
        if self._thread:
            self._thread.join(timeout)
        return not (self._thread and self._thread.is_alive())

    def close(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for copies and logs. True if no copy is left, and the newest step's copy is whole."""
        if not self._closing:
            self._closing = True
            if self._wanted:
                say(f"waiting for the mirror's copy of checkpoint {max(self._wanted)}")
            self._wake()
        if self.wait(timeout):
            self._end()
        else:  # a thread that waits for an answer gets Abandoned, and so does every later job
            self._stopped = True
            if self._child:
                self._child.kill()
            self._thread.join(1.0)
        newest = max(self._local_steps(), default=None)
        return not self._wanted and newest in self._whole - self._stale | {None}

    def _wake(self) -> None:
        """Makes the thread look for work; starts it if it is not running."""
        with self._lock:
            self._due = True
            if not self._busy:
                self._busy = True
                self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                # Under one lock: else a copy that is queued just now would rely on a thread that is about to end.
                self._busy, self._due = self._due, False
                if not self._busy:
                    return
                steps = sorted(self._wanted, reverse=True)  # the newest protects most
                write_page, self._page = self._page, None
            for step in steps:
                self._copying = step
                if not self._copy(step):
                    break
            self._copying = None
            if self._stale:
                self._try(self._rotate)
            if write_page:
                with contextlib.suppress(Exception):  # else no later checkpoint would be copied
                    write_page()
            if (write_page or self._closing) and self._run_id and not self.failing:
                self._try(lambda: self._ask("write_logs"))

    def _copy(self, step: int) -> bool:
        """Copies a step and rotates. Returns False if this failed: then other steps would fail too."""
        copied = {}

        def note(event: dict) -> None:
            if "copied" in event:
                copied[event["copied"]] = event["sum"]

        while step in self._wanted:
            before = len(copied)
            try:
                if unwritable := self._claim(self._config.mirror_timeout_s):
                    raise Trouble(unwritable)
                self._note_held(self._ask("copy", note, step=step, copied=copied))
            except Abandoned as error:
                # A worker that died is restarted only if it made progress: this very copy may kill it.
                if not (error.late or len(copied) > before):
                    self._fail(f"checkpoint {step}: {error}")
                    return False
                say(f"mirror: the copy of checkpoint {step} begins again where it was: {error}")
            except Trouble as error:
                if error.kind != "gone":
                    self._fail(str(error))
                    return False
                say(f"mirror: {error}")
                self._unwant(step)
            else:
                self._stale.discard(step)
                self._unwant(step)
                if self.failing:
                    self.failing = ""
                    say(f"mirror {redact_url(self._url)}: it takes copies again")
                self._try(self._rotate)
        return True

    def _rotate(self) -> None:
        """Deletes the copies that need not be kept. The worker never deletes the last whole copy."""
        config = dataclasses.replace(self._config, keep_last=self._config.mirror_keep_last, keep_every=0)
        counting = self._whole - self._stale
        if not counting:
            return
        gone = self._stale | {*keep.obsolete(sorted(counting), self._scores, config, pinned=self._pinned)}
        gone |= {step for step in self._partial if step < max(counting)} - self.wanted()
        if gone:
            self._note_held(self._ask("delete", steps=sorted(gone)))
            self._stale &= self._whole

    def _note_held(self, answer: dict) -> None:
        self._whole, self._partial = set(answer["whole"]), set(answer["partial"])

    def _claim(self, timeout_s: float) -> str:
        """Claims the mirror for this start, once. Returns "" or why it is unwritable. Raises Refused if another run owns it."""
        if self._run_id:
            return ""
        path, local = self._workdir / ".run_id", self._local_steps()
        try:
            run_id = path.read_text().strip() if path.is_file() else ""
            job = {"id": run_id, "new_id": secrets.token_hex(8), "empty": not local}
            claimed = self._ask("claim", timeout_s=timeout_s, **job)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(claimed["id"] + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise Trouble(f"{path}: {error}") from error
        self._note_held(claimed)
        if local:
            # The run resumes from its own newest checkpoint: newer copies in the mirror are stale.
            self._stale = {step for step in self._whole if step > max(local)}
        if not claimed["unwritable"]:
            self._run_id = claimed["id"]
        return claimed["unwritable"]

    def _end(self) -> None:
        if self._child:
            self._child.end()

    def _ask(
        self,
        do: str,
        note: Callable[[dict], None] = lambda event: None,
        timeout_s: float = 0.0,
        **job: object,
    ) -> dict:
        """Gives a job of `mirror_worker.JOBS` to the process that copies, and returns its result. Raises Trouble.

        The first job starts the process, and so does a job after the process died or was late. `note` gets each event.
        """
        if self._stopped:
            raise Abandoned("its time is up", late=False)
        timeout_s = timeout_s or self._config.mirror_timeout_s
        end = time.monotonic() + timeout_s
        ours = {"do": do, "url": self._url, "id": self._run_id, "start": self._start, "workdir": str(self._workdir)}
        try:
            if self._child is None or self._child.ended:
                self._child = Child("jaxlm.run.checkpoints.mirror_worker:work")
            self._child.send(ours | job, timeout_s)
            while "done" not in (event := self._child.receive(end - time.monotonic())):
                if "error" in event:
                    raise {"config": Refused, "gone": Gone}.get(event["kind"], Trouble)(event["error"])
                if "line" in event:
                    say(event["line"])
                note(event)
            return event["done"]
        except TimeoutError:
            raise Abandoned(f"no end after {timeout_s:g} s", late=True) from None
        except Died as death:
            # The last line that the process printed is a library's, and may hold the URL with its secrets.
            words = f": {death.said}" if death.said else ""
            why = f"the process that copies died{words}".replace(self._url, redact_url(self._url))
            raise Abandoned(why, late=False) from None
        except OSError as error:
            raise Trouble(f"the process that copies can't be started: {error.strerror}") from error

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Trouble as error:
            self._fail(str(error))

    def _local_steps(self) -> list[int]:
        return keep.steps(self._workdir / "checkpoints")

    def _unwant(self, step: int) -> None:
        with self._lock:
            self._wanted = [other for other in self._wanted if other != step]

    def _fail(self, why: str) -> None:
        if why != self.failing:
            self.failing = why
            say(f"mirror {redact_url(self._url)}: {why}; training goes on, the next checkpoint tries again")


def check(url: str, workdir: pathlib.Path) -> None:
    """Raises ConfigError if this URL can't hold a mirror of `workdir`. Reads and writes no files."""
    shown = f"config.checkpoint.mirror={redact_url(url)}"
    protocol = url.partition("://")[0] if "://" in url else "file"
    module = _MODULES.get(protocol, "fsspec")
    if protocol in _NOT_KEPT or protocol not in fsspec.available_protocols():
        raise ConfigError(f"{shown}: {protocol}:// can't hold a mirror: give a folder, s3://, gs:// or hf://")
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{shown} needs a package: {pip_install(_EXTRAS[module])}")
    if protocol == "file":
        folder = pathlib.Path(remote.file_system(url)[1]).resolve()
        if folder.is_relative_to(pathlib.Path(workdir).resolve()):
            raise ConfigError(f"{shown} lies in the run's own folder, and would be lost with it: give another place")
