"""The parent's side of the processes that ask and judge: starts them, gives them orders, ends and replaces them."""

import concurrent.futures
import contextlib
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Sequence

from jaxlm import files
from jaxlm.config import ConfigError, RunError
from jaxlm.train.rewards import wire

OUTPUT = "reward_output.txt"  # in a run's folder: what tasks and the function print, and tracebacks
_PROGRAM = "jaxlm.train.rewards.child"
_START_S = 180.0  # at least, for packages to be imported
_END_S = 5.0
_KEPT = 1 << 20  # bytes of output of one process
_TAIL = 4096  # bytes of output among which the last words of a dead process are
# All that tasks get of the environment, which may hold keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # a fork takes half as long


class Failed(Exception):
    """An order came to nothing: why, in one line. The process that had it has ended; the next order starts another."""


class Processes:
    """The processes of tasks and functions, each with its orders; one that has nothing to do is not started.

    Args:
      tasks: (kind, name, options) of each, as `judges.Judge.load` takes them.
      function: MODULE:FUNCTION, or "".
      form: a regular expression, or "".
      timeout_s: how long an order may take.
      folder: where OUTPUT is written anew; None to drop it.

    Attributes:
      questions: draws questions, and sees no answers but true ones.
      judge: judges each answer to a task in a fork of its own. Neither has this process's environment.
      function: calls the function and matches the form; it has.
    """

    def __init__(
        self, tasks: Sequence[tuple], function: str, form: str, timeout_s: float, folder: pathlib.Path | None = None
    ):
        self.folder = folder
        if folder:
            with contextlib.suppress(OSError):
                (folder / OUTPUT).unlink()
        self.questions = Process((tasks, "", ""), timeout_s, folder, keys=False)
        self.judge = Process((tasks, "", "", True), timeout_s, folder, keys=False)
        self.function = Process(((), function, form), timeout_s, folder)
        self._used = [self.questions, self.judge] * bool(tasks) + [self.function] * bool(function or form)

    def start(self) -> None:
        """Starts those that have something to do, at the same time. Raises ConfigError and RunError as `Process.start`."""
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(Process.start, self._used))

    def ask(self, name: str, *arguments: object, timeout_s: float | None = None) -> typing.Any:
        """Gives the order to the process whose it is. See `Process.ask`."""
        of_tasks = {"draw": self.questions, "exact_truth": self.questions, "exact": self.judge}
        return of_tasks.get(name, self.function).ask(name, *arguments, timeout_s=timeout_s)

    def close(self) -> None:
        """Ends all. An order given later starts its process anew."""
        for process in self._used:
            process.close()


