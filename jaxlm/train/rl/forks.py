"""Calls functions in forks of this process that can reach nothing but the result that they owe. Imports no JAX.

A fork takes milliseconds where an interpreter with its packages takes seconds. On Linux it gives up network, disk and other
processes before it calls (sandbox_child.py), and it has no open file but the pipe for its result.
"""

import concurrent.futures
import contextlib
import importlib
import json
import os
import pathlib
import resource
import select
import signal
import sys
import types
from collections.abc import Callable, Iterable

from jaxlm.host import files, sandbox_child

_MOST = 4096  # bytes of a result
_PIPE = 3  # the descriptor of it in a fork
_WAIT_S = 5.0  # for a call that takes milliseconds
_MEMORY = 1 << 30  # bytes of addresses that a fork may take beside those of this process
# What an answer that is evaluated may use of Python, beside the names of sympy.
_PYTHON = {"abs", "float", "int", "join", "len", "list", "max", "min", "pow", "range", "round", "split", "str", "sum"}


class Forks:
    """Makes forks, as many at a time as there are cores.

    Attributes:
      confined: True if a fork can reach no network, disk or process; it was tried.
    """

    def __init__(self):
        self._readable = [*sandbox_child.readable(), *(path for path in sys.path if path.endswith("-packages"))]
        self._rules = sandbox_child.rules()
        self.confined = self.results([_is_confined]) == [True]
        if not self.confined:
            self._rules = b""

    def results(self, calls: Iterable[Callable[[], object]]) -> list:
        """Returns what each call returned, by way of JSON; a text in its place says why it returned nothing."""
        with concurrent.futures.ThreadPoolExecutor(files.cores()) as pool:
            return list(pool.map(self._result, calls))

    def _result(self, call: Callable[[], object]) -> object:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            self._end_with(call, write)
        os.close(write)
        try:
            ended = select.select([read], [], [], _WAIT_S)[0]
            said = os.read(read, _MOST) if ended else b""
        finally:
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not ended:
            return f"took over {_WAIT_S:g} s"
        with contextlib.suppress(ValueError):  # it wrote nothing, or half
            return json.loads(said)
        return "ended before it was judged"

    def _end_with(self, call: Callable[[], object], write: int) -> None:
        """Makes the call, in a fork; writes what it returns, and ends this process."""
        try:
            os.dup2(write, _PIPE)
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(_PIPE):
                os.dup2(null, number)
            os.closerange(_PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            if self._rules:
                sandbox_child.limit(2 * _WAIT_S, _addresses() + _MEMORY)
                sandbox_child.give_up(self._rules, self._readable)
            result = call()
        except BaseException as error:  # SystemExit too
            result = type(error).__name__
        os.write(_PIPE, json.dumps(result).encode()[:_MOST])
        os._exit(0)


def _addresses() -> int:
    """The bytes of addresses that this process has (Linux)."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _is_confined() -> bool:
    try:
        os.open(os.devnull, os.O_WRONLY)
    except PermissionError:
        return True
    return False


def only_computes() -> Callable[[str, tuple], None]:
    """Returns an audit hook (`sys.addaudithook`) that refuses code made of a text if it does more than compute.

    It may name what sympy exports, some of Python's functions and variables of one letter. So an answer that its task
    evaluates can't name the true answer, which stands in the variables around it, nor the judge's functions.
    """
    allowed = {"sympy", *importlib.import_module("sympy").__all__, *_PYTHON}

    def hook(event: str, arguments: tuple) -> None:
        if event != "exec" or not arguments[0].co_filename.startswith("<"):
            return
        codes = [arguments[0]]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            if wrong := {name for name in code.co_names if len(name) > 1} - allowed:
                raise PermissionError(f"an answer may not use {min(wrong)}")

    return hook
