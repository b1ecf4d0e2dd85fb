"""What a policy writes reaches nothing: no file, no socket, no other process, no judge, no true answer."""

import contextlib
import importlib.util
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys

import pytest

from jaxlm.host import sandbox_child
from jaxlm.train.rl import judges, process

pytestmark = pytest.mark.skipif(
    not sandbox_child.rules(), reason=f"{platform.system()} {platform.machine()} has no seccomp filter of ours"
)
WITH_GYM = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"), reason="needs reasoning-gym: pip install -e '.[rl]'"
)

FORKS = """
import json, os, socket, sys
from jaxlm.train.rl.judges import Forks
forks = Forks()
port, folder = int(sys.argv[1]), sys.argv[2]

def denied(call):
    try:
        call()
    except PermissionError:
        return "denied"
    return "done"

def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

def crash():
    os.write(3, b'[1, ')
    os._exit(0)

calls = {
    "socket": lambda: socket.create_connection(("127.0.0.1", port)),
    "write": lambda: open(os.path.join(folder, "new"), "w"),
    "read": lambda: open(os.path.join(folder, "mine")),
    "remove": lambda: os.remove(os.path.join(folder, "mine")),
    "environ": lambda: open(f"/proc/{os.getppid()}/environ"),
    "kill": lambda: os.kill(os.getppid(), 9),
    "fork": os.fork,
}
found = dict(zip(calls, forks.results([lambda call=call: denied(call) for call in calls.values()])))
others = {
    "number": lambda: 1.0,
    "files": lambda: [fd for fd in range(64) if is_open(fd)],
    "exit": lambda: os._exit(0),
    "half": crash,
    "raises": lambda: sys.exit(3),
    "more": lambda: "x" * 10_000,
    "bomb": lambda: bytearray(9 << 30),
    "segment": lambda: __import__("ctypes").string_at(0),
}
found |= dict(zip(others, forks.results(others.values())))
found["many"] = forks.results([lambda n=n: n for n in range(50)]) == list(range(50))
print(json.dumps(found | {"confined": forks.confined}))
"""


def test_a_fork_reaches_nothing_but_its_result(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", FORKS, port, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {
        **dict.fromkeys(("socket", "write", "read", "remove", "environ", "kill", "fork"), "denied"),
        **dict.fromkeys(("exit", "half", "more", "segment"), "ended before it was judged"),
        **{"number": 1.0, "files": [0, 1, 2, 3], "raises": "SystemExit", "bomb": "MemoryError"},
        **{"many": True, "confined": True},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_where_nothing_confines_a_task_that_runs_answers_is_refused(monkeypatch):
    judge = judges.Judge()
    judge._tasks = [type("Gym", (), {"hook": print, "name": "reasoning_gym:countdown"})]
    monkeypatch.setattr(judges, "Forks", lambda: type("Forks", (), {"confined": False}))
    with pytest.raises(judges.Refused, match="countdown runs what the policy writes as Python, and here nothing keeps"):
        judge._make_forks()


def names() -> list[str]:
    import reasoning_gym

    return sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})  # it is made of others, which no option names


def some_of(draw, count: int) -> list[str]:
    """The tasks that evaluate answers, and others drawn at random, `count` in all."""
    others = draw.sample(
        sorted({*names()} - judges.EVALUATED), k=max(0, min(count, len(names())) - len(judges.EVALUATED))
    )
    return [*sorted(judges.EVALUATED), *others]


def shapes(payload: str, truth: str) -> list[str]:
    """Answers that hold a text where a task may evaluate it."""
    return [
        payload,
        f"[{payload}]",
        f"[[{payload}]]",
        f"({truth}) + {payload}",
        f"<answer>{truth} * {payload}</answer>",
    ]


TRIED = """
import json, sys
from jaxlm.train.rl import judges
asked, found = json.load(sys.stdin), set()
judge = judges.Judge()
judge.load([("reasoning_gym", name, {}) for name in asked], "", "")
now = ""

def inside(code):
    consts = (inside(const) if hasattr(const, "co_code") else [const] for const in code.co_consts)
    return [*code.co_names, *code.co_varnames, *(x for const in consts for x in const)]

def look(event, arguments):
    if event == "exec" and "zq_marker" in inside(arguments[0]):
        found.add(now)

sys.addaudithook(look)
for task, now in enumerate(asked):
    for number in (3, 4):
        (drawn,) = judge.draw([(task, number)])
        truth = str(drawn[1]) if not isinstance(drawn, str) else "1"
        m = "zq_marker"
        tries = [m, f"[{m}]", f"[[{m}]]", f"({truth}) + {m}", f"{truth} * {m}", f"{truth}, {m}", f"{m} {truth}", f"${m}$"]
        judge.exact([(task, number, text) for text in tries])
print("found", json.dumps(sorted(found)))
"""