class Process:
    """Holds the child process; starts it with the first order, and anew with the first after it has ended.

    Args:
      load: the arguments of `judges.Judge.load`, the first order of each process.
      timeout_s: how long an order may take.
      folder: where OUTPUT is written; None to drop it.
      keys: True to give it all of this process's environment.
    """

    def __init__(self, load: tuple, timeout_s: float, folder: pathlib.Path | None = None, keys: bool = True):
        self._load, self.timeout_s, self.folder, self._keys = load, timeout_s, folder, keys
        self._child: _Child | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if there is none."""
        return self._child and self._child.popen.pid

    def start(self) -> None:
        """Starts the process, and lets it import and check all.

        Raises:
          ConfigError: something that the config names is not there, or can't be imported.
          RunError: the process can't be started, or took too long.
        """
        try:
            self._started()
        except Failed as error:
            raise RunError(f"the process that judges answers did not start: it {error}") from None

    def ask(self, name: str, *arguments: object, timeout_s: float | None = None) -> typing.Any:
        """Returns what the order `name` of `judges.ORDERS` returns. `timeout_s`: in place of the process's own.

        Raises:
          Failed: it raised an exception, or did not end in time, or the process died.
          ConfigError: it was refused.
        """
        child = self._started()
        return self._ordered(child, name, arguments, timeout_s or self.timeout_s)

    def close(self) -> None:
        """Ends the process. An order given later starts another."""
        child, self._child = self._child, None
        if child:
            child.end()

    def _started(self) -> "_Child":
        if self._child is None:
            try:
                self._child = _Child(self.folder, self._keys)
            except OSError as error:
                raise Failed(f"could not be started: {error.strerror}") from None
            self.starts += 1
            try:
                self._ordered(self._child, "load", self._load, max(self.timeout_s, _START_S))
            except ConfigError as error:
                self.close()
                if self.starts > 1:  # what was there at the start is not there any more
                    raise Failed(str(error)) from None
                raise
        return self._child

    def _ordered(self, child: "_Child", name: str, arguments: tuple, timeout_s: float) -> typing.Any:
        try:
            answer = child.order(name, arguments, timeout_s)
        except TimeoutError:
            self.close()
            raise Failed(f"took over {timeout_s:g} s") from None
        except (EOFError, OSError):
            self._child = None
            raise Failed(child.last_words()) from None
        except BaseException:  # an interrupt: what it is about to answer would be taken for the next answer
            self.close()
            raise
        if "failed" in answer:
            self.close()
            raise Failed(answer["failed"])
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        return answer["done"]


class _Child:
    """A started process."""

    def __init__(self, folder: pathlib.Path | None, keys: bool):
        self._link, link = socket.socketpair()
        alive, self._alive = os.pipe()
        root = str(pathlib.Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {
            **(os.environ if keys else {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}),
            **({} if keys else _LARGE_PAGES),
            "PYTHONPATH": path,
            "PYTHONHASHSEED": "0",  # the questions of some tasks follow from the order of a set
            "JAX_PLATFORMS": "cpu",  # a function that uses JAX must not take the memory of the run's devices
        }
        # -P: a file of the current directory can't take the place of a module that the program itself needs.
        command = [sys.executable, "-u", "-P", "-m", _PROGRAM, str(link.fileno()), str(alive), str(os.getpid())]
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(link.fileno(), alive),
                start_new_session=True,  # ctrl-C is for the run; and its whole group can be ended
            )
        except OSError:
            self._link.close()
            os.close(self._alive)
            raise
        finally:
            link.close()
            os.close(alive)
        self._tail = b""
        self._reader = threading.Thread(target=self._read, args=(folder,), daemon=True)
        self._reader.start()

    def order(self, name: str, arguments: tuple, timeout_s: float) -> dict:
        """Gives an order and returns the answer. Raises TimeoutError, EOFError or OSError."""
        wire.send(self._link, pickle.dumps((name, arguments)), timeout_s)
        return files.json_of(wire.receive(self._link, timeout_s, self._alive_still))

    def _alive_still(self) -> bool:
        # It is not waited for, so that no other process can have the number of its group.
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> None:
        """Kills the process and all that it started in its group, and waits for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_S)
        self._reader.join(_END_S)
        self._link.close()
        with contextlib.suppress(OSError):
            os.close(self._alive)

    def last_words(self) -> str:
        """Ends what is left of a process that is gone; returns how it ended, and the last line that it printed."""
        end = time.monotonic() + _END_S
        while self._alive_still() and time.monotonic() < end:
            time.sleep(0.01)
        self.end()
        code = self.popen.returncode
        lines = ["", *filter(str.strip, self._tail.decode(errors="replace").split("\n"))]
        said = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1]).strip()
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"{how}{', after: ' * bool(said)}{said[:200]}"

    def _read(self, folder: pathlib.Path | None) -> None:
        """Takes what the process prints, so that it never waits for a reader. Keeps the first part in a file."""
        kept = 0
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(OSError):
                file = folder and stack.enter_context(open(folder / OUTPUT, "ab", buffering=0))
            while chunk := os.read(self.popen.stdout.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL:]
                if file and kept < _KEPT:
                    kept += len(chunk)
                    with contextlib.suppress(OSError):  # a full disk: the run says so elsewhere
                        file.write(chunk if kept < _KEPT else b"\n(what it printed after that is not kept)\n")
        self.popen.stdout.close()
