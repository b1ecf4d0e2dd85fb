"""Programs that a model wrote: what they can do is little, and only one that ran to its end passes."""

import dataclasses
import gzip
import json
import pathlib
import platform
import re
import socket
import struct
import sys
import time

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.eval import humaneval
from jaxlm.host import files, sandbox_child

HUMANEVAL = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data" / "eval" / "HumanEval.jsonl.gz"
PYTHON = sys.executable
SETTINGS = dataclasses.replace(
    config.resolve(config_files.load("base", ["data.path=x"])).eval,
    run_code=True,
    code_seconds=20.0,
    code_memory_mb=512.0,
)


def whys(*programs, settings=SETTINGS):
    return ["passed" if o.passed else o.why for o in humaneval.run_all(programs, settings)]


@pytest.fixture
def cut():
    if humaneval.way() is None:
        pytest.skip(f"this kernel ({platform.release()}) has no seccomp filter, by which the network is cut off")


def test_a_program_passes_if_it_ran_to_its_end_without_an_exception():
    solved = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(2) == 4", "entry_point": "f"}
    right = humaneval.program_of(solved, "    return x + x")
    wrong = humaneval.program_of(solved, "    return x")
    exits = [humaneval.program_of(solved, f"    {last}") for last in ("raise SystemExit(0)", "import os; os._exit(0)")]
    assert whys(right, wrong, *exits, "x =", "raise ValueError('no')") == [
        "passed", "AssertionError", "SystemExit: 0", "ended before its last line",
        "SyntaxError: invalid syntax (program.py, line 1)", "ValueError: no",
    ]  # fmt: skip


def test_writing_what_a_program_that_passed_would_write_is_not_to_pass():
    writes = (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0' * 32)\n    except OSError: pass\nos._exit(0)"
    )
    assert whys(writes) == ["0" * 32]


def test_without_consent_nothing_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.run_code=True"):
        humaneval.run(f"open({str(tmp_path / 'ran')!r}, 'w')", dataclasses.replace(SETTINGS, run_code=False))
    assert not list(tmp_path.iterdir())


