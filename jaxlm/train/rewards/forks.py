"""Calls functions in forks of this process that can reach nothing but the result that they owe. Imports no JAX.

A fork takes milliseconds where an interpreter with its packages takes seconds. On Linux it gives up network, disk and other
processes before it calls (sandbox_child.py), and it has no open file but the pipe for its result.
"""

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

from jaxlm import cgroups, sandbox_child, seccomp

_MOST = 4096  # bytes of a result
_PIPE = 3  # the descriptor of it in a fork
_SECONDS = 3600.0  # of a core: who gives the order waits less
_MEMORY = 4 << 30  # bytes, beside what this process has
# What an answer that is evaluated may use of Python, beside the names of sympy.
_PYTHON = {"abs", "divmod", "float", "int", "len", "list", "max", "min", "pow", "range", "round", "str", "sum", "tuple"}
_METHODS = {"join", "split"}


class Forks:
    """Makes forks, as many at a time as there are cores.

    Attributes:
      confined: True if a fork can reach no network, disk or process; it was tried.
    """

    def __init__(self):
        pages = pathlib.Path("/proc/self/statm")
        own = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
        self._memory = own + _MEMORY
        self._readable = [*sandbox_child.readable(), *(path for path in sys.path if path.endswith("-packages"))]
        self._rules = seccomp.rules()
        self.confined = bool(self._rules) and self.results([_has_nothing]) == [True]
        if not self.confined:
            self._rules = b""

    def results(self, calls: Iterable[Callable[[], object]]) -> list:
        """Returns what each call returned, by way of JSON; a text in its place says why it returned nothing."""
        found, running = [], {}
        for number, call in enumerate(calls):
            found.append("ended before it was judged")
            read, pid = self._start(call)
            running[read] = (number, pid, b"")
            if len(running) >= cgroups.cores():
                _collect(running, found)
        while running:
            _collect(running, found)
        return found

    def _start(self, call: Callable[[], object]) -> tuple[int, int]:
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            return read, pid
        try:
            os.dup2(write, _PIPE)
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(_PIPE):
                os.dup2(null, number)
            os.closerange(_PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            if self._rules:
                sandbox_child.limit(_SECONDS, self._memory)
                sandbox_child.give_up(self._rules, self._readable)
            result = call()
        except BaseException as error:  # SystemExit too
            result = type(error).__name__
        os.write(_PIPE, json.dumps(result).encode()[:_MOST])
        os._exit(0)


def _collect(running: dict[int, tuple[int, int, bytes]], found: list) -> None:
    """Waits until one of the running forks has said something, and ends those that have said all."""
    for read in select.select(list(running), [], [])[0]:
        number, pid, said = running.pop(read)
        more = os.read(read, _MOST)
        if more and len(said) < _MOST:
            running[read] = (number, pid, said + more)
            continue
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with contextlib.suppress(ValueError):  # it wrote nothing, or half
            found[number] = json.loads(said)


def _has_nothing() -> bool:
    """True if this process can neither open a socket nor write a file."""
    import socket

    for attempt in (socket.socket, lambda: os.open("probe", os.O_WRONLY | os.O_CREAT)):
        try:
            attempt()
        except PermissionError:
            continue
        return False
    return True


def only_computes() -> Callable[[str, tuple], None]:
    """Returns an audit hook (`sys.addaudithook`) that refuses code made of a text if it does more than compute.

    It may name what sympy exports, some of Python's functions and variables of one letter. So an answer that its task
    evaluates can't name the true answer, which stands in the variables around it, nor the judge's functions.
    """
    allowed = {"sympy", *importlib.import_module("sympy").__all__, *_PYTHON, *_METHODS}

    def names(code: types.CodeType) -> set[str]:
        inner = (names(const) for const in code.co_consts if isinstance(const, types.CodeType))
        return set(code.co_names).union(*inner)

    def hook(event: str, arguments: tuple) -> None:
        if event != "exec" or not arguments[0].co_filename.startswith("<"):
            return
        if wrong := {name for name in names(arguments[0]) if len(name) > 1} - allowed:
            raise PermissionError(f"an answer may not use {min(wrong)}")

    return hook
