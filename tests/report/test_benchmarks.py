"""The benchmarks of a run's page: scores, curves, the models of others; and the red team's, what was before first."""

import html
import json

import tiny_eval
from tiny_pages import SUMMARY, rows

from jaxlm.eval import humaneval
from jaxlm.report import benchmarks
from jaxlm.train import outlook


def test_the_last_scores_with_two_standard_errors_and_chance():
    table = rows(benchmarks.scores(SUMMARY))
    assert table[1] == ["ARC-Easy", "0.200 ± 0.020", "0.250", "2.000", "0.100", "acc_norm", "1,000", "0", "40"]
    assert table[2] == ["&lt;made&gt;", "", "", "", "", "", "", "", "40"]


def test_a_program_that_passes_is_an_accuracy():
    """The name under which eval.humaneval writes it."""
    allowed = tiny_eval.settings(run_code=True)
    problem = {"task_id": "0", "prompt": "", "entry_point": "f", "test": "def check(f):\n    assert f() == 1"}
    found = humaneval.grade([problem], ["def f(): return 1"], allowed)
    point = {"metrics": found.metrics, "stderr": found.stderr, "step": 1, "n": 1, "fewshot": 0, "chance": None}
    table = rows(benchmarks.scores({"run": {}, "benchmarks": {"humaneval": [point]}}))
    assert table[1] == ["HumanEval", "1.000 ± 0.490", "", "", "", "pass_at_1", "1", "0", "1"]


def test_a_score_that_can_not_be_is_told():
    text = benchmarks.scores(SUMMARY)
    assert "0.200 on ARC-Easy is below chance, 0.250, by more than two standard errors: check EOS" in text
    better = [SUMMARY["benchmarks"]["arc_easy"][0]]
    assert "check EOS" not in benchmarks.scores(SUMMARY | {"benchmarks": {"arc_easy": better}})


def test_curves_need_two_steps():
    assert benchmarks.scores(SUMMARY).count("<figure") == 2
    once = {task: points[-1:] for task, points in SUMMARY["benchmarks"].items()}
    assert "<figure" not in benchmarks.scores(SUMMARY | {"benchmarks": once})
    assert benchmarks.scores({"run": {}}) == ""


def test_a_curve_joins_the_same_questions_only():
    """Of the training's steps and a later `jaxlm eval` with more questions."""
    first, second = SUMMARY["benchmarks"]["arc_easy"]
    more = second | {"step": 60, "n": 2000, "metrics": {"acc_norm": 0.9, "bits_per_byte": 1.0}}
    joined = benchmarks.scores(SUMMARY | {"benchmarks": {"arc_easy": [first, second, more]}})
    alone = benchmarks.scores(SUMMARY | {"benchmarks": {"arc_easy": [first, second]}})
    assert joined.partition("<figure")[2] == alone.partition("<figure")[2] != ""
    assert "ARC-Easy: curves show steps of 1,000 questions asked alike; not step 60, asked otherwise." in joined
    assert rows(joined)[1][1] == "0.900 ± 0.020"
    none = benchmarks.scores(SUMMARY | {"benchmarks": {"arc_easy": [first, more]}})
    assert "<figure" not in none
    assert "asked otherwise" not in alone


def test_beside_published_models():
    head, *lines = rows(benchmarks.beside(SUMMARY))
    shown = [model.name for model in benchmarks.models() if model.shown]
    assert head == ["", "this run", *shown]
    found = {line[0]: line[1:] for line in lines}
    assert found["ARC-Easy"][0] == "20.0 n ± 2.0"
    assert found["ARC-Easy"][1 + shown.index("Pythia-1B")] == "49.0 n"
    assert found["ARC-Easy"][1 + shown.index("GPT-2 XL")] == ""
    assert found["tokens"][1 + shown.index("GPT-2 XL")] == ""
    assert found["MMLU"][1 + shown.index("TinyLlama-1.1B")] == "25.3 f"
    for model in benchmarks.models():
        assert not model.shown or model.source[:20] in benchmarks.beside(SUMMARY)
    assert benchmarks.beside(SUMMARY | {"benchmarks": {"made": SUMMARY["benchmarks"]["<made>"]}}) == ""


def point(step: int, **metrics) -> dict:
    return {"step": step, "metrics": metrics, "stderr": {"flagged": 0.05}, "chance": None, "n": 10, "fewshot": 0}


def test_before_and_after():
    own = {"redteam_toxic": [point(5, flagged=0.2, longest_copy=1031.0)], "redteam_bias": [point(5, stereotype=0.6)]}
    before = [
        {"name": "base", "benchmarks": {"redteam_toxic": [point(40, flagged=0.4, rude=0.25)], "piqa": [point(40)]}}
    ]
    run = {"name": "chat"}
    head, *lines = rows(benchmarks.redteam({"run": run, "benchmarks": own, "before": before}))
    assert head == ["category", "run", "step", "flagged", "longest copy", "stereotype", "rude", "prompts"]
    assert lines == [
        ["toxic", "base", "40", "0.400 ± 0.100", "", "", "0.250", "10"],
        ["toxic", "chat", "5", "0.200 ± 0.100", "1,031", "", "", "10"],
        ["bias", "chat", "5", "", "", "0.600", "", "10"],
    ]
    assert benchmarks.redteam({"run": run}) == benchmarks.redteam(SUMMARY) == ""
    assert benchmarks.scores({"run": run, "benchmarks": own}) == ""  # they stand in one table only


def test_what_the_scores_mean_stands_below_them():
    """Of the categories and scores that were measured; the same lines as in `jaxlm eval`."""
    own = {"redteam_toxic": [point(5, flagged=0.2)], "redteam_privacy": [point(5, flagged=0.2, copied=0.1)]}
    page = benchmarks.redteam({"run": {"name": "chat"}, "benchmarks": own})
    lines = benchmarks.meanings(
        {"redteam_toxic": ["flagged"], "redteam_privacy": ["flagged", "copied"], "piqa": ["acc"]}
    )
    assert [line.partition(":")[0] for line in lines] == ["redteam_toxic", "redteam_privacy", "copied"]
    assert all(line in html.unescape(page) for line in lines)
    assert not benchmarks.meanings({"piqa": ["acc"]})
    assert "(0: under 64)" in lines[-1]


def made(folder, config: dict, *steps: int) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"train": {}} | config))
    for step in steps:
        (folder / "eval" / str(step)).mkdir(parents=True)
        content = {"tasks": {"redteam_toxic": {"metrics": {"flagged": step / 100}}}}
        (folder / "eval" / str(step) / "results.json").write_text(json.dumps(content))


def test_the_runs_before_are_those_it_was_made_from(tmp_path):
    """Each at its last scores up to the checkpoint that was taken; a circle of origins ends."""
    made(tmp_path / "base", {"origin": str(tmp_path / "sft")}, 10, 20, 30)
    made(tmp_path / "sft", {"origin": str(tmp_path / "base"), "origin_checkpoint": "25"}, 5)
    made(tmp_path / "dpo", {"origin": str(tmp_path / "sft")}, 7)
    found = outlook.gather(tmp_path / "dpo")["before"]
    assert [(one["name"], one["benchmarks"]["redteam_toxic"][0]["step"]) for one in found] == [("base", 20), ("sft", 5)]
    made(tmp_path / "alone", {}, 3)
    assert outlook.gather(tmp_path / "alone")["before"] == []
    made(tmp_path / "lost", {"origin": str(tmp_path / "gone")}, 3)
    assert outlook.gather(tmp_path / "lost")["before"] == [{"name": "gone", "benchmarks": {}, "samples": {}}]
