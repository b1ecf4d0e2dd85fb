"""Starts the mirror's worker, asks it, and kills it when it is late."""

import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable

from jaxlm.redact import redact_url

_WORKER = "jaxlm.train.checkpoints.mirror_worker"


class Unable(Exception):
    """The worker answered that it can't do a job: in one line why, and its `kind` (see `mirror_layout.Trouble`)."""

    def __init__(self, why: str, kind: str = "run"):
        super().__init__(why)
        self.kind = kind


class Abandoned(Unable):
    """The worker did not answer in time (`late`), or died."""

    def __init__(self, why: str, late: bool):
        super().__init__(why)
        self.late = late


class Worker:
    """The process that copies. It starts with the first job, and anew with the first after it died or was abandoned."""

    def __init__(self, url: str):
        self._url, self.stopped = url, False
        self._process: subprocess.Popen | None = None
        self._left: list[subprocess.Popen] = []  # killed, but perhaps not yet dead: the kernel may hold them in a write

    def ask(self, job: dict, timeout: float, heard: Callable[[dict], None]) -> dict:
        """Gives a job to the worker and returns its result. `heard` gets each event before it.

        Raises:
          Abandoned: no result within `timeout` seconds, or the worker died. It was ended then.
          Unable: the worker can't do it.
        """
        if self.stopped:
            raise Abandoned("its time is up", late=False)
        if self._process is None:
            try:
                self._process = self._begin()
            except OSError as error:
                raise Unable(f"the process that copies can't be started: {error.strerror}") from error
        process = self._process
        deadline = time.monotonic() + timeout
        try:
            process.stdin.write(json.dumps({"url": self._url, **job}).encode() + b"\n")
            process.stdin.flush()
            for event in _lines(process.stdout, deadline):
                if "done" in event:
                    return event["done"]
                if "error" in event:
                    raise Unable(event["error"], event["kind"])
                heard(event)
        except TimeoutError:
            self.abandon()
            raise Abandoned(f"no end after {timeout:g} s", late=True) from None
        except BrokenPipeError:
            pass
        self.abandon()
        raise Abandoned(f"the process that copies died{self._last_words()}", late=False)

    def stop(self) -> None:
        """Ends the worker for good. A thread that waits for its answer gets Abandoned, as who asks later does."""
        self.stopped = True
        if process := self._process:
            process.kill()

    def abandon(self) -> None:
        """Ends the worker. Waits for its end for a moment only: one that is stuck in a write ends when the kernel lets it."""
        process, self._process = self._process, None
        if process:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            self._left.append(process)
        self._left = [left for left in self._left if left.poll() is None]

    def _begin(self) -> subprocess.Popen:
        root = str(pathlib.Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._errors = tempfile.TemporaryFile()
        return subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # ctrl-C is for the run, which may still wait for a copy
        )

    def _last_words(self) -> str:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {words[-1]}".replace(self._url, redact_url(self._url)) if words else ""


def _lines(stream: typing.BinaryIO, deadline: float) -> typing.Iterator[dict]:
    """Yields the JSON objects that come line by line, to the end of the stream. Raises TimeoutError at the deadline."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            chunk = os.read(stream.fileno(), 2**16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from map(json.loads, lines)
    raise TimeoutError
