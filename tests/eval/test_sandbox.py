"""Programs that a model wrote: what they can do is little, and only one that ran to its end passes."""

import dataclasses
import gzip
import json
import os
import pathlib
import socket
import time

import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError, RunError
from jaxlm.eval import sandbox

HUMANEVAL = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data" / "eval" / "HumanEval.jsonl.gz"
SETTINGS = dataclasses.replace(
    config.resolve(config_files.load("base", ["data.path=x"])).eval,
    run_code=True,
    code_seconds=20.0,
    code_memory_mb=512.0,
)


def whys(*programs, settings=SETTINGS):
    return ["passed" if o.passed else o.why for o in sandbox.run_all(programs, settings)]


@pytest.fixture
def cut():
    if sandbox.way() is None:
        pytest.skip("the network can't be cut off here")


def test_a_program_passes_if_it_ran_to_its_end_without_an_exception():
    solved = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(2) == 4", "entry_point": "f"}
    right = sandbox.humaneval_program(solved, "    return x + x")
    wrong = sandbox.humaneval_program(solved, "    return x")
    exits = [
        sandbox.humaneval_program(solved, f"    {last}") for last in ("raise SystemExit(0)", "import os; os._exit(0)")
    ]
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
        sandbox.run(f"open({str(tmp_path / 'ran')!r}, 'w')", dataclasses.replace(SETTINGS, run_code=False))
    assert not list(tmp_path.iterdir())


def test_where_the_network_can_not_be_cut_off_it_takes_consent_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "way", lambda: None)
    with pytest.raises(ConfigError, match=r"eval\.run_code_with_network=True"):
        sandbox.run("pass", SETTINGS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert sandbox.run(connects, dataclasses.replace(SETTINGS, run_code_with_network=True)).passed
    assert "WITH network" in capsys.readouterr().err


def test_endless_programs_end_by_their_limit_and_several_at_a_time():
    began = time.monotonic()
    sleeps = "import time; time.sleep(99)"
    found = whys("while True: pass", sleeps, settings=dataclasses.replace(SETTINGS, code_seconds=1.0))
    assert found == ["took over 1 s", "took over 1 s"]
    assert time.monotonic() - began < 1.8 or os.cpu_count() == 1


def test_a_process_that_does_not_come_to_its_first_line_is_no_failure_of_the_model(monkeypatch):
    with pytest.raises(RunError, match=r"eval\.code_seconds=0\.001"):
        sandbox.run("pass", dataclasses.replace(SETTINGS, code_seconds=0.001))


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
    programs = [sandbox.humaneval_program(p, p["canonical_solution"]) for p in problems]
    spoiled = [sandbox.humaneval_program({**p, "prompt": b}, "") for p, b in zip(problems[::4], broken, strict=True)]
    outcomes = sandbox.run_all(programs + spoiled, SETTINGS)
    right, wrong = outcomes[: len(problems)], outcomes[len(problems) :]
    assert [o.why for o in right if not o.passed] == []
    assert not any(o.passed for o in wrong)
    kept = [o for i, o in enumerate(right) if i % 4] + wrong
    assert sum(o.passed for o in kept) / len(kept) == 0.75
