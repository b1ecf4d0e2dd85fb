"""The process that judges: whatever a function does there, an order ends in time, with one line."""

import contextlib
import pathlib
import time

import pytest
import tiny_rewards

from jaxlm.config import ConfigError
from jaxlm.train.rl import process

TIMEOUT_S = 30.0  # this machine may be busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current directory, which holds the function's module."""
    path = tmp_path_factory.mktemp("process")
    tiny_rewards.write(path)
    with contextlib.chdir(path):
        yield path


@pytest.fixture(scope="module")
def judging(folder):
    found = process.Process(((), "scores:score", ""), TIMEOUT_S, folder)
    yield found
    found.close()


def ask(judging, *answers: str) -> list[float]:
    hangs = {"sleep", "regex"} & {*answers}
    order = ("function", ["p"] * len(answers), list(answers), {})
    return judging.ask(*order, timeout_s=0.5) if hangs else judging.ask(*order)


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


def test_one_process_for_many_orders(judging, folder):
    assert ask(judging, "a", "four") == [1.0, 4.0]
    first = judging.pid
    assert ask(judging, "huge", "b") == [4.0, 1.0]
    assert judging.ask("function", ["p", "q"], ["columns", "x"], {"answer": ["3", None], "other": [{}, 1]}) == [
        3.0,
        -1.0,
    ]
    assert judging.pid == first
    output = (folder / process.OUTPUT).read_bytes()
    assert output.startswith(b"xxx")
    assert output.endswith(b"\n(what it printed after that is not kept)\n")
    assert output.count(b"not kept") == 1
    assert len(output) < 2 * 2**20


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", "ValueError: no such thing (scores.py:9)"),
        ("nan", "returned nan, which is no finite number"),
        ("sleep", "took over 0.5 s"),
        ("regex", "took over 0.5 s"),
        ("os._exit", "ended with exit code 7, after: last words"),
        ("sys.exit", "SystemExit: 3 (scores.py:29)"),
        ("signal", "was ended by signal 11, after: Fatal Python error: Segmentation fault"),
    ],
)
def test_a_failure_is_one_line_and_the_next_order_has_another_process(judging, answer, why):
    assert ask(judging, "a") == [1.0]
    first, began = judging.pid, time.monotonic()
    with pytest.raises(process.Failed) as error:
        ask(judging, "a", answer)
    assert time.monotonic() - began < TIMEOUT_S
    assert str(error.value) == why
    assert soon(lambda: gone(first))
    assert ask(judging, "a") == [1.0]
    assert judging.pid != first


def test_the_traceback_is_kept(judging, folder):
    with pytest.raises(process.Failed):
        ask(judging, "raise")
    assert soon(lambda: b'raise ValueError("no such' in (folder / process.OUTPUT).read_bytes())


def test_a_refused_order_leaves_the_process(judging):
    ask(judging, "a")
    first = judging.pid
    with pytest.raises(ConfigError, match="can't be called with the columns prompts"):
        judging.ask("takes", ["prompts"])
    assert judging.pid == first


def test_what_is_not_there_is_refused_at_the_start(folder):
    wrong = process.Process(((), "scores:absent", ""), TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"^config.reward.function=scores:absent: scores has no function absent"):
        wrong.start()
    assert wrong.pid is None


def test_what_is_not_there_any_more_is_a_failure(folder):
    (folder / "late.py").write_text("def f(prompts, answers): raise ValueError")
    late = process.Process(((), "late:f", ""), TIMEOUT_S)
    late.start()
    (folder / "late.py").unlink()
    for why in (r"ValueError \(late.py:1\)", "there is no module late in"):
        with pytest.raises(process.Failed, match=why):
            late.ask("function", ["p"], ["a"], {})
    late.close()


def test_files_here_do_not_take_the_place_of_modules_that_the_program_needs(folder):
    (folder / "socket.py").write_text("raise SystemExit('the wrong module')")
    try:
        found = process.Process(((), "scores:score", ""), TIMEOUT_S)
        assert ask(found, "a") == [1.0]
        found.close()
    finally:
        (folder / "socket.py").unlink()
