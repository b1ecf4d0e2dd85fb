"""What answers are worth: the parts add up, what fails is tried once more, and what fails again is one line."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tiny_rewards
from tiny_rewards import item

from jaxlm.config import ConfigError, RunError
from jaxlm.host import sandbox_child
from jaxlm.train.rl import judges, process, rewards


def section(**keys):
    """The section `reward`."""
    base = tiny_rewards.make_config("reward.tasks=gsm8k").reward
    return dataclasses.replace(base, **({"tasks": ""} | keys))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current directory, which holds the function's module."""
    path = tmp_path_factory.mktemp("rewards")
    tiny_rewards.write(path)
    with contextlib.chdir(path):
        yield path


CONFIG = section(function="scores:score", format=".*!", format_weight=0.25)


@pytest.fixture(scope="module")
def judging(folder):
    found = rewards.make(CONFIG, folder)
    yield found
    found.close()


@pytest.fixture
def said():
    return []


@pytest.fixture
def rewarder(judging, said):
    return rewards.Rewarder(CONFIG, judging, say=said.append)


ITEMS = [item(place=f"a.jsonl:{n}") for n in (1, 2, 3)]


def test_parts_add_up(judging):
    def model(chats):
        assert [len(chat) for chat in chats] == [2, 3, 2]
        assert chats[1][-1] == {"role": "assistant", "content": "four"}
        return [0.5, -2, 0]

    system = {"role": "system", "content": "Be short."}
    longer = dataclasses.replace(ITEMS[1], messages=(system, *ITEMS[1].messages))
    total, parts = rewards.Rewarder(CONFIG, judging, model)([ITEMS[0], longer, ITEMS[2]], ["yes!", "four", "no\nno!"])
    assert {name: values.tolist() for name, values in parts.items()} == {
        "function": [4, 4, 6],
        "format": [0.25, 0, 0.25],
        "model": [0.5, -2, 0],
    }
    assert total.tolist() == [4.75, 2, 6.25]
    assert {x.dtype for x in (total, *parts.values())} == {np.dtype(np.float32)}


def test_the_function_gets_what_is_asked_and_the_columns(judging):
    """A column that a prompt does not have is None for it."""
    items = [item(columns={"answer": "7"}), item(columns={"other": [1]})]
    _, parts = rewards.Rewarder(section(function="scores:score"), judging)(items, ["columns", "x"])
    assert parts["function"].tolist() == [7, -1]


def test_what_fails_once_is_tried_again_in_another_process(rewarder, judging, said, folder):
    first = judging.function.pid
    _, parts = rewarder(ITEMS, ["a", "once", "b!"])
    assert parts["function"].tolist() == [1, 4, 2]
    assert parts["format"].tolist() == [0, 0, 0.25]
    assert judging.function.pid != first
    (line,) = said
    assert line.startswith("reward.function=scores:score: OSError: the net is down (scores.py:")
    assert line.endswith("; it is tried once more")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", "ValueError: no such thing (scores.py:9); on a.jsonl:2, answered 'raise'"),
        ("os._exit", "ended with exit code 7, after: last words; on a.jsonl:2, answered 'os._exit'"),
    ],
)
def test_what_fails_again_is_one_line(rewarder, folder, answer, why):
    with pytest.raises(RunError) as error:
        rewarder(ITEMS, ["raised before?", answer, "raise"])
    assert str(error.value) == f"reward.function=scores:score: {why}; more in {folder / process.OUTPUT}"


def test_a_form_without_end_counts_as_another_form(folder):
    """Of what a policy writes nothing ends a run."""
    form, lines = section(format="(a+)+b", timeout_s=0.4), []
    found = rewards.Rewarder(form, rewards.make(form), say=lines.append)
    _, parts = found(ITEMS[:2], ["a" * 70, "aab"])
    assert parts["format"].tolist() == [0, pytest.approx(form.format_weight)]
    (line,) = lines
    assert "reward.format can't judge some answers, and they count as wrong; the first is a.jsonl:1" in line
    found.close()


def test_a_models_score_that_is_no_number(judging):
    found = rewards.Rewarder(section(model="m"), judging, lambda chats: np.array([0, np.nan]))
    with pytest.raises(RunError, match=r"^reward.model=m gave nan on a.jsonl:2, answered 'b c'$"):
        found(ITEMS[:2], ["a", "b\nc"])


def test_what_is_wrong_is_seen_at_the_start(folder):
    with pytest.raises(ConfigError, match="no module score in"):
        rewards.make(section(function="score:f"))
    with pytest.raises(ConfigError, match="no kind of task 'gsm'"):
        rewards.make(section(tasks="gsm"))
    assert rewards.make(section(model="m")).function.pid is None  # nothing to judge there


