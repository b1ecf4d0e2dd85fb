"""Restricts this process (files, network, memory, time), then runs one program that a model wrote. See eval/humaneval.py.

A script for `python -I -S`, with the standard library alone. It reads the program, a token and the limits from standard input
as JSON, and writes the token, or why the program failed, to a file descriptor. Processes that score a policy's answers
(train/rl/judges.py) set the same limits.
"""

import ctypes
import json
import math
import os
import platform
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

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _NOT_PERMITTED, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALL_BITS = 0xFFFFFFFF

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Allowed calls -> their number on x86-64 and on aarch64; -1 where there is none.
_CALLS = {
    # open files, and file metadata; open and openat, fcntl and ioctl are restricted below
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66), "lseek": (8, 62),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24),
    "pipe": (22, -1), "pipe2": (293, 59), "eventfd2": (290, 19), "stat": (4, -1), "fstat": (5, 80), "lstat": (6, -1),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "getdents": (78, -1), "getdents64": (217, 61), "umask": (95, 166),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    "madvise": (28, 233),
    # waiting
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "restart_syscall": (219, 128),
    # time
    "time": (201, -1), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "getrusage": (98, 165), "alarm": (37, -1), "setitimer": (38, 103),
    # threads of this process; clone is restricted below
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "gettid": (186, 178),
    "exit": (60, 93), "exit_group": (231, 94),
    # signals to this process
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    # who and where it is
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getrlimit": (97, 163), "capget": (125, 90), "uname": (63, 160), "getrandom": (318, 278),
    # socket pairs of this process; socketpair and sendto are restricted below
    "recvfrom": (45, 207), "getsockname": (51, 204), "getsockopt": (55, 209),
}  # fmt: skip
# Call -> (its numbers, index of an argument, values of that argument with which the call is allowed).
_BY_VALUE = {
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030)),  # to copy a descriptor, and its flags; no owner, lease, notice
    "ioctl": ((16, 29), 1, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)),  # terminal? bytes to read, blocking, inherited
    "socketpair": ((53, 199), 0, (1,)),  # of Unix
}
# Call -> (its numbers, 32-bit words of its arguments, two an argument, bits): refused if a word has one of the bits.
_BY_BITS = {
    "open": ((2, -1), (2,), 0o1103),  # for writing, creating or emptying
    "openat": ((257, 56), (4,), 0o1103),
    "prlimit64": ((302, 261), (4, 5), _ALL_BITS),  # new limits
    "sendto": ((44, 206), (8, 9), _ALL_BITS),  # an address: it could be another process's socket
}
_CLONE, _THREAD = (56, 220), 0x00010000  # allowed if it makes a thread of the same process
_ABSENT = ((435, 435), (437, 437))  # clone3, openat2: their flags lie in memory; the C library takes the older calls

_Instruction = tuple[int, int, int, int]


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
    paths = sysconfig.get_paths()
    return [sys.base_prefix, sys.base_exec_prefix, paths["stdlib"], paths["platstdlib"], *_READABLE]


def has_landlock() -> bool:
    """True if this kernel has Landlock, which hides files from a process."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0


def limit(seconds: float, memory: int) -> None:
    """Limits CPU time, memory, the size of files, core dumps and, except for root, the number of processes."""
    cpu = math.ceil(time.process_time() + seconds)  # this interpreter has used some already
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
    """Denies this process network, other processes, writing, root's capabilities, and reading all but `readable`.

    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _read_only_these(libc, readable)
    _check(libc.capset(struct.pack("Ii", _CAPABILITIES, 0), bytes(24)))
    code = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("HP", len(rules) // 8, ctypes.addressof(code))
    _check(libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0))


def _read_only_these(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Hides all files and folders but `readable`, if the kernel has Landlock (docs.kernel.org/userspace-api/landlock.html)."""
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


# The seccomp filter


# It allows only the calls that Python needs to compute: no network, no other process, no signal to one, no writing of
# files, nothing that changes the machine. It needs no privilege and no namespaces, so that it also works in a container
# (kernel.org: Documentation/userspace-api/seccomp_filter.rst). It is a program of classic BPF.
def rules() -> bytes:
    """Returns the filter for this machine, 8 bytes an instruction; b"" if the machine is neither x86-64 nor aarch64."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return b""
    arch, column = _MACHINES[platform.machine()]
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _returns(_KILL), (_LOAD, 0, 0, _NUMBER)]
    for numbers in _CALLS.values():
        program += _call(numbers[column], [_returns(_ALLOW)])
    for numbers in _ABSENT:
        program += _call(numbers[column], [_returns(_NO_SUCH_CALL)])
    for numbers, argument, values in _BY_VALUE.values():
        equal = [x for value in values for x in ((_EQUAL, 0, 1, value), _returns(_ALLOW))]
        program += _call(numbers[column], [_loads(2 * argument), *equal, _returns(_NOT_PERMITTED)])
    for numbers, words, bits in _BY_BITS.values():
        refused = [x for word in words for x in (_loads(word), (_ANY_BIT, 0, 1, bits), _returns(_NOT_PERMITTED))]
        program += _call(numbers[column], [*refused, _returns(_ALLOW)])
    thread = [_loads(0), (_ANY_BIT, 0, 1, _THREAD), _returns(_ALLOW), _returns(_NOT_PERMITTED)]
    program += [*_call(_CLONE[column], thread), _returns(_NOT_PERMITTED)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _call(number: int, what: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(what), number), *what] if number >= 0 else []


def _loads(word: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 4 * word


def _returns(answer: int) -> _Instruction:
    return _RETURN, 0, 0, answer


if __name__ == "__main__":
    main()