def test_where_the_network_can_not_be_cut_off_it_takes_consent_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(humaneval, "way", lambda: None)
    with pytest.raises(ConfigError, match=r"eval\.run_code_with_network=True"):
        humaneval.run("pass", SETTINGS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert humaneval.run(connects, dataclasses.replace(SETTINGS, run_code_with_network=True)).passed
    assert "WITH network" in capsys.readouterr().err


def test_endless_programs_end_by_their_limit_and_several_at_a_time(monkeypatch):
    monkeypatch.setattr(files, "cores", lambda: 2)
    began = time.monotonic()
    sleeps = "import time; time.sleep(99)"
    found = whys("while True: pass", sleeps, settings=dataclasses.replace(SETTINGS, code_seconds=0.5))
    assert found == ["took over 0.5 s", "took over 2 s by the clock"]
    assert time.monotonic() - began < 2 + 0.9


def test_time_on_the_cores_is_judged_not_the_clock(monkeypatch):
    """On a machine that others use a program waits for a core."""
    assert whys("import time; time.sleep(0.7)", settings=dataclasses.replace(SETTINGS, code_seconds=0.5)) == ["passed"]
    monkeypatch.setattr(files, "cores", lambda: 1)
    began = time.monotonic()
    assert whys(*["import time; time.sleep(0.4)"] * 2) == ["passed"] * 2
    assert time.monotonic() - began > 0.8


def started_after(monkeypatch, tmp_path, wait: str) -> None:
    """From now on interpreters run this line of a shell first."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\n{wait}\nexec {PYTHON} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))


def test_a_slow_start_is_no_failure_of_the_model(cut, monkeypatch, tmp_path):
    started_after(monkeypatch, tmp_path, "sleep 0.7")
    assert whys("pass", settings=dataclasses.replace(SETTINGS, code_seconds=0.1)) == ["passed"]
    monkeypatch.setattr(humaneval, "_START_S", 1.5)
    started_after(monkeypatch, tmp_path, f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; sleep 9; }}")
    assert whys("pass") == ["passed"]


@pytest.mark.parametrize(
    ("wait", "why"),
    [("sleep 9", "did not come to its first line in 0.3 s"), ("exit 7", "ended before its first line (exit code 7)")],
)
def test_a_program_that_never_starts_has_failed_and_is_told(cut, monkeypatch, tmp_path, capsys, wait, why):
    monkeypatch.setattr(humaneval, "_START_S", 0.3)
    started_after(monkeypatch, tmp_path, wait)
    assert whys("pass", "x = 1") == [why] * 2
    assert f"2 of 2 programs never ran and count as failed; the first {why}" in capsys.readouterr().err
    with pytest.raises(RunError, match=rf"^a program {re.escape(why)}$"):
        humaneval.run("pass", SETTINGS)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    assert whys("pass")[0].startswith("did not start: ")


def test_a_program_has_no_network_no_other_process_and_no_way_to_write(cut, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    denied = "PermissionError: [Errno 1] Operation not permitted"
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        found = whys(
            connects,
            "import socket; socket.socket(socket.AF_UNIX)",
            "import os\nwhile True: os.fork()",
            "import subprocess; subprocess.run(['true'])",
            "import os; os.kill(os.getppid(), 9)",
            "open('new', 'w')",
            f"open({str(victim)!r}, 'r+')",
            f"import os; os.remove({str(victim)!r})",
            f"import os; os.truncate({str(victim)!r}, 0)",
            f"import os; os.rename({str(victim)!r}, 'gone')",
        )
    assert [why.partition(": '")[0] for why in found] == [denied] * 10
    assert victim.read_text() == "mine"


SYSCALL = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); result = libc.syscall({}); "
RAISES = "assert result >= 0, os.strerror(ctypes.get_errno())"


def call(x86_64: int, aarch64: int, *arguments: str) -> str:
    """A program that raises if a system call fails."""
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    return SYSCALL.format(", ".join([str(number), *arguments])) + RAISES


@pytest.mark.skipif(platform.system() != "Linux", reason="calls of Linux")
@pytest.mark.parametrize(
    "program",
    [  # each has a harmless argument: on a kernel that lets it through, it succeeds or fails for another reason
        "import fcntl; fcntl.ioctl(open('/dev/null'), 0xC0045877, 0)",  # FIFREEZE: the file system stands still
        "import fcntl; fcntl.ioctl(open('/dev/null'), 0x40086602, 0)",  # FS_IOC_SETFLAGS: immutable
        call(163, 89, "b'/gone'"),  # acct
        "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "import os; p = os.getppid(); os.sched_setaffinity(p, os.sched_getaffinity(p))",
        call(251, 30, "1", "0", "0"),  # ioprio_set
        call(167, 224, "0"),  # swapon
        call(324, 283, "0", "0"),  # membarrier: what nobody thought of is refused too
        call(253, 26, "0"),  # inotify_init1
        "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",  # the kernel then signals it
        "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
        "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)",
        "import socket; a, _ = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', '/gone')",  # syslog, systemd
        "import fcntl; fcntl.flock(open('/dev/null'), fcntl.LOCK_EX)",
    ],
)
def test_what_a_program_need_not_do_is_refused(cut, program):
    """As root too: it could freeze a file system, or take the parent's cores."""
    (why,) = whys(f"import os\n{program}")
    assert "Operation not permitted" in why


def answer_of(rules: bytes, arch: int, number: int, arguments: tuple[int, ...]) -> int:
    """What the kernel does by a filter: the value that it returns."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program, at, value = list(struct.iter_unpack("HBBI", rules)), 0, 0
    while True:
        code, yes, no, k = program[at]
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        else:
            at += yes if (value == k if code == 0x15 else value & k) else no
        at += 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine(monkeypatch, machine):
    """Calls are named by the numbers of the kernel's asm/unistd_64.h and asm-generic/unistd.h."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    column, arch = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}[machine]
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    high = 1 << 32
    for numbers, arguments, answer in [
        ((0, 63), (), allow), ((202, 98), (), allow), ((318, 278), (), allow), ((9, 222), (), allow),  # read, futex ...
        ((41, 198), (1,), refuse), ((59, 221), (), refuse), ((62, 129), (1, 9), refuse), ((435, 435), (), absent),
        ((257, 56), (0, 0, 0o2000000), allow), ((257, 56), (0, 0, 0o2000001), refuse), ((257, 56), (0, 0, 0o100), refuse),
        ((302, 261), (0, 7, 0, 1), allow), ((302, 261), (0, 7, 1), refuse), ((302, 261), (0, 7, high), refuse),
        ((44, 206), (3, 1, 1, 0, 0), allow), ((44, 206), (3, 1, 1, 0, high), refuse), ((53, 199), (1, 1), allow),
        ((53, 199), (2, 1), refuse), ((72, 25), (3, 3), allow), ((72, 25), (3, 8), refuse), ((16, 29), (3, 0x5401), allow),
        ((16, 29), (3, 0xC0045877), refuse), ((56, 220), (0x10100,), allow), ((56, 220), (17,), refuse),
        ((9999, 9999), (), refuse),
    ]:  # fmt: skip
        assert answer_of(sandbox_child.rules(), arch, numbers[column], arguments) == answer, (numbers, arguments)
    assert answer_of(sandbox_child.rules(), 0x40000003, 3, ()) == kill  # i386's table of calls


@pytest.mark.skipif(platform.system() != "Linux", reason="capabilities of Linux")
def test_root_is_nobody_there(cut):
    header = "header = (ctypes.c_uint32 * 2)(0x20080522, 0); sets = (ctypes.c_uint32 * 6)();"
    (why,) = whys(f"import ctypes; {header} ctypes.CDLL(None).capget(header, sets); raise ValueError(list(sets))")
    assert why == "ValueError: [0, 0, 0, 0, 0, 0]"


def test_what_programs_compute_with_works(cut):
    assert (
        whys(
            "import threading; t = [threading.Thread(target=sum, args=([1],)) for _ in range(8)]; [x.start() for x in t]; "
            "[x.join() for x in t]; import concurrent.futures as c\n"
            "with c.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]",
            "import decimal; assert str(decimal.Decimal(1) / 3).startswith('0.333')",
            "import re; assert re.findall(r'(a+)b', 'aab ab') == ['aa', 'a']",
            "import random; random.seed(); assert 0 <= random.random() < 1; import secrets; secrets.token_hex(4)",
            "import datetime, time; datetime.datetime.now().astimezone(); time.sleep(0.001); import zoneinfo",
            "import asyncio; asyncio.run(asyncio.sleep(0.001)); import signal; signal.alarm(9); signal.alarm(0)",
            "import os; assert os.listdir('.') == [] and os.cpu_count(); r, w = os.pipe(); os.write(w, b'x'); os.read(r, 1)",
            "import json, math, heapq, itertools, collections, string, hashlib, typing, queue, multiprocessing",
        )
        == ["passed"] * 8
    )


@pytest.mark.parametrize(("landlock", "told"), [(True, False), (False, True)])
def test_a_kernel_without_landlock_is_told(cut, monkeypatch, capsys, landlock, told):
    monkeypatch.setattr(sandbox_child, "has_landlock", lambda: landlock)
    assert whys("pass", settings=dataclasses.replace(SETTINGS, code_seconds=20.0 + landlock + 0.5)) == ["passed"]
    if sys.platform == "linux":
        assert ("this kernel has no Landlock" in capsys.readouterr().err) == told


def test_memory_threads_and_output_are_bounded(cut):
    found = whys(
        "x = [0] * 10**9",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "print('x' * 10**7)",
        "raise ValueError('x' * 10**7)",
    )
    assert found[:2] == ["MemoryError", "RuntimeError: can't start new thread"]
    assert found[2].startswith(("ValueError", "PermissionError"))
    assert found[3] == "passed"
    assert found[4].startswith("ValueError: xxx")
    assert len(found[4]) == 300


def test_a_program_finds_no_secret_no_input_and_an_empty_folder(cut, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_SECRET", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    found = whys(
        "import os; assert 'hunter2' not in str(os.environ) and os.listdir('.') == []",
        "input()",
        "import threading, hashlib, random, decimal, asyncio; asyncio.run(asyncio.sleep(0))",  # what programs do need
    )
    assert found == ["passed", "ValueError: I/O operation on closed file.", "passed"]
    reads = whys(f"open({str(secret)!r})", "import os; print(open(f'/proc/{os.getppid()}/environ').read())")
    assert (
        all(why.startswith("PermissionError") for why in reads) or reads == ["passed"] * 2
    )  # a kernel without Landlock


@pytest.mark.parity
@pytest.mark.shared
def test_humaneval_s_own_solutions_score_1_and_with_each_fourth_broken_three_quarters(cut):
    if not HUMANEVAL.is_file():
        pytest.skip("HumanEval is not beside this checkout")
    with gzip.open(HUMANEVAL, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    broken = [f"{p['prompt']}    return 'broken'\n" for p in problems[::4]]
    programs = [humaneval.program_of(p, p["canonical_solution"]) for p in problems]
    spoiled = [humaneval.program_of({**p, "prompt": b}, "") for p, b in zip(problems[::4], broken, strict=True)]
    outcomes = humaneval.run_all(programs + spoiled, SETTINGS)
    right, wrong = outcomes[: len(problems)], outcomes[len(problems) :]
    assert [o.why for o in right if not o.passed] == []
    assert not any(o.passed for o in wrong)
    kept = [o for i, o in enumerate(right) if i % 4] + wrong
    assert sum(o.passed for o in kept) / len(kept) == 0.75
