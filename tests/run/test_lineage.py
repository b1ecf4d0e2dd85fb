"""The runs that one was made from: what each took, up to the checkpoint that was taken, and the data before them."""

import json
import math

import pytest

from jaxlm.config import ConfigError
from jaxlm.run import lineage
from jaxlm.train import outlook


def make(folder, program, command, lines, **more):
    """A run's folder with a config, a ledger, and lines of metrics."""
    folder.mkdir(parents=True)
    config = {"program": program, "train": {"batch_size": 2, "seq_len": 50}} | more
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps({"starts": [{"command": command, "step": 0}]}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(step, **metrics):
    return {"step": step, "wall_s": 10.0 * step, "cost_usd": 0.5 * step} | metrics


def of(figure, *values):
    return [line(10 * i, **{figure: value}) for i, value in enumerate(values)]


@pytest.fixture
def story(tmp_path):
    """base -> sft -> dpo -> grpo, with prepared data before them."""
    data = tmp_path / "data"
    data.mkdir()
    sources = {n: {"read": {"documents": 6}, "kept": {"documents": 4}} for n in ("html", "code")}
    (data / "prepared.json").write_text(json.dumps({"sources": sources}))
    (data / "timings.json").write_text(json.dumps({"html": {"unicode": 1.5, "near": 2.0}, "code": {"near": 0.5}}))
    train = ["/bin/jaxlm", "train"]
    made = make(
        tmp_path / "base",
        "pretrain",
        [*train, "story", "--config.train.steps=40"],
        of("val/loss", 8.0, 6.0, 5.0, math.nan, 4.0),
        data={"dir": str(data)},
    )
    rows = [{"phase": n, "last_step": s} for n, s in (("smoke", 10), ("main", 20), ("main", 20), ("rest", 40))]
    book = json.loads((made / "run.json").read_text())
    (made / "run.json").write_text(json.dumps(book | {"phases": rows}))
    origin = {"origin": str(made), "origin_checkpoint": "20"}
    make(tmp_path / "sft", "sft", [*train, "--config.seed", "3", "sft"], of("train/loss", 3.0, 2.0), **origin)
    command = ["main.py", "--config=configs/dpo.py", "--config.seed=1"]
    make(tmp_path / "dpo", "dpo", command, of("val/accuracy", 0.5, 0.75), origin=str(tmp_path / "sft"))
    rewards = [*of("val/reward", 0.25, 0.875), line(20, **{"train/reward": 0.1})]
    make(tmp_path / "grpo", "grpo", [*train, "grpo"], rewards, origin=str(tmp_path / "dpo"))
    return tmp_path


def test_each_stage_has_a_row(story):
    found = outlook.gather(story / "grpo")["stages"]
    keys = ("name", "program", "config", "steps", "tokens", "wall_s", "cost_usd", "figure", "begin", "end")
    assert [tuple(row[key] for key in keys) for row in found] == [
        ("data", "prepare", "", None, None, 4.0, None, "documents", 12, 8),
        ("base", "pretrain", "story", 20, 2000, 200.0, 10.0, "held-out loss", 8.0, 5.0),  # step 20 was taken
        ("sft", "sft", "sft", 10, 1000, 100.0, 5.0, "training loss", 3.0, 2.0),
        ("dpo", "dpo", "dpo", 10, 1000, 100.0, 5.0, "held-out pairs ranked right", 0.5, 0.75),
        ("grpo", "grpo", "grpo", 20, 2000, 200.0, 10.0, "held-out reward", 0.25, 0.875),
    ]
    assert [row["phases"] for row in found] == [[], ["smoke", "main"], [], [], []]


def test_a_run_with_nothing_before_it_has_no_rows(story):
    assert outlook.gather(story / "base")["stages"] == []


def test_data_that_the_run_made_itself_has_no_seconds_of_its_own(story):
    (story / "data").rename(story / "base/data")
    config = json.loads((story / "base/config.json").read_text())
    (story / "base/config.json").write_text(json.dumps(config | {"data": {"dir": ""}}))
    first = outlook.gather(story / "grpo")["stages"][0]
    assert (first["program"], first["wall_s"], first["end"]) == ("prepare", None, 8)


@pytest.mark.parametrize("broken", ["prepared.json", "timings.json"])
def test_data_that_can_not_be_read_is_left_out(story, broken):
    (story / "data" / broken).write_text('{"sources": {"a": 3}')
    assert [row["program"] for row in outlook.gather(story / "grpo")["stages"]] == ["pretrain", "sft", "dpo", "grpo"]


def test_a_run_that_is_gone_is_a_row_without_figures(story):
    (story / "sft/metrics.jsonl").unlink()
    row = outlook.gather(story / "dpo")["stages"][2]
    assert (row["name"], row["steps"], row["wall_s"], row["end"]) == ("sft", None, None, None)
    (story / "sft").rename(story / "moved")
    gone, dpo = outlook.gather(story / "dpo")["stages"]
    assert (gone["name"], gone["program"], gone["config"]) == ("sft", "", "")
    assert dpo["program"] == "dpo"


def test_a_figure_that_was_measured_once_has_no_start(story):
    (story / "dpo/metrics.jsonl").write_text(json.dumps(line(10, **{"val/accuracy": 0.6})) + "\n")
    row = lineage.stages(lineage.origins(story / "grpo"), story / "grpo")[3]
    assert (row["begin"], row["end"]) == (None, 0.6)


def test_a_branch_counts_its_own_steps(story):
    book = {"starts": [{"step": 5, "command": ["jaxlm", "train", str(story / "base"), "--branch=decay"]}]}
    (story / "sft/run.json").write_text(json.dumps(book))
    row = outlook.gather(story / "dpo")["stages"][2]
    assert (row["steps"], row["tokens"]) == (5, 500)


def test_what_a_run_is_about_is_drawn_if_it_is_no_loss(story):
    assert outlook.gather(story / "grpo")["figures"] == {
        "held-out reward": [(0, 0.25), (10, 0.875)],
        "reward": [(20, 0.1)],
    }
    assert outlook.gather(story / "dpo")["figures"]["held-out pairs ranked right"] == [(0, 0.5), (10, 0.75)]
    assert outlook.gather(story / "base")["figures"] == {}


def test_the_commands_of_a_script_have_time_and_cost(tmp_path):
    for name, seconds in (("02-train", "3600\n"), ("01-data", "90"), (".hidden", "x")):
        (tmp_path / name).write_text(seconds)
    assert lineage.commands(tmp_path, 2.0) == [
        {"name": "01-data", "wall_s": 90.0, "cost_usd": 0.05},
        {"name": "02-train", "wall_s": 3600.0, "cost_usd": 2.0},
    ]


def test_a_file_without_seconds_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder; it should have a file NAME with the seconds"):
        lineage.commands(tmp_path / "none", 1.0)
    for said in ("a minute", "-1", "nan", ""):
        (tmp_path / "01-data").write_text(said)
        with pytest.raises(ConfigError, match="01-data: it should hold a number of seconds"):
            lineage.commands(tmp_path, 1.0)
