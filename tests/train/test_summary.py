"""What a run's files say, for its page and for the forecast: gathered at any moment, whatever is absent or cut short."""

import json
import pathlib

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train import outlook


def line(step, wall_s, cost_usd, step_s):
    return {"step": step, "tokens": 10 * step, "wall_s": wall_s, "cost_usd": cost_usd, "time/step_s": step_s}


def make_run(folder):
    c = config.resolve(config_files.load("quickstart", [f"workdir={folder}", "train.steps=30", "optim.warmup_steps=5"]))
    (folder / "config.json").write_text(config.to_json(c))
    lines = [
        {"train/loss": 5.0, "train/lr": 1e-3} | line(10, 5.0, 0.1, 4.0),
        {"train/loss": 4.0, "goodput": 0.7} | line(20, 9.0, 0.2, 7.0),
        {"val/loss": 4.5, "val/prose/loss": 4.6} | line(20, 9.5, 0.2, 7.0),
        {"train/loss": 4.4, "goodput": 0.75} | line(15, 12.0, 0.3, 9.0),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples").mkdir()
    (folder / "samples/20.jsonl").write_text('{"step": 20, "prompt": "a", "text": "b"}\nnot json\n')
    (folder / "samples/5.jsonl").write_text('{"step": 5, "prompt": "a", "text": "c"}\n')
    (folder / "spikes.jsonl").write_text('{"step": 12, "batch": 12, "loss": 9.0, "score": null, "documents": []}\n{"st')
    start = {"time": "now", "step": 0, "usd_per_hour": 2.0, "hardware": {"device_kind": "cpu", "devices": 1}}
    (folder / "run.json").write_text(json.dumps({"starts": [start | {"ended": {"code": 3, "why": "a gate"}}]}))


def test_everything_is_gathered(tmp_path):
    make_run(tmp_path)
    found = outlook.gather(tmp_path)
    assert found["curves"]["step"] == [10, 15, 20]
    assert found["curves"]["loss"] == [5.0, 4.4, 4.0]
    assert found["curves"]["lr"] == [1e-3, None, None]
    assert found["held_out"] == {"": [(20, 4.5)], "prose": [(20, 4.6)]}
    # Clocks and dollars are those of the record that was written last, which after a rollback is not the last step's.
    assert (found["run"]["wall_s"], found["run"]["cost_usd"], found["activities"]["step"]) == (12.0, 0.3, 9.0)
    assert (found["run"]["step"], found["run"]["steps"], found["run"]["best"]) == (20, 30, {"step": 20, "loss": 4.5})
    assert [one["text"] for one in found["samples"]["a"]] == ["c", "b"]
    assert [spike["step"] for spike in found["spikes"]] == [12]
    assert found["starts"][0]["ended"] == "3 a gate"
    assert found["run"]["ended"] == "a gate"


@pytest.mark.parametrize(
    ("ended", "following"),
    [
        ({"code": 0}, "jaxlm sample {} "),
        ({"code": 4}, "jaxlm train {}"),
        ({"code": 3}, ""),
        ({"code": 2}, ""),
        (None, ""),
    ],
)
def test_what_is_next_follows_from_how_the_run_ended(tmp_path, ended, following):
    make_run(tmp_path)
    book = json.loads((tmp_path / "run.json").read_text())
    book["starts"][0]["ended"] = ended
    (tmp_path / "run.json").write_text(json.dumps(book))
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"time": 7.0} | line(24, 36.0, 0.3, 9.5)) + "\n")
    found = outlook.gather(tmp_path)["run"]
    assert found["next"].startswith(following.format(tmp_path))
    assert bool(found["next"]) == bool(following)
    assert (found["time"], found["left_s"], found["left_usd"]) == (7.0, 9.0, 0.005)
    book["starts"][0]["step"] = 12  # a branch: its time is that of the steps from there on
    (tmp_path / "run.json").write_text(json.dumps(book))
    assert outlook.gather(tmp_path)["run"]["left_s"] == 18.0


def test_the_command_after_a_run_is_that_of_its_kind():
    said = {name: outlook.next_command(name, pathlib.Path("-a b")) for name in ("pretrain", "sft", "grpo", "reward")}
    assert said["pretrain"] == "jaxlm sample './-a b' \"The\""
    assert said["sft"] == said["grpo"] == "jaxlm chat './-a b'"
    assert said["reward"].startswith("jaxlm train ppo ")


