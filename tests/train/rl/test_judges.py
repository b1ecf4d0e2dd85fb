"""What the child process does, here without one: reading answers, numbers and options, and saying what went wrong."""

import dataclasses
import math
import random
import re
import sys
import time
import types

import pytest
import tiny_rewards

from jaxlm.train.rl import judges


@pytest.mark.parametrize(
    ("answer", "judged"),
    [
        ("<think>5</think> <answer> 7\n</answer>.", "7"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1\n2</answer>", "1\n2"),
        (" 12 \n", "12"),
        ("<answer>3", "<answer>3"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_answer_is_judged(answer, judged):
    assert judges.final(answer) == judged


def test_the_form_is_that_of_the_whole_answer_and_a_dot_is_any_character():
    judge = judges.Judge()
    judge.load((), "", r"<think>.*</think>\s*<answer>\d+</answer>")
    right = "<think>a\nb</think>\n<answer>12</answer>"
    assert judge.format([right, right + " so", "so " + right, "12"]) == [1.0, 0.0, 0.0, 0.0]


def listed(text, *more):
    """The answers that a text holds, between bars, and more of them."""
    return [answer for line in text.strip().splitlines() for answer in line.split(" | ")] + [*more]


SEVERAL = listed(
    """
(17, 18) | 17, 18 | [17, 18] | (17; 18) | 16, 17, 18 | 17 18 | 10, 18 or 20 | The answer is (17, 18). | 17 or 18
17 or 18 apples | x=17 or x=18 | either 17 apples or 18 apples | $17$ or 18 | 17 or 18. I saw 2. | 17 and 18
The answers are 17 and 18. | x = 17 and x = 18 | between 17 and 18 | $17\\cup 18$ | 17 to 18 | 17 through 18
17 ... 18 | (-oo, 18) | 17 < x < 18 | x<=18 | x \\ne 18 | 18 > x | not 18 | 17, 18 is the answer
The answer is 17, 18 or 19 | 17 or maybe 18 | $17 to $18 | **17** or **18** | between 17 and 18 apples | at least 17
at least 18 apples | at most 18 | It is 17, 18.
""",
    "17\n18",
)
ONE = listed(
    """
18 | 18. | $18 | $18.00 | 18 eggs | 18% | **18** | x = 18 | #### 18 | \\boxed{18} | => 18 | about 18 | 36/2 | 17+1
10 + 8 = 18 | 10 and 8 make 18 | <<10+8=18>>18 eggs | 18 or 18.0 | Is it 17 or 18? It is 18.
The answer is 18, the sum of 10 and 8. | rose from 10 to 18 | If x is 3, 18 are left
between 10 and 20, she made 18 | In 2 to 3 hours he makes 18 | If 20 > 18, then she has 18 left
He paid 2 and 18 remained | He sold 2, 18 remain | 17 apples and 18 pears | 2 + 16 = 18
The price went up from $12 to 18 | From **12** to **18** | Who buys 3 or more pays 18 | Is it 17 or 18? It is 9*2
If she needs at least 10, she has 18 | between 17 and 19 lies 18
""",
    "16 - 3 - 4 = 9.\n9 * 2 = 18",
)


@pytest.mark.parametrize("answer", SEVERAL)
def test_an_answer_of_several_numbers_earns_nothing(answer):
    pytest.importorskip("math_verify")
    assert [judges._equal(truth, answer) for truth in ("17", "18")] == [0.0, 0.0]


def test_an_answer_of_one_number_earns_whatever_form_it_has():
    verify = pytest.importorskip("math_verify").verify
    for answer in ONE:
        assert answer == "18" or verify(judges._truth("18"), judges._parsed(answer)), (
            answer
        )  # math-verify alone pays too
        assert judges._equal("18", answer) == 1.0, answer
    assert judges._equal("1,800", "It is $1,800.") == judges._equal("(1, 2)", "$(1, 2)$") == 1.0
    assert judges._equal("19", "18 and 17") == judges._equal("10", "1, 10 is the answer") == 0.0


@pytest.mark.parametrize(
    "answer", ["1" + ",000" * 490 + " x5", "1, 2, " * 330 + "x5", "1" * 1990 + "x5", "1 or " * 390]
)
def test_an_answer_of_many_numbers_is_searched_in_a_moment(answer):
    began = time.process_time()
    judges._SEVERAL.search(answer)
    assert time.process_time() - began < 5


@pytest.fixture
def score(tmp_path, monkeypatch):
    """The function `score` of tiny_rewards, as a judge calls it."""
    tiny_rewards.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield loaded("scores:score")
    del sys.modules["scores"]


def loaded(name: str) -> judges.Judge:
    judge = judges.Judge()
    judge.load((), name, "")
    return judge


def test_numbers_of_any_kind(score):
    assert score.function([""] * 3, ["array", "true", "four"], {}) == [5.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("few", "returned 1 number for 2 answers"),
        ("many", "returned more than 2 for 2 answers"),
        ("text", "returned '1.0', not a list of numbers"),
        ("a dict", "returned {0: 1.0, 1: 1.0}, not a list of numbers"),
        ("nan", "returned nan, which is no finite number"),
        ("large", "returned 1e+39, which is no finite number"),
        ("none", "returned None, which is no finite number"),
        ("a text", "returned '1.0', which is no finite number"),
        ("two", "returned array([1., 1.]), which is no finite number"),
    ],
)
def test_what_is_no_number_for_each_answer(score, answer, why):
    with pytest.raises(judges.Wrong) as error:
        score.function(["", ""], ["x", answer], {})
    assert str(error.value) == why


def test_a_function_that_empties_its_lists_owes_as_many_numbers(score):
    score._function = lambda prompts, answers: answers.clear() or []
    with pytest.raises(judges.Wrong, match="returned 0 numbers for 2 answers"):
        score.function(["", ""], ["x", "y"], {})


def test_an_exception_is_one_line_that_names_the_users_own(score):
    with pytest.raises(ValueError) as error:
        score.function([""], ["raise"], {})
    assert judges.one_line(error.value) == "ValueError: no such thing (scores.py:9)"


def test_columns_that_a_function_does_not_take(score):
    score.takes(["answer", "anything"])
    with pytest.raises(
        judges.Refused, match=r"scores:narrow can't be called with the columns a, b of the prompts: got an"
    ):
        loaded("scores:narrow").takes(["a", "b"])
    with pytest.raises(judges.Refused, match="multiple values for argument 'prompts'"):
        score.takes(["prompts"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("score:score", "there is no module score in {} or on Python's path; did you mean scores?"),
        ("scores.more:score", "there is no module scores.more in {} or on Python's path; did you mean scores?"),
        ("other.module:f", "there is no module other.module in {} or on Python's path"),
        ("scores:scor", "scores has no function scor; did you mean score?"),
        ("scores:number", "scores has no function number; there are narrow, score"),
        ("needs:f", "can't be imported: ModuleNotFoundError: No module named 'absent' (needs.py:1)"),
        ("broken:f", "can't be imported: SyntaxError: '(' was never closed (broken.py:2)"),
        ("ends:f", "can't be imported: SystemExit: 4 (ends.py:1)"),
    ],
)
def test_a_function_that_is_not_there(score, tmp_path, name, why):
    texts = {"needs": "import absent", "broken": "x = 1\ny = (", "ends": "raise SystemExit(4)"}
    for module, text in texts.items():
        (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(judges.Refused) as error:
        loaded(name)
    assert str(error.value) == f"config.reward.function={name}: {why.format(tmp_path)}"


def test_a_package_that_is_missing(monkeypatch):
    for module, task in (("reasoning_gym", ("reasoning_gym", "chain_sum", {})), ("math_verify", ("gsm8k", "", {}))):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(judges.Refused, match=r"^config.reward.tasks: .* needs .*: pip install -e .*/.*\[rl\].$"):
            judges.Judge().load([task], "", "")


@dataclasses.dataclass
class Settings:
    terms: int = 2
    share: float = 0.5
    negative: bool = False
    signs: tuple = ("+",)
    seed: int | None = None
    size: int = 500


class Sums:
    """Stands for a dataset of reasoning-gym: one that knows `size` questions, and draws from the global generator."""

    def __init__(self, settings: Settings):
        if settings.terms < 1:
            raise AssertionError("terms must be positive")
        self.settings, self.drawn = settings, random.random()

    def __getitem__(self, number: int) -> dict:
        if number >= self.settings.size:
            raise IndexError
        return {"question": f"{self.settings.seed + number} {random.random()}", "answer": "x"}

    def score_answer(self, answer: str, entry: dict) -> float:
        if answer == "raise":
            raise KeyError("raise")
        return {"x": 1.0, "nearly": 0.99, "nan": math.nan}.get(answer, 0.0)


@pytest.fixture
def gym(monkeypatch):
    """A package that looks like reasoning-gym; returns what makes a judge of one task."""
    fake = types.ModuleType("reasoning_gym")
    fake.factory = types.SimpleNamespace(DATASETS={"sums": (Sums, Settings)})
    fake.made = []
    fake.create_dataset = lambda name, **keys: fake.made.append(keys) or Sums(Settings(**keys))
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)

    def make(**options) -> judges.Judge:
        judge = judges.Judge()
        judge.load([("reasoning_gym", "sums", options)], "", "")
        return judge

    make.made = fake.made
    return make


def test_only_full_marks_count(gym):
    asked = [(0, 3, text) for text in ("x", "<answer>x</answer>", "nearly", "nan", "")]
    assert gym().exact(asked) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_what_a_task_can_not_judge_is_said(gym):
    right, wrong = gym().exact([(0, 3, "x"), (0, 3, "raise")])
    assert right == 1.0
    assert re.fullmatch(r"KeyError: 'raise' \(test_judges.py:\d+\)", wrong)


def test_a_question_follows_from_its_number(gym):
    """Also of a task that knows a few questions, which is made anew for others; whatever was made before."""
    numbers = [3, 1234, 2**32 - 1, 1235, 4]
    found = dict(zip(numbers, gym().draw([(0, number) for number in numbers]), strict=True))
    assert [question.split()[0] for question, _ in found.values()] == [str(number) for number in numbers]
    assert len({question.split()[1] for question, _ in found.values()}) == 5
    again = numbers[::-1]
    assert gym().draw([(0, number) for number in again]) == [found[number] for number in again]


def test_options_are_values_of_the_tasks_own_kinds(gym):
    gym(terms="3", share="1", negative="true", signs="('+', '-')")
    assert gym.made[0] == {
        **{"terms": 3, "share": 1.0, "negative": True, "signs": ("+", "-")},
        **{"seed": 0, "size": 500},
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"term": "3"}, "reasoning_gym:sums has no option 'term'; did you mean terms?"),
        ({"x": "3"}, "reasoning_gym:sums has no option 'x'; there are negative, share, signs, terms"),
        ({"terms": "3.5"}, "reasoning_gym:sums: terms=3.5 is no int; the default is 2"),
        ({"terms": "true"}, "reasoning_gym:sums: terms=true is no int; the default is 2"),
        ({"negative": "1"}, "reasoning_gym:sums: negative=1 is no bool; the default is False"),
        ({"terms": "-1"}, "reasoning_gym:sums can't be made: terms must be positive"),
        ({"seed": "1"}, "reasoning_gym:sums: seed can't be set: questions depend on config.seed"),
    ],
)
def test_options_that_can_not_be(gym, options, why):
    with pytest.raises(judges.Refused) as error:
        gym(**options)
    assert str(error.value) == f"config.reward.tasks: {why}"


def test_a_task_that_is_not_there(gym):
    with pytest.raises(judges.Refused, match=r"reasoning_gym has no task 'sum'; did you mean sums\?$"):
        judges.Judge().load([("reasoning_gym", "sum", {})], "", "")
