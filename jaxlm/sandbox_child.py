"""Takes from this process what it can do to the machine, and runs one program that a model wrote. See eval/sandbox.py.

It is run as a script by `python -I -S`, with the standard library alone. It reads what to do from standard input as JSON and
writes the token, or why the program failed, to the file descriptor that it is told. Processes that judge a policy's answers
(train/rewards/forks.py) give up the same.
"""

import ctypes
import json
import math
import os
import resource
import struct
import sys
import sysconfig
import time

_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock, the same on every machine
_CAPABILITIES = 0x20080522  # the version of capset's structures
_READS = 0b1101  # execute, read a file, list a folder
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_READABLE = (*_LIBRARIES, "/usr/share/zoneinfo", "/dev/null", "/dev/urandom")
READY = "ready\n"  # written before the program's first line


def main() -> None:
    order = json.load(sys.stdin)
    sys.stdin.close()
    try:
        limit(order["seconds"], order["memory"])
        if order["filter"]:
            give_up(bytes.fromhex(order["filter"]), order["readable"])
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


def readable() -> list[str]:
    """Returns the files and folders that Python and its standard library read."""
    paths = sysconfig.get_paths()
    return [sys.base_prefix, sys.base_exec_prefix, paths["stdlib"], paths["platstdlib"], *_READABLE]


def has_landlock() -> bool:
    """True if this kernel can hide files from a process."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0


def limit(seconds: float, memory: int) -> None:
    """Bounds time on the cores, memory, the size of files, core dumps and, but for root, how many processes there are.

    Raises:
      OSError, ValueError: a limit can't be set.
    """
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


def give_up(rules: bytes, readable: list[str]) -> None:
    """Leaves this process without network, other processes and writing, without root's powers, with `readable` alone to read.

    Raises:
      OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _read_only_these(libc, readable)
    _check(libc.capset(struct.pack("Ii", _CAPABILITIES, 0), bytes(24)))
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