def test_an_empty_folder_has_a_summary_too(tmp_path):
    found = outlook.gather(tmp_path)
    assert found["run"]["step"] == 0
    assert found["starts"] == []


def test_benchmarks_are_gathered_by_step_and_damaged_ones_left_out(tmp_path):
    make_run(tmp_path)
    entry = {"metrics": {"acc": 0.5, "odd": "x"}, "stderr": {}, "chance": 0.25, "n": 10, "fewshot": 0}
    for step, content in (("20", {"tasks": {"piqa": entry}}), ("5", {"tasks": {"piqa": entry}}), ("7", []), ("x", {})):
        (tmp_path / "eval" / step).mkdir(parents=True)
        (tmp_path / "eval" / step / "results.json").write_text(json.dumps(content))
    (tmp_path / "eval/20/results.json").write_text(json.dumps({"tasks": {"piqa": entry, "bad": 3}}))
    (tmp_path / "eval/9").mkdir()
    (tmp_path / "eval/9/results.json").write_text('{"tas')
    found = outlook.gather(tmp_path)["benchmarks"]
    assert [(point["step"], point["metrics"], point["chance"]) for point in found["piqa"]] == [
        (5, {"acc": 0.5}, 0.25),
        (20, {"acc": 0.5}, 0.25),
    ]


def losses(folder, *overrides: str):
    keys = ["data.dir=d", "train.steps=100", "optim.warmup_steps=0", *overrides]
    return outlook.of_run(folder, config.resolve(config_files.load("base", keys))).losses()


def test_the_losses_of_a_final_mixture_are_left_out(tmp_path):
    lines = [{"step": step, "train/loss": float(step)} for step in range(10, 101, 10)] + [{"step": 90, "val/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    final = ("data.final.share=0.3", "data.final.weights.math=4")
    assert losses(tmp_path) == ([*range(10, 101, 10)], [float(step) for step in range(10, 101, 10)])
    assert losses(tmp_path, *final)[0] == [10, 20, 30, 40, 50, 60, 70]
    assert losses(tmp_path, *final, "optim.decay_at_step=45")[0] == [10, 20, 30, 40]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [], "passed_over": [[11, 15]]}))
    assert losses(tmp_path, *final)[0] == [10, 20, 30, 40, 50, 60]  # step 66 has batch 71


def evaluated(folder, keys, *rows):
    """A run whose metrics have the losses of weights and, if they are there, of their average."""
    folder.mkdir()
    c = config.resolve(
        config_files.load("quickstart", [f"workdir={folder}", "train.steps=30", "optim.warmup_steps=5", *keys])
    )
    (folder / "config.json").write_text(config.to_json(c))
    names = ("step", "val/loss", "val_average/loss")
    lines = [dict(zip(names, row, strict=False)) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_decay_is_held_against_the_average(tmp_path):
    """Of a branch the trunk's at its last step; of the run itself the last one before the rate fell."""
    trunk = tmp_path / "one"
    evaluated(trunk, ["optim.schedule=constant"], (10, 5.0), (20, 4.5, 4.0), (30, 4.25, 3.75))
    assert outlook.gather(trunk)["average"] == [(20, 4.0), (30, 3.75)]
    assert outlook.gather(trunk)["decays"] == []
    branch = ["optim.decay_at_step=20", f"origin={trunk}", "origin_checkpoint=20", "origin_state=True"]
    evaluated(tmp_path / "one-decay-20", branch, (25, 4.0), (30, 3.7))
    row = {"name": "one-decay-20", "end": 30, "decay": 3.7, "step": 30, "weights": 4.25, "average": 3.75}
    assert outlook.gather(trunk)["decays"] == outlook.gather(tmp_path / "one-decay-20")["decays"] == [row]
    wsd = ["optim.schedule=wsd", "optim.decay_fraction=0.3"]
    evaluated(tmp_path / "own", wsd, (10, 5.0, 4.8), (20, 4.5, 4.0), (25, 3.9, 3.95), (30, 3.7, 3.8))
    row |= {"name": "own", "step": 20, "weights": 4.5, "average": 4.0}
    assert outlook.gather(tmp_path / "own")["decays"] == [row]
    evaluated(tmp_path / "not ended", wsd, (20, 4.5, 4.0), (25, 3.9, 3.95))
    assert outlook.gather(tmp_path / "not ended")["decays"] == []
