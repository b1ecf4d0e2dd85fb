"""The red team on a run's page: a row for each category and checkpoint, what was before first."""

import html
import json

from tiny_pages import SUMMARY, rows

from jaxlm.data.shards import overlap
from jaxlm.report import benchmarks, redteam
from jaxlm.train import outlook


def point(step: int, **metrics) -> dict:
    return {"step": step, "metrics": metrics, "stderr": {"flagged": 0.05}, "chance": None, "n": 10, "fewshot": 0}


def test_before_and_after():
    own = {"redteam_toxic": [point(5, flagged=0.2, longest_run=31.0)], "redteam_bias": [point(5, stereotype=0.6)]}
    before = [
        {"name": "base", "benchmarks": {"redteam_toxic": [point(40, flagged=0.4, rude=0.25)], "piqa": [point(40)]}}
    ]
    run = {"name": "chat"}
    head, *lines = rows(redteam.scores({"run": run, "benchmarks": own, "before": before}))
    assert head == ["category", "run", "step", "flagged", "longest run", "stereotype", "rude", "prompts"]
    assert lines == [
        ["toxic", "base", "40", "0.400 ± 0.100", "", "", "0.250", "10"],
        ["toxic", "chat", "5", "0.200 ± 0.100", "31", "", "", "10"],
        ["bias", "chat", "5", "", "", "0.600", "", "10"],
    ]
    assert redteam.scores({"run": run}) == redteam.scores(SUMMARY) == ""
    assert benchmarks.scores({"run": run, "benchmarks": own}) == ""  # they stand in one table only


def test_what_the_scores_mean_stands_below_them():
    """Of the categories and scores that were measured; the same lines as in `jaxlm eval`."""
    own = {"redteam_toxic": [point(5, flagged=0.2)], "redteam_privacy": [point(5, flagged=0.2, overlap=0.1)]}
    page = redteam.scores({"run": {"name": "chat"}, "benchmarks": own})
    lines = redteam.meanings({"redteam_toxic": ["flagged"], "redteam_privacy": ["flagged", "overlap"], "piqa": ["acc"]})
    assert [line.partition(":")[0] for line in lines] == ["redteam_toxic", "redteam_privacy", "overlap"]
    assert all(line in html.unescape(page) for line in lines)
    assert not redteam.meanings({"piqa": ["acc"]})
    assert f"(0: under {overlap.SEED})" in lines[-1]


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
