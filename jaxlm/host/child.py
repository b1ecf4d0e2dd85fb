"""Calls a function in a child process, which may hang, die or be killed while the parent goes on. Imports no JAX.

    worker = Child("jaxlm.run.checkpoints.mirror_worker:work")
    worker.send(job)
    event = worker.receive(timeout_s)

The function gets an iterator over the parent's messages, and a function that sends a message to the parent. The child's
messages are JSON objects: by unpickling them the parent would run the child's code. Printed text is no message: its last
line is reported if the child dies. When the parent ends, so do the child and its children.
"""

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import pathlib
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jaxlm

_LENGTH = struct.Struct(">Q")  # in front of each message
_CHUNK = 1 << 20
_LOOK_S = 0.2  # between checks that the child is alive
_PARENT_S = 1.0  # between checks that the parent is alive
_DYING_S = 5.0  # at most, from the end of the child's messages to its exit code
_KILLED_S = 1.0  # a killed process that lives longer is stuck in the kernel
_OUTPUT = 1 << 20  # bytes that go into the file
_TAIL = 4096  # bytes at the end of the output, in which its last line is

Message = dict


class Died(Exception):
    """The child process ended without an answer; the message says in one line how it ended.

    Attributes:
      code: as `Popen.returncode`: the exit code, or minus the signal that ended the process; None if it is still alive.
      said: the line of its "Fatal Python error", else the last line that it printed; "" if there is none.
    """

    def __init__(self, code: int | None, said: str):
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        super().__init__(f"{how}, after: {said[:200]}" if said else how)
        self.code, self.said = code, said


class Child:
    """A process that runs one function. After any error it is ended, with its process group.

    Args:
      function: MODULE:FUNCTION of this package.
      environment: the child's environment, in place of the parent's.
      output: a file to which the first megabyte that the child prints is appended.
      end_by: the signal that ends the child. A signal that it handles lets it clean up, once hanging storage answers.

    Raises OSError if it can't be started.
    """

    def __init__(
        self,
        function: str,
        *,
        environment: Mapping[str, str] | None = None,
        output: pathlib.Path | None = None,
        end_by: signal.Signals = signal.SIGKILL,
    ):
        self.ended = False
        self._end_by, self._tail = end_by, b""
        self._link, link = socket.socketpair()
        alive, self._alive = os.pipe()  # nothing is written: it closes when this process ends
        root = str(pathlib.Path(jaxlm.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # -P: a file in the current directory can't shadow a module. Requests go through the socket, not the command line:
        # all users of a machine see command lines, and URLs may hold secrets.
        command = [sys.executable, "-u", "-P", "-m", __name__, function]
        try:
            self._popen = subprocess.Popen(
                [*command, *map(str, (link.fileno(), alive, os.getpid(), int(end_by)))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**(os.environ if environment is None else environment), "PYTHONPATH": path},
                pass_fds=(link.fileno(), alive),
                start_new_session=True,  # ctrl-C goes to the parent only; the child's group can be ended
            )
        except OSError:
            self._link.close()
            os.close(self._alive)
            raise
        finally:
            link.close()
            os.close(alive)
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._hear, args=(output,), daemon=True)
        self._reader.start()

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Sends the function a message, which must be picklable. Raises the same errors as `receive`."""
        with self._ending_on_errors():
            self._link.settimeout(timeout_s)
            _send(self._link, pickle.dumps(message))

    def receive(self, timeout_s: float | None = None) -> Message:
        """Returns the next message of the function. Raises TimeoutError after `timeout_s`, Died if the process ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._ending_on_errors():
            return json.loads(_receive(self._link, lambda: self._look(end)))

    def kill(self) -> None:
        """Ends the process. A thread that waits in `receive` gets Died, and calls `end`."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, self._end_by)

    def end(self) -> None:
        """Ends the process, and waits up to a second: a process that is stuck in the kernel ends later."""
        if self.ended:
            return
        self.kill()
        self.ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILLED_S)
        self._reader.join(_KILLED_S)
        self._link.close()
        os.close(self._alive)

    @contextlib.contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """Ends the process on any error or interrupt: a late answer would be taken for the answer to the next message."""
        try:
            yield
        except BaseException as error:
            died = isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError)
            end = time.monotonic() + _DYING_S
            while died and self._lives() and time.monotonic() < end:
                time.sleep(0.01)
            self.end()
            if died:
                raise Died(self._popen.returncode, self._last_words()) from None
            raise

    def _lives(self) -> bool:
        # WNOWAIT: the child is not reaped, so that no other process gets its pid while `kill` may still use it.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _look(self, end: float | None) -> None:
        """Waits until there is something to read. Raises EOFError if the process is gone, TimeoutError after `end`."""
        while True:
            # The child's own children may hold the socket open, so a closed socket is no sufficient test. Checked before the
            # wait, so that what the child sent before its end is read.
            living = self._lives()
            left = _LOOK_S if end is None else end - time.monotonic()
            self._link.settimeout(max(1e-3, min(left, _LOOK_S)))
            try:
                self._link.recv(1, socket.MSG_PEEK)
                return
            except TimeoutError:
                if not living:
                    raise EOFError from None
                if left <= 0:
                    raise

    def _hear(self, output: pathlib.Path | None) -> None:
        """Reads what the process prints, so that it never blocks on a full pipe; keeps the end, and writes to `output`."""
        written = 0
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(OSError):
                file = output and stack.enter_context(open(output, "ab", buffering=0))
            while chunk := os.read(self._popen.stdout.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL:]
                if file and written < _OUTPUT:
                    written += len(chunk)
                    with contextlib.suppress(OSError):  # a full disk: the run says so elsewhere
                        file.write(chunk if written < _OUTPUT else b"\n(what it printed after that is not kept)\n")
        self._popen.stdout.close()

    def _last_words(self) -> str:
        lines = ["", *filter(str.strip, self._tail.decode(errors="replace").split("\n"))]
        return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1]).strip()


def _send(link: socket.socket, content: bytes) -> None:
    link.sendall(_LENGTH.pack(len(content)) + content)


def _receive(link: socket.socket, look: Callable[[], None] = lambda: None) -> bytes:
    """Returns the next message. `look` is called before each part is read. Raises EOFError if the other side is gone."""

    def read(size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            look()
            part = link.recv(min(size - len(content), _CHUNK))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    return read(_LENGTH.unpack(read(_LENGTH.size))[0])


# What follows runs in the child.


def main(function: str, link: int, alive: int, parent: int, end_by: int) -> None:
    _die_with(parent, alive, end_by)
    faulthandler.enable()
    os.set_inheritable(link, False)
    connection = socket.socket(fileno=link)
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        call(_requests(connection), lambda message: _send(connection, json.dumps(message).encode()))


def _requests(connection: socket.socket) -> Iterator:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.loads(_receive(connection))


def _die_with(parent: int, alive: int, end_by: int) -> None:
    """Ends this process and all that it starts when the parent ends, in whatever way."""
    # On Linux the kernel sends the signal when the parent's end of the pipe closes: also while C code holds the GIL, as a
    # regular expression does. (PR_SET_PDEATHSIG would end only this process, and already when the thread that started it ends.)
    # Elsewhere, or if a fork of the parent holds the pipe open, a thread checks each second.
    os.set_inheritable(alive, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(alive, fcntl.F_SETSIG, end_by)
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os.killpg(0, end_by)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