@pytest.mark.parametrize("name", sorted(judges.EVALUATED))
def test_a_task_that_runs_answers_asks_for_consent(name, monkeypatch):
    """At each start, a resumed run's too: it is no question of the run's first config."""
    why = rf"^config.reward.tasks=reasoning_gym:{name}\?seen=1 runs .* as Python, .*: --config.reward.run_code=True allows it$"
    with pytest.raises(ConfigError, match=why):
        rewards.make(section(tasks=f"gsm8k,reasoning_gym:{name}?seen=1"))
    monkeypatch.setattr(process.Processes, "start", lambda self: None)
    rewards.make(section(tasks=f"gsm8k,reasoning_gym:{name}?seen=1", run_code=True))
    rewards.make(section(tasks="gsm8k,reasoning_gym:chain_sum"))


def test_a_kernel_without_landlock_is_told(monkeypatch, capsys):
    monkeypatch.setattr(process.Processes, "start", lambda self: None)
    monkeypatch.setattr(sandbox_child, "has_landlock", lambda: False)
    rewards.make(section(tasks="reasoning_gym:countdown", run_code=True))
    assert "what the policy writes can read files, since this kernel has no Landlock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("reward.function=scores.py", "config.reward.function='scores.py' must be MODULE:FUNCTION"),
        ("reward.function=a/b:c", "config.reward.function='a/b:c' must be MODULE:FUNCTION"),
        ("reward.format=(a", "config.reward.format='(a' is not a regular expression"),
    ],
)
def test_keys_that_can_not_be(override, why):
    with pytest.raises(ConfigError) as error:
        tiny_rewards.make_config("reward.tasks=gsm8k", override)
    assert str(error.value).startswith(why)
    assert tiny_rewards.make_config("reward.function=a.b:c_d").reward.function == "a.b:c_d"


class Judging:
    """Stands for the process: an answer is right if it is the true one. It raises on "odd", hangs on "hang"."""

    folder = None

    def __init__(self):
        self.orders = []

    def ask(self, name, asked, timeout_s):
        assert name in ("exact", "exact_truth")
        self.orders.append((len(asked), timeout_s))
        if any(answer == "hang" for _, _, answer in asked):
            raise process.Failed(f"took over {timeout_s:g} s")
        return ["ValueError: odd" if answer == "odd" else float(answer == truth) for _, truth, answer in asked]


def judged(count: int, truths: str = "x"):
    return [item(place=f"gsm8k.jsonl:{n}", judge=(0, t), truth=t) for n, t in zip(range(count), truths * count)]  # noqa: B905


def test_what_a_task_can_not_judge_is_wrong_and_told_once(said):
    """So nothing that a policy writes ends a run. One that hangs is found by trying one by one, each for a short time."""
    fake = Judging()
    found = rewards.Rewarder(section(tasks="gsm8k", timeout_s=60.0), fake, say=said.append)
    total, parts = found(judged(5), ["x", "odd", "hang", "y", "x"])
    assert total.tolist() == parts["exact"].tolist() == [1, 0, 0, 0, 1]
    assert fake.orders == [(5, 60.0)] + [(1, 5.0)] * 5
    assert said == ["gsm8k can't judge some answers, and they count as wrong; the first is gsm8k.jsonl:1, answered 'odd': "
                    "ValueError: odd"]  # fmt: skip
    assert found(judged(2), ["hang", "x"])[0].tolist() == [0, 1]
    assert len(said) == 1


def test_a_task_that_hangs_on_many_answers_is_broken():
    found = rewards.Rewarder(section(tasks="gsm8k", timeout_s=0.5), Judging(), say=lambda line: None)
    assert found(judged(10), ["hang"] * 8 + ["x"] * 2)[0].tolist() == [0] * 8 + [1] * 2
    with pytest.raises(RunError, match=r"^reward.tasks: took over 0.5 s; on gsm8k.jsonl:8, answered 'hang'$"):
        found(judged(10), ["hang"] * 9 + ["x"])


def test_the_best_constant_answer():
    found = rewards.Rewarder(section(tasks="gsm8k"), Judging())
    line = rewards.baseline(judged(10, "abbc"), found)
    assert line.startswith("baseline: always answering 'b' is right for 50.0% of 10 held-out prompts")
    assert rewards.baseline([item()], found) == ""
    line = rewards.baseline([*judged(2), item(judge=(0, 5))], found)
    assert line.startswith("baseline: always answering 'x' is right for 66.7% of 3 held-out prompts")
