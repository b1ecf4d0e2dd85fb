"""The stages of a run: what each took; samples beside those of the runs before, and junk of the base that is still there."""

import html
import json

from tiny_pages import STAGES, rows

from jaxlm.report import run_page
from jaxlm.train import outlook

CLEAN = {"repetition": 0.0, "degenerates_at": None}
BASE = {"Once": [{"step": 20, "text": " PersonX gave PersonY a hat"} | CLEAN, {"step": 10, "text": " old"} | CLEAN]}


def page(after: str, prompt: str = "Once", **measures) -> str:
    own = {prompt: [{"step": 5, "temperature": 0.0, "text": after} | CLEAN | measures]}
    before = [{"name": "base", "benchmarks": {}, "samples": BASE}]
    return html.unescape(run_page.before_and_after({"run": {"name": "chat"}, "samples": own, "before": before}))


def test_junk_of_the_base_that_is_still_there_is_told():
    found = page(" and PersonX left")
    told = "base wrote “PersonX”, and chat still does. Fine-tuning can't remove this: look at the pretraining data"
    assert told in found
    assert "“PersonY”" not in found
    assert "junk: PersonX, PersonY" in found
    assert rows(found)[1:] == [["base", "20", "1", "0 of 1"], ["chat", "5", "1", "0 of 1"]]
    assert " old" not in found  # of an earlier step


def test_a_clean_text_is_called_so():
    found = page(" there was a hat")
    assert "Fine-tuning" not in found
    assert rows(found)[-1] == ["chat", "5", "1", "1 of 1"]
    assert "chat, step 5, greedy" in found
    assert "loops after 3 words" in page(" a b c c c", degenerates_at=3)
    assert "60% repeated" in page(" a b", repetition=0.6)
    assert "junk: U+FFFD" in page(" a \ufffd")


def test_other_prompts_are_beside_nothing_but_their_junk_counts():
    found = page(" and PersonX left", prompt="Twice")
    assert "still does" in found
    assert "gave" not in found


def test_a_first_run_has_no_section_of_stages():
    own, before = {"Once": [{"step": 5, "text": "x"}]}, [{"name": "base", "samples": BASE}]
    assert run_page.before_and_after({"run": {"name": "chat"}, "samples": own}) == ""
    assert run_page.before_and_after({"run": {"name": "chat"}, "before": before}) == ""
    assert took(stages=[]) == run_page.took({"run": {"name": "chat"}}) == ""
    assert run_page.commands({"commands": []}) == run_page.commands({}) == ""


def test_the_samples_before_are_those_of_the_checkpoint_that_was_taken(tmp_path):
    for name, config in (("base", {}), ("sft", {"origin": str(tmp_path / "base"), "origin_checkpoint": "20"})):
        (tmp_path / name / "samples").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"train": {}} | config))
    for step in (10, 20, 30):
        line = {"step": step, "prompt": "Once", "text": f" at {step}"}
        (tmp_path / f"base/samples/{step}.jsonl").write_text(json.dumps(line) + "\n")
    (before,) = outlook.gather(tmp_path / "sft")["before"]
    assert [one["text"] for one in before["samples"]["Once"]] == [" at 10", " at 20"]


def took(**keys) -> str:
    return run_page.took({"run": {"name": "chat"}, "stages": STAGES} | keys)


def test_every_stage_is_a_row_and_the_last_one_is_their_sum():
    found = took()
    assert rows(found) == [
        ["stage", "what it changed", "time", "cost", "steps", "tokens", "run", "config"],
        ["data", "documents 12,000 → 8,000", "1m30s", "", "", "", "data", ""],
        ["pretraining", "held-out loss 8.312 → 4.922", "10m00s", "$0.50", "1,500", "1.54M", "base",
         "story in phases: smoke, main"],
        ["SFT", "held-out loss 2.500", "5m00s", "$0.25", "300", "1.23M", "sft", "sft"],
        ["GRPO", "held-out reward 0.250 → 0.875", "1h00m", "$3.00", "200", "819k", "&lt;chat&gt;", "grpo"],
        ["all", "", "1h15m", "$3.75", "", "3.58M", "", ""],
    ]  # fmt: skip
    assert "seconds of its stages" in found


def test_what_is_not_known_is_left_out_and_counts_for_nothing():
    gone = dict.fromkeys(("steps", "tokens", "wall_s", "cost_usd", "begin", "end")) | {"figure": ""}
    first = {"name": "old", "program": "", "config": "", "phases": []} | gone
    found = rows(took(stages=[first, *STAGES[2:]]))
    assert found[1] == ["not here", "", "", "", "", "", "old", ""]
    assert found[-1][2:4] == ["1h05m", "$3.25"]


def test_without_a_price_there_is_no_column_for_it():
    free = [row | {"cost_usd": None if row["cost_usd"] is None else 0.0} for row in STAGES]
    found = rows(took(stages=free))
    assert "cost" not in found[0]
    assert {len(row) for row in found} == {7}
    assert "$" not in took(stages=free)


def test_data_that_a_run_prepared_itself_is_told_so():
    inside = [STAGES[0] | {"wall_s": None}, *STAGES[1:]]
    assert "its time holds both" in took(stages=inside)
    assert rows(took(stages=inside))[1][2] == ""


def test_the_commands_around_the_runs_have_a_table_with_their_sum():
    made = [("01-data", 90, 0.05), ("02-train", 3600, 2.0)]
    found = [{"name": name, "wall_s": seconds, "cost_usd": usd} for name, seconds, usd in made]
    assert rows(run_page.commands({"commands": found})) == [
        ["command", "time", "cost"],
        ["01-data", "1m30s", "$0.050"],
        ["02-train", "1h00m", "$2.00"],
        ["all", "1h01m", "$2.05"],
    ]
    unpaid = rows(run_page.commands({"commands": [row | {"cost_usd": 0.0} for row in found]}))
    assert unpaid[0] == ["command", "time"]
