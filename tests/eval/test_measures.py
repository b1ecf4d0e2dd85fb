"""Bits per byte of the right answer, its margin, the alarm for scores that can't be, and the files of scores."""

import math

import pytest

from jaxlm.eval import results
from jaxlm.eval.results import Item, TaskResult
from jaxlm.report import benchmarks

LN2 = math.log(2)


def result(task="arc_easy", chance=0.25, n=1000, **metrics) -> TaskResult:
    stderr = {name: math.sqrt(abs(value * (1 - value)) / n) for name, value in metrics.items()}
    return TaskResult(task, metrics, stderr, chance, 0, [])


def test_bits_per_byte_and_margin_by_hand():
    """8 bits over 4 bytes; the best wrong one has 12 over 4."""
    found = results.of_choices([-16 * LN2, -8 * LN2, -12 * LN2], [4, 4, 4], 1)
    assert found == pytest.approx({"bits_per_byte": 2.0, "margin": 1.0})
    assert results.of_choices([-16 * LN2, -8 * LN2, -12 * LN2], [4, 4, 4], 0)["margin"] == pytest.approx(-2.0)


def test_of_several_right_answers_the_mean_and_the_best_one_counts():
    found = results.of_choices([-4 * LN2, -8 * LN2, -12 * LN2], [4, 4, 4], [0, 1])
    assert found == pytest.approx({"bits_per_byte": 1.5, "margin": 2.0})


@pytest.mark.parametrize(
    ("logp", "sizes", "gold", "names"),
    [
        ([-1.0], [4], 0, {"bits_per_byte"}),  # LAMBADA: no wrong answers
        ([-1.0, -2.0], [4, 4], -1, set()),  # the harness knows no right one
        ([-1.0, -2.0], [4, 4], [], set()),
        ([-1.0, -2.0], [4, 0], 0, set()),
    ],
)
def test_what_can_not_be_measured_is_left_out(logp, sizes, gold, names):
    assert set(results.of_choices(logp, sizes, gold)) == names


def test_a_task_has_the_means_of_its_items():
    detail = [{"logp": [-4 * LN2 * n, -20.0], "bytes": [4, 4], "gold": 0} for n in (1, 3)]
    items = [Item(str(n), {"acc": 1.0}, d) for n, d in enumerate(detail)]
    found = results.measured(TaskResult("t", {"acc": 1.0}, {}, 0.5, 0, items))
    assert [item.metrics["bits_per_byte"] for item in found.items] == pytest.approx([1.0, 3.0])
    assert found.metrics["bits_per_byte"] == pytest.approx(2.0)
    assert found.stderr["bits_per_byte"] == pytest.approx(1.0)  # sqrt(2 / 2): two values, two apart
    written = [Item("0", {"exact_match": 1.0}, {"answer": "a"})]
    assert results.measured(TaskResult("t", {}, {}, None, 0, written)).metrics == {}


@pytest.mark.parametrize(
    ("score", "flops", "heard"),
    [
        (0.47, 7e19, ""),  # GPUburnout-1B's own
        (0.26, 1e21, "far under"),  # Pythia with so many has .47
        (0.20, 0, "below chance"),
        (0.24, 0, ""),
        (0.26, 1e17, ""),  # nobody so small is known
        (0.20, 1e17, "below chance"),
    ],
)
def test_the_alarm(score, flops, heard):
    line = results.alarm(result(acc_norm=score), flops)
    assert (heard in line and "check EOS" in line) if heard else not line


@pytest.mark.parametrize(("n", "heard"), [(4, False), (40, True)])
def test_of_few_items_that_are_all_wrong_there_is_no_alarm(n, heard):
    """Their standard error is 0: that of guessing counts."""
    items = [Item(str(i), {"acc_norm": 0.0}) for i in range(n)]
    found = TaskResult("arc_easy", {"acc_norm": 0.0}, {"acc_norm": 0.0}, 0.25, 0, items)
    assert ("below chance" in results.alarm(found, 0)) == heard


CHANCES = {"piqa": 0.5, "winogrande": 0.5, "lambada_openai": None}


def test_no_published_score_is_an_alarm():
    """Even without a standard error: ARC-Challenge was chosen so that simple methods are below chance on it."""
    asked = 0
    for model in benchmarks.models():
        for task, scores in model.scores.items():
            for metric in scores.keys() & {"acc", "acc_norm"}:
                asked += 1
                point = {"metrics": {metric: scores[metric]}, "stderr": {}, "chance": CHANCES.get(task, 0.25)}
                told = benchmarks.alarm(task, point, model.flops or 0.0)
                assert told == "", f"{model.name}, {metric}"
    assert asked > 40


def test_below_all_that_is_published_is_an_alarm():
    line = results.alarm(result("arc_challenge", acc_norm=0.15), 1e18)
    assert "is below chance, 0.250, and 0.217, the lowest that is published" in line


def test_published_models():
    models = {model.name: model for model in benchmarks.models()}
    assert models["GPUburnout-1B"].scores["hellaswag"] == {"acc_norm": 0.288}
    assert models["GPT-2 XL"].flops is None
    for model in models.values():
        assert model.source, model.name
        assert all(0 < score < 1 for task in model.scores.values() for score in task.values())
    low, high = 6 * 1.01e9 * 3e11, 6 * 1.1e9 * 3e12
    assert benchmarks.expected("arc_easy", "acc_norm", low) == pytest.approx(0.4899)
    assert benchmarks.expected("arc_easy", "acc_norm", math.sqrt(low * high)) == pytest.approx((0.4899 + 0.5525) / 2)
    assert benchmarks.expected("arc_easy", "acc_norm", 1e25) == pytest.approx(0.5525)
    assert benchmarks.expected("no_task", "acc", 1e21) is None


def answered(n: int, score: float, fewshot: int = 0) -> TaskResult:
    return TaskResult("arc_easy", {"acc": score}, {}, 0.25, fewshot, [Item(str(i), {"acc": score}) for i in range(n)])


@pytest.mark.parametrize(
    ("n", "fewshot", "training", "kept"),
    [(4, 0, True, True), (8, 0, True, False), (4, 5, True, False), (4, 0, False, True), (6, 0, False, False)],
)
def test_fewer_questions_do_not_replace_more(tmp_path, n, fewshot, training, kept):
    about = {"step": 20, "limit": 6}
    results.write(tmp_path, [answered(6, 0.0)], about | {"training": True} if training else about)
    line = results.add(tmp_path, answered(n, 1.0, fewshot), {"step": 20, "limit": n})
    found = results.read(tmp_path / "eval/20")["arc_easy"]
    assert (len(found.items), found.metrics["acc"]) == ((6, 0.0) if kept else (n, 1.0))
    words = "keeps the 6 questions of arc_easy" if kept else f"these {n} questions of arc_easy replace the 6"
    assert words in line
    assert ("that the training asked" in line) == training
    assert ("other worked examples" in line) == bool(fewshot)


def test_an_answer_may_hold_any_character(tmp_path):
    """JSON leaves U+2028 and U+0085 as they are, where str.splitlines() would cut."""
    item = Item("0", {"acc": 1.0}, {"answer": "one\u2028two\x85three\nfour\x1c"})
    place = results.write(tmp_path, [TaskResult("gsm8k", {"acc": 1.0}, {}, None, 0, [item])], {"step": 1})
    assert results.read(place)["gsm8k"].items == [item]