@WITH_GYM
@pytest.mark.faults
def test_which_tasks_evaluate_answers_is_found_by_trying(trials, draw):
    """Whole: --trials=105."""
    asked = some_of(draw, trials(20))
    command = [sys.executable, "-c", TRIED]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=600, check=True)
    _, _, last = done.stdout.rpartition("found ")  # some tasks print too
    assert json.JSONDecoder().raw_decode(last)[0] == sorted(judges.EVALUATED)


def payloads(folder: pathlib.Path, port: int) -> list[str]:
    module = "__import__({!r})".format
    patch = "__import__('jaxlm.train.rl.judges', fromlist=['Gym'])"
    return [
        f"{module('os')}.system('touch {folder}/ran')",
        f"open('{folder}/written', 'w').write('x')",
        f"{module('socket')}.create_connection(('127.0.0.1', {port}), 2)",
        f"setattr({patch}.Gym, 'exact', lambda *a: 1.0)",
        f"{module('builtins')}.__dict__.update(float=lambda x: 1.0)",
        f"[{module('os')}.write(fd, b'1.0') for fd in range(64)] + [{module('os')}._exit(0)]",
        f"{module('os')}.kill({module('os')}.getppid(), 9)",
        "entry['answer']",
        "self.score_answer.__func__.__globals__",
        "eval(\"__import__('os').getppid()\")",
        f"sympify(\"open('{folder}/nested', 'w')\")",
        f"lambdify([], \"open('{folder}/nested', 'w')\")()",
        "(x for x in [1]).gi_frame.f_back.f_back.f_locals['entry']['answer']",
    ]


def worth(score: float | str) -> float:
    """What a run takes a judgement for: a text, which says why there is none, is wrong."""
    return 0.0 if isinstance(score, str) else score


@contextlib.contextmanager
def judging(tasks: list[str]):
    found = process.Processes([("reasoning_gym", name, {}) for name in tasks], "", "", 1200.0)
    found.start()
    try:
        yield found
    finally:
        found.close()


@WITH_GYM
@pytest.mark.faults
def test_hostile_answers_have_no_effect_and_honest_ones_their_rewards(trials, draw, tmp_path, monkeypatch):
    """Whole: --trials=105. Rewards are those that the task itself gives, called without a fork."""
    monkeypatch.setenv("JAXLM_SECRET", "hunter2")
    tasks = some_of(draw, trials(12))
    right, hostile = [], []
    with judging(tasks) as found, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        for task in range(len(tasks)):
            (drawn,) = found.ask("draw", [(task, 3)])
            truth = str(drawn[1])
            answers = [
                text for payload in payloads(tmp_path, server.getsockname()[1]) for text in shapes(payload, truth)
            ]
            hostile += [(task, text) for text in answers]
            right += [
                (task, 3, text) for text in (truth, f"<answer> {truth} </answer>", truth + truth, "0", "", str([truth]))
            ]
        before = found.ask("exact_truth", right)
        pids = found.judge.pid, found.questions.pid
        wrong = []
        for task, name in enumerate(tasks):  # an order a task, so that it ends in time
            texts = [text for of, text in hostile if of == task]
            asked = [(task, 3, text) for text in texts]
            scores = found.ask("exact", asked)
            # Of a task that only reads, any text may be right: game_of_life_halting takes all for True.
            owed = [0.0] * len(asked) if name in judges.EVALUATED else found.ask("exact_truth", asked)
            wrong += [(name, *one) for one in zip(texts, scores, owed, strict=True) if worth(one[1]) != worth(one[2])]
        after = found.ask("exact", right)
        assert (found.judge.pid, found.questions.pid) == pids
        with pytest.raises(BlockingIOError):
            server.accept()
        for pid in pids:
            assert b"hunter2" not in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    assert os.listdir(tmp_path) == []
    assert wrong == []
    assert [a for a, b in zip(zip(right, after, strict=True), before, strict=True) if a[1] != b] == []
