"""The parent's side of the processes that draw questions and judge answers: starts them, sends orders, ends, replaces them."""

import concurrent.futures
import contextlib
import os
import pathlib
import time
import typing
from collections.abc import Sequence

from jaxlm.config import ConfigError, RunError
from jaxlm.host.child import Child, Died

OUTPUT = "reward_output.txt"  # in a run's folder: what tasks and the function print, and tracebacks
_START_S = 180.0  # the shortest time limit of a start, which imports packages
# All that tasks get of the environment, since it may hold API keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # halves the time of a fork


class Failed(Exception):
    """An order failed; the text says why, in one line. Its process has ended; the next order starts a new one."""


class Processes:
    """The child processes for the tasks and for the function. `ask` sends each order to the process that carries it out.

    Attributes:
      questions: draws questions, and sees only true answers.
      judge: judges each answer to a task in a fork. Like `questions`, it gets no API keys from the environment.
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
        """Starts the processes that the rewards in use need, in parallel. Raises as `Process.start`."""
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(Process.start, self._used))

    def ask(self, name: str, *arguments: object, timeout_s: float | None = None) -> typing.Any:
        of_tasks = {"draw": self.questions, "exact_truth": self.questions, "exact": self.judge}
        return of_tasks.get(name, self.function).ask(name, *arguments, timeout_s=timeout_s)

    def close(self) -> None:
        for process in self._used:
            process.close()


class Process:
    """One child process; an order starts it if it is not running.

    `keys`: True to give it this process's whole environment, with any API keys.
    """

    def __init__(self, load: tuple, timeout_s: float, folder: pathlib.Path | None = None, keys: bool = True):
        self._load, self.timeout_s, self.folder, self._keys = load, timeout_s, folder, keys
        self._child: Child | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child and not self._child.ended else None

    def start(self) -> None:
        """Starts the process and sends its `load` order. Raises ConfigError if that is refused, RunError if it fails."""
        try:
            self._started()
        except Failed as error:
            raise RunError(f"the process that judges answers did not start: it {error}") from None

    def ask(self, name: str, *arguments: object, timeout_s: float | None = None) -> typing.Any:
        """Sends an order to a method of `judges.Judge`, returns its result. Raises Failed, or ConfigError if it was refused."""
        return _ordered(self._started(), name, arguments, timeout_s or self.timeout_s)

    def close(self) -> None:
        if self._child:
            self._child.end()

    def _started(self) -> Child:
        if self.pid is None:
            try:
                output = self.folder and self.folder / OUTPUT
                self._child = Child("jaxlm.train.rl.judges:work", environment=self._environment(), output=output)
            except OSError as error:
                raise Failed(f"could not be started: {error.strerror}") from None
            self.starts += 1
            try:
                _ordered(self._child, "load", self._load, max(self.timeout_s, _START_S))
            except ConfigError as error:
                self.close()
                if self.starts > 1:  # it could be loaded at the first start, and no longer can
                    raise Failed(str(error)) from None
                raise
        return self._child

    def _environment(self) -> dict[str, str]:
        few = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _LARGE_PAGES
        return {
            **(os.environ if self._keys else few),
            "PYTHONHASHSEED": "0",  # the questions of some tasks depend on the order of a set
            "JAX_PLATFORMS": "cpu",  # a function that uses JAX must not take the memory of the run's devices
        }


def _ordered(child: Child, name: str, arguments: tuple, timeout_s: float) -> typing.Any:
    end = time.monotonic() + timeout_s
    try:
        child.send((name, arguments), timeout_s)
        answer = child.receive(end - time.monotonic())
    except TimeoutError:
        raise Failed(f"took over {timeout_s:g} s") from None
    except Died as death:
        raise Failed(str(death)) from None
    if "failed" in answer:
        child.end()
        raise Failed(answer["failed"])
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return answer["done"]
