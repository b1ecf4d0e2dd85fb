"""Runs programs that a model wrote, each in a process that has given up network, files, other processes, time and memory.

Every program gets an interpreter of its own with a clean environment, an empty temporary folder and closed standard input.
On Linux a seccomp filter (seccomp.py) refuses sockets, other processes, signals and writing files, and Landlock hides all
files but Python's own; on macOS `sandbox-exec` refuses the same. What fails here is what OpenAI's human-eval
(arXiv:2107.03374) warns of: its guard replaces functions in the interpreter, and a program that wants them finds them. A
program passes if the process, after the program's last line, writes a token that was drawn for it; so a program that ends
early doesn't pass. One that searches the frames of its own process for the token could: this is a guard against
accidents and mischief, not against an attack on the score.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import platform
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import typing

from jaxlm import console
from jaxlm.config import ConfigError, RunError
from jaxlm.config.schema import EvalConfig
from jaxlm.eval import sandbox_child, seccomp

_MOST = 300  # bytes kept of what a program failed with
_MAC = "(version 1)(allow default)(deny network*)(deny process-fork)(deny file-write*)"
_PROBE = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
except OSError:
    pass
else:
    raise SystemExit(1)
"""
_READABLE = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """True if a program ran to its end; if not, why: its exception, "took over 10 s", ..."""

    passed: bool
    why: str


@dataclasses.dataclass(frozen=True)
class _Way:
    """How the network is cut off: its name, a command to put in front, a seccomp filter."""

    name: str
    command: tuple[str, ...] = ()
    rules: bytes = b""


def run(program: str, config: EvalConfig) -> Outcome:
    """Returns whether a Python program ran to its end within its limits. See `run_all`."""
    return run_all([program], config)[0]


def run_all(programs: typing.Sequence[str], config: EvalConfig) -> list[Outcome]:
    """Returns the outcome of each program, in order. As many run at a time as there are cores.

    Raises:
      ConfigError: `eval.run_code` is False, or the network can't be cut off here and `eval.run_code_with_network` is False.
      RunError: the process of a program did not come to its first line.
    """
    if not config.run_code:
        raise ConfigError(
            "this runs programs that a model wrote: eval.run_code=True consents, --config.eval.run_code=True"
        )
    found = way()
    if found is None and not config.run_code_with_network:
        raise ConfigError(
            f"eval.run_code: the network can't be cut off from programs here ({platform.system()} {platform.machine()}); "
            "eval.run_code_with_network=True runs them nevertheless: do so in a virtual machine only"
        )
    _announce(found, config.code_seconds, config.code_memory_mb)
    with (
        console.working("running what the model wrote", len(programs), "programs", end=False) as tell,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        futures = [
            pool.submit(_run, p, found or _Way(""), config.code_seconds, config.code_memory_mb) for p in programs
        ]
        try:
            return list(console.told((f.result() for f in futures), tell))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def humaneval_program(problem: dict[str, str], completion: str) -> str:
    """Returns the program that passes if `completion` solves a problem of HumanEval.jsonl (as human-eval makes it)."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})"


@functools.cache
def way() -> _Way | None:
    """Returns how the network is cut off from programs here, shown by trying; None if it can't be."""
    ways = {
        "Linux": _Way("seccomp", rules=seccomp.rules()),
        "Darwin": _Way("sandbox-exec", ("sandbox-exec", "-p", _MAC)),
    }
    tried = ways.get(platform.system())
    if tried is None or not (tried.rules or tried.command):
        return None
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.suppress(RunError, OSError):
        if _run(_PROBE.format(port=server.getsockname()[1]), tried, 60.0, 1024.0).passed:
            return tried
    return None


@functools.cache
def _announce(way: _Way | None, seconds: float, memory_mb: float) -> None:
    network = f"without network ({way.name})" if way else "WITH network"
    console.say(f"what the model writes runs {network}, each program for {seconds:g} s and {memory_mb:,.0f} MB at most")


def _run(program: str, way: _Way, seconds: float, memory_mb: float) -> Outcome:
    """Runs one program in a process of its own, and ends that process's whole group."""
    token, (read, write) = secrets.token_hex(16), os.pipe()
    paths = sysconfig.get_paths()
    order = {
        "program": program, "token": token, "fd": write, "most": _MOST, "seconds": seconds,
        "memory": int(memory_mb * 2**20), "filter": way.rules.hex(),
        "readable": [".", sys.base_prefix, sys.base_exec_prefix, paths["stdlib"], paths["platstdlib"], *_READABLE],
    }  # fmt: skip
    script = str(pathlib.Path(sandbox_child.__file__).resolve())
    # -X utf8 and no locale: the same text everywhere. -S: the standard library alone.
    command = [*way.command, sys.executable, "-I", "-S", "-B", "-X", "utf8", script]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxlm-program-", ignore_cleanup_errors=True))
        orders = stack.enter_context(tempfile.TemporaryFile())
        orders.write(json.dumps(order).encode())
        orders.seek(0)
        try:
            child = subprocess.Popen(
                command, cwd=folder, env={"OMP_NUM_THREADS": "1"}, stdin=orders, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=(write,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(write)
        late = False
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(child)
        os.set_blocking(read, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(read, 2 * _MOST)
    return _outcome(said.decode(errors="replace"), token, child.returncode, late, seconds)


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _outcome(said: str, token: str, code: int, late: bool, seconds: float) -> Outcome:
    started, ready, why = said.partition(sandbox_child.READY)
    if not ready:
        after = f"within eval.code_seconds={seconds:g}" if late else f"(exit code {code})"
        raise RunError(f"a program's process did not come to its first line {after} {started}".rstrip())
    if late or code == -signal.SIGXCPU:
        return Outcome(False, f"took over {seconds:g} s")
    if why == token and code == 0:
        return Outcome(True, "")
    if code < 0:
        return Outcome(False, f"was ended by signal {-code}")
    return Outcome(False, why or "ended before its last line")
