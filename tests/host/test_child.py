"""A process that hangs, dies, prints, says much or loses its parent: the parent always goes on, and nothing stays behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxlm.host.child import Child, Died

ACTS = """
import os, pathlib, re, signal, subprocess, sys, time

def act(requests, tell):
    for name, *arguments in requests:
        globals()[name](tell, *arguments)

def count(tell, upto):
    for number in range(upto):
        tell({"number": number})
    tell({"done": os.getpid()})

def echo(tell, text):
    print("no message", flush=True)
    tell({"text": text})

def hang(tell, file):
    tell({"begun": 1})
    others = subprocess.Popen(["sleep", "600"])
    pathlib.Path(file).write_text(str(others.pid))
    re.match("(a+)+b", "a" * 64)  # one call into C, which holds Python's lock

def raises(tell):
    raise ValueError("no such thing")

def say(tell, *words, code=7):
    for text in words:
        print(text, file=sys.stderr, flush=True)
    os._exit(code)

def die(tell, number):
    os.kill(os.getpid(), number)

def leave(tell, file):
    if other := os.fork():  # it holds the socket open, and the output
        pathlib.Path(file).write_text(str(other))
        tell({"last": 1})
        os._exit(7)
    time.sleep(600)

def tidy(tell, file):
    path = pathlib.Path(file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        path.write_text("here")
        tell({"begun": 1})
        time.sleep(600)
    finally:
        path.unlink()

def environment(tell):
    tell({"environment": dict(os.environ), "path": sys.path})

def empties(requests, tell):
    tell({"lines": sum(len(lines) for lines in iter(lambda: next(requests), None))})
"""


@pytest.fixture(autouse=True)
def acts(tmp_path, monkeypatch):
    (tmp_path / "acts.py").write_text(ACTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def child():
    made = Child("acts:act")
    yield made
    made.end()


def gone(pid: int) -> bool:
    """True once a process has ended; nobody may have waited for it."""
    with contextlib.suppress(FileNotFoundError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def soon(true, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def number_in(path: pathlib.Path) -> int:
    """The process whose number another one writes there."""
    assert soon(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_several_messages_come_before_an_answer_and_one_process_serves_many_requests(child):
    for upto in (3, 0, 2):
        child.send(("count", upto))
        assert [child.receive(30)["number"] for _ in range(upto)] == list(range(upto))
        assert child.receive(30) == {"done": child.pid}
    child.end()
    assert child.ended
    assert gone(child.pid)


def test_large_messages_go_both_ways_and_what_is_printed_is_none(child):
    text = "\u00e4" * 5_000_000
    child.send(("echo", text))
    assert child.receive(60) == {"text": text}


def test_a_stream_ends_where_the_parent_says_and_the_process_with_its_function():
    reading = Child("acts:empties")
    for number in range(100):
        reading.send([f"{number}"] * number)
    reading.send(None)
    assert reading.receive(30) == {"lines": 4950}
    with pytest.raises(Died, match=r"^ended with exit code 0$"):
        reading.receive(30)


def test_one_that_hangs_is_ended_with_all_that_it_started(child, tmp_path):
    child.send(("hang", str(tmp_path / "left")))
    assert child.receive(30) == {"begun": 1}
    left = number_in(tmp_path / "left")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        child.receive(0.3)
    assert 0.3 <= time.monotonic() - began < 10
    assert child.ended
    assert soon(lambda: gone(child.pid) and gone(left))


def test_one_that_takes_no_message_is_late_too():
    started = Child("acts:act")
    os.kill(started.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        started.send(("echo", "x" * 10**7), 0.2)
    assert started.ended


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (("raises",), 1, "ended with exit code 1, after: ValueError: no such thing"),
        (("say", "some words", "last words", " "), 7, "ended with exit code 7, after: last words"),
        (("say",), 7, "ended with exit code 7"),
        (("die", 9), -9, "was ended by signal 9"),
        (("die", 11), -11, "was ended by signal 11, after: Fatal Python error: Segmentation fault"),
    ],
)
def test_a_death_is_one_line(child, request_, code, words):
    child.send(request_)
    with pytest.raises(Died) as died:
        child.receive(60)
    assert (str(died.value), died.value.code, child.ended) == (words, code, True)
    assert words.endswith(died.value.said)


def test_a_function_that_is_not_there_is_one_line_too():
    wrong = Child("acts:nothing")
    with pytest.raises(Died, match="has no attribute 'nothing'"):
        wrong.receive(30)


def test_the_end_is_noticed_although_a_fork_lives_on(child, tmp_path):
    child.send(("leave", str(tmp_path / "left")))
    assert child.receive(30) == {"last": 1}
    began = time.monotonic()
    with pytest.raises(Died, match="exit code 7"):
        child.receive(60)
    assert time.monotonic() - began < 15
    assert soon(lambda: gone(number_in(tmp_path / "left")))


def test_another_thread_may_end_it(child, tmp_path):
    child.send(("hang", str(tmp_path / "left")))
    child.receive(30)
    child.kill()
    with pytest.raises(Died, match="signal 9"):
        child.receive(30)
    child.kill()  # nothing is there any more


def test_one_that_is_asked_to_end_may_tidy_up(tmp_path):
    asked = Child("acts:act", end_by=signal.SIGTERM)
    asked.send(("tidy", str(tmp_path / "file")))
    assert asked.receive(30) == {"begun": 1}
    assert (tmp_path / "file").exists()
    asked.end()
    assert soon(lambda: not (tmp_path / "file").exists())


def test_an_environment_and_a_folder_do_not_leak_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "socket.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "acts.py").rename(tmp_path / "elsewhere/acts.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    named = Child("acts:act", environment={"ONLY": "1"})
    named.send(("environment",))
    told = named.receive(30)
    assert {"ONLY", "PYTHONPATH"} <= told["environment"].keys() <= {"ONLY", "PYTHONPATH", "LC_CTYPE"}
    assert str(tmp_path) not in told["path"]
    named.end()


def test_the_beginning_of_what_it_prints_is_kept(tmp_path):
    talking = Child("acts:act", output=tmp_path / "output")
    talking.send(("say", *["x" * 1000] * 3000, "last words"))
    with pytest.raises(Died, match="last words"):
        talking.receive(60)
    kept = (tmp_path / "output").read_bytes()
    assert kept.startswith(b"xxx")
    assert kept.endswith(b"\n(what it printed after that is not kept)\n")
    assert len(kept) < 2 * 2**20


def test_a_file_that_can_not_be_written_costs_nothing(tmp_path):
    talking = Child("acts:act", output=tmp_path / "none" / "output")
    talking.send(("echo", "a"))
    assert talking.receive(30) == {"text": "a"}
    talking.end()


PARENT = """
import sys
from jaxlm.host.child import Child
child = Child("acts:act")
child.send(("hang", sys.argv[1]))
print(child.pid, flush=True)
child.receive()
child.receive()
"""


def test_it_ends_with_its_parent_however_that_ends(tmp_path):
    """With all that it started, and while a call into C holds Python's lock."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "left")], stdout=subprocess.PIPE) as parent:
        family = [int(parent.stdout.readline()), number_in(tmp_path / "left")]
        assert not any(map(gone, family))
        parent.kill()
        parent.wait()
        assert soon(lambda: all(map(gone, family)))


def test_an_interrupt_ends_it(child, tmp_path):
    child.send(("hang", str(tmp_path / "left")))
    child.receive(30)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        child.receive(30)
    assert child.ended
