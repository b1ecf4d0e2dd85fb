"""Runs one program that a model wrote, in this process, which first gives up what it can do. See sandbox.py.

It is run as a script by `python -I -S`, with the standard library alone. It reads what to do from standard input as JSON and
writes the token, or why the program failed, to the file descriptor that it is told.
"""

import ctypes
import json
import math
import os
import resource
import struct
import sys
import time

_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock, the same on every machine
_READS = 0b1101  # execute, read a file, list a folder
READY = "ready\n"  # written before the program's first line


def main() -> None:
    order = json.load(sys.stdin)
    sys.stdin.close()
    try:
        _limit(order["seconds"], order["memory"])
        if order["filter"]:
            _give_up(bytes.fromhex(order["filter"]), order["readable"])
    except (OSError, ValueError, MemoryError) as error:
        os.write(order["fd"], repr(error).encode())
        os._exit(1)
    os.write(order["fd"], READY.encode())
    try:
        exec(compile(order["program"], "program.py", "exec"), {})  # no __main__: as human-eval runs it
    except BaseException as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    else:
        said = order["token"]
    os.write(order["fd"], said.encode(errors="replace")[: order["most"]])
    os._exit(0)  # threads and exit handlers of the program don't run on


def _limit(seconds: float, memory: int) -> None:
    """Bounds time on the cores, memory, the size of files, core dumps and, but for root, how many processes there are."""
    cpu = math.ceil(time.process_time() + seconds)  # this interpreter has taken some already
    limits = {"CPU": cpu, "AS": memory, "FSIZE": 0, "CORE": 0, "NOFILE": 64, "NPROC": 256}
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        end = most + (name == "CPU" and most != hard)  # SIGXCPU, which says why; a second later SIGKILL
        try:
            resource.setrlimit(kind, (most, end))
        except (ValueError, OSError):  # macOS has no limit of memory
            if sys.platform == "linux":
                raise


def _give_up(rules: bytes, readable: list[str]) -> None:
    """Leaves this process without network, other processes and writing, and with `readable` alone to read."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _read_only_these(libc, readable)
    code = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("HP", len(rules) // 8, ctypes.addressof(code))
    _check(libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0))


def _read_only_these(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Hides all other files and folders, where the kernel has Landlock (docs.kernel.org/userspace-api/landlock.html)."""
    attributes = struct.pack("Q", _READS)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return
    for path in readable:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH)
        rights = _READS if os.path.isdir(path) else 0b101
        _check(libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0))
        os.close(place)
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
