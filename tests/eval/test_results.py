"""What `jaxlm eval` writes beside what the training wrote."""

import pytest

from jaxlm.eval import results
from jaxlm.eval.results import Item, TaskResult


def result(n: int, score: float, fewshot: int = 0) -> TaskResult:
    return TaskResult("arc_easy", {"acc": score}, {}, 0.25, fewshot, [Item(str(i), {"acc": score}) for i in range(n)])


@pytest.mark.parametrize(
    ("n", "fewshot", "training", "kept"),
    [(4, 0, True, True), (8, 0, True, False), (4, 5, True, False), (4, 0, False, True), (6, 0, False, False)],
)
def test_fewer_questions_do_not_replace_more(tmp_path, n, fewshot, training, kept):
    about = {"step": 20, "limit": 6}
    results.write(tmp_path, [result(6, 0.0)], about | {"training": True} if training else about)
    line = results.add(tmp_path, result(n, 1.0, fewshot), {"step": 20, "limit": n})
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
