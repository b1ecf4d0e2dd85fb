"""By what the best checkpoints are chosen: any metric, the lowest or the highest, over restarts and rollbacks."""

import dataclasses
import json
import math

import pytest

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, config_files
from jaxlm.run.checkpoints import keep
from jaxlm.run.metrics import Scores


def scores(metric="eval/piqa/acc", best_is="highest", **keys) -> Scores:
    found = [f"checkpoint.best_metric={metric}", f"checkpoint.best_is={best_is}", "eval.tasks=('piqa',)", "data.path=x"]
    c = config_lib.resolve(config_files.load("base", found)).checkpoint
    return Scores(dataclasses.replace(c, **keys))


def test_the_highest_is_best_if_asked_for():
    found = scores()
    for step, acc in {10: 0.5, 20: 0.7, 30: math.nan, 40: 0.6}.items():
        found.note(step, {"eval/piqa/acc": acc, "val/loss": acc})
    assert keep.best([10, 20, 30, 40], found) == 20
    assert keep.ranked([10, 20, 30, 40], found) == [20, 40, 10]
    lowest = scores("val/loss", "lowest")
    lowest.note(10, {"val/loss": 2.0})
    assert lowest == {10: 2.0}


def test_they_are_read_back_without_what_a_rollback_undid(tmp_path):
    lines = [{"step": s, "time": t, "eval/piqa/acc": a} for s, t, a in [(10, 1, 0.5), (20, 2, 0.9), (20, 9, 0.6)]]
    lines += [{"step": 30, "time": 9, "train/loss": 1.0}, {"step": 40, "time": 9, "eval/piqa/acc": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"rollbacks": [{"steps": [15, 20], "to": 10, "time": 5.0}]}))
    found = scores().read(tmp_path)
    assert {step: found[step] for step in (10, 20)} == {10: -0.5, 20: -0.6}
    assert sorted(found) == [10, 20, 40]
    assert math.isnan(found[40])
    assert scores().read(tmp_path / "nowhere") == {}


def test_a_name_that_no_metric_has_is_told():
    found = scores("eval/piqa/ac")
    found.note(1, {"train/loss": 1.0})
    assert found.missing() == ""  # no benchmark has run yet
    found.note(5, {"eval/piqa/acc": 0.5})
    assert "eval/piqa/ac: metrics.jsonl has no such name" in found.missing()
    assert "did you mean 'eval/piqa/acc'?" in found.missing()
    right = scores("train/loss", "lowest")
    right.note(1, {"train/loss": 1.0})
    assert right.missing() == ""
    nothing_held_out = scores("val/loss", "lowest")
    nothing_held_out.note(1, {"train/loss": 1.0})
    assert nothing_held_out.missing() == ""
    none_wanted = scores("train/los", "lowest", keep_best=0)
    none_wanted.note(1, {"train/loss": 1.0})
    assert none_wanted.missing() == ""


def test_a_benchmark_that_does_not_run_is_refused():
    with pytest.raises(
        ConfigError, match=r"best_metric=eval/piqa/acc is of a benchmark, but config.eval.tasks is empty"
    ):
        config_lib.resolve(config_files.load("base", ["checkpoint.best_metric=eval/piqa/acc", "data.path=x"]))
