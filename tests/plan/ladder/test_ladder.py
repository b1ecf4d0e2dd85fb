"""A ladder as values, as a file and as text: what it concludes from its runs, and what it refuses."""

import copy
import json
import pathlib
import types

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.data.batches.document_rows import Rows
from jaxlm.plan.ladder import ladder, rungs
from jaxlm.plan.ladder import text as ladder_text
from jaxlm.plan.ladder.ladder import Asked
from jaxlm.plan.rules import Law
from jaxlm.plan.tune import machines

TRUE = Law("known", 1.5, 60.0, 400.0, 0.3, 0.35)


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", ["workdir=w", *overrides]))


def order(c: config.Config, sha256: str = "abc") -> Rows:
    data = types.SimpleNamespace(
        path="DATA", sha256=sha256, entry=lambda source, split: {"tokens": 10_000}, vocab_size=4096
    )
    return Rows(data, {"web": 1.0}, c.seed, c.train.seq_len, c.train.batch_size)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """A machine that needs no measuring: as fast as a model is narrow."""
    row = lambda c: {"tokens_per_second": 1e6 / c.model.d_model, "kind": "cpu", "count": 1}  # noqa: E731
    monkeypatch.setattr(machines, "row", row)


def begin(folder: pathlib.Path, asked: Asked = Asked(), *overrides: str, **keys):  # noqa: B008
    c = resolve(*overrides)
    return ladder.begin(c, order(c, **keys), folder, asked, "quickstart")


def done(found: ladder.Ladder, but: int = 0) -> ladder.Ladder:
    """The ladder with losses of TRUE for all runs but the last `but`; a rate off by 2 costs a tenth of a nat."""
    for one in found["runs"][: len(found["runs"]) - but]:
        loss = TRUE.loss(one["parameters"], one["tokens"]) + 0.1 * abs(np.log2(one["times"]))
        one |= {"loss": loss, "bytes_per_token": 3.2, "hours": 0.1}
    found["hours"]["spent"] = sum(one["hours"] for one in found["runs"])
    ladder.conclude(found)
    return found


def test_a_new_ladder_has_the_runs_of_the_rules_and_their_hours(tmp_path):
    found, climbed = begin(tmp_path / "new")
    assert [one["name"] for one in found["runs"]] == [one.entry["name"] for one in climbed]
    assert found["sizes"] == [64, 96, 128]
    assert found["budgets"][-1] == 471_040  # half an hour would hold more
    assert found["hours"]["planned"] == pytest.approx(sum(one["planned_hours"] for one in found["runs"]))
    assert found["hours"]["planned"] < found["hours"]["limit"] == rungs.HOURS
    assert (found["machine"], found["fit"], found["held_out"]["max_mb"]) == ("cpu x 1", None, 0.0)
    assert found["target"]["parameters"] == 2_820_608
    assert not (tmp_path / "new").exists()


def test_what_is_asked_for_goes_before_the_rules(tmp_path):
    found, _ = begin(tmp_path, Asked([32, 48, 64], [1e5, 2e5, 4e5]))
    assert (found["sizes"], found["budgets"], found["hours"]["limit"]) == ([32, 48, 64], [1e5, 2e5, 4e5], None)
    assert begin(tmp_path, Asked(hours=0.15))[0]["hours"]["planned"] == pytest.approx(0.15, rel=0.02)
    with pytest.raises(ConfigError, match=r"these runs take about .* min, more than --hours=0.1"):
        begin(tmp_path, Asked([32, 48, 64], [1e6, 2e6, 4e6], 0.1))


def test_without_a_speed_the_tokens_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "row", lambda c: {"why": "its GPU is in use (process 7)"})
    with pytest.raises(
        ConfigError,
        match=r"d_model=64 is not known \(its GPU is in use \(process 7\)\): measure it again \(--config.plan.measure=again\), "
        r"or give --tokens",
    ):
        begin(tmp_path)
    found, _ = begin(tmp_path, Asked(budgets=[1e5, 2e5, 4e5]))
    assert (found["hours"]["planned"], found["machine"], found["runs"][0]["planned_hours"]) == (None, None, None)
    assert "for an unknown time" in ladder_text.runs(found)


def test_a_finished_ladder_foretells_by_the_law_of_its_runs(tmp_path):
    found = done(begin(tmp_path)[0])
    assert [row["tokens"] for row in found["foretold"]] == [117_760, 235_520, 471_040, 942_080]
    row = found["foretold"][2]
    assert row["low"] < TRUE.loss(row["parameters"], row["tokens"]) < row["high"]
    assert row["loss"] == pytest.approx(TRUE.loss(row["parameters"], row["tokens"]), rel=0.02)
    assert abs(found["fit"]["missed"]) < 0.02
    assert (found["rates"]["best"], found["rates"]["edge"]) == (pytest.approx(found["rates"]["lr"], rel=0.01), False)
    assert found["rates"]["rule"] == found["runs"][1]["rule"]


def test_what_is_written_is_read_back_and_foretells_the_same(tmp_path):
    found = done(begin(tmp_path)[0])
    ladder.write(tmp_path, found)
    again = ladder.read(tmp_path)
    assert again == json.loads(json.dumps(found))
    row = found["foretold"][3]
    fit = ladder.fit_of(again)
    assert fit.loss(row["parameters"], row["tokens"]) == pytest.approx((row["loss"], row["low"], row["high"]), rel=1e-4)


def test_plan_finds_the_ladder_of_its_folder_if_it_is_done_and_of_its_kind(tmp_path):
    said = []
    c = resolve(f"workdir={tmp_path}")
    assert ladder.known(c, said.append) is None
    ladder.write(tmp_path / "ladder", done(begin(tmp_path)[0], but=1))
    assert ladder.known(c, said.append) is None
    assert (
        said.pop()
        == f"{tmp_path / 'ladder'} is left out: 10 of its 11 runs are done, and the same jaxlm ladder goes on"
    )
    ladder.write(tmp_path / "ladder", done(begin(tmp_path)[0]))
    found, folder = ladder.known(c, said.append)
    assert folder == tmp_path / "ladder"
    assert found.law.beta > 0
    assert not said
    assert ladder.known(resolve(f"workdir={tmp_path}", "model.vocab_size=8192"), said.append) is None
    assert said == [f"{folder} is left out: it is of llama with 4,096 ids"]


def test_a_ladder_whose_runs_are_not_done_foretells_nothing(tmp_path):
    found = done(begin(tmp_path)[0], but=1)
    assert (found["fit"], found["foretold"], ladder.fit_of(found)) == (None, None, None)
    assert found["rates"]["best"] > 0  # its three runs come first
    assert done(begin(tmp_path)[0], but=9)["rates"] is None


def test_the_same_command_finds_its_ladder_and_another_config_is_refused(tmp_path):
    found = done(begin(tmp_path, Asked(hours=0.2))[0], but=5)
    ladder.write(tmp_path, found)
    assert begin(tmp_path)[0] == ladder.read(tmp_path)
    assert begin(tmp_path, Asked(hours=0.2))[1] == begin(tmp_path)[1]
    for asked, overrides, keys, words in (
        (Asked(), ["optim.lr=1e-3"], {}, "optim.lr = 0.01, now it is 0.001"),
        (Asked(), [], {"sha256": "def"}, "data = abc, now it is def"),
        (Asked(hours=0.4), [], {}, "hours = 0.2, now it is 0.4"),
        (Asked([32, 48, 64]), [], {}, r"sizes = \[64, 96, 128\], now it is \[32, 48, 64\]"),
    ):
        with pytest.raises(ConfigError, match=f"holds a ladder with {words}: set it back, give another --out"):
            begin(tmp_path, asked, *overrides, **keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is damaged"), ("[]", "is damaged"), ('{"version": 1}', "is damaged"), ('{"version": 9}', "of version 9")],
)
def test_a_file_that_is_no_ladder_is_one_line(tmp_path, text, words):
    assert ladder.read(tmp_path) is None
    (tmp_path / ladder.FILE).write_text(text)
    with pytest.raises(ConfigError, match=words):
        ladder.read(tmp_path)


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"ladder\.json can't be read: Not a directory; name another folder"):
        ladder.read(tmp_path / "run" / ladder.FOLDER)


RUN = {
    "n_layers": 1,
    "steps": 260,
    "batch_size": 2,
    "times": 1.0,
    "rule": 0.03,
    "kind": "grid",
    "why": "",
    "hours": 0.0,
}
RUN |= {"loss": None, "planned_hours": 0.02, "lr": 0.01}


def runs() -> list[dict]:
    found = [
        RUN | {"name": f"d{d}-{t}", "d_model": d, "parameters": 5000 * d, "tokens": 1000 * t}
        for d in (64, 96, 128)
        for t in (133, 266, 532)
    ]
    rate = RUN | {"name": "d64-133-rate2", "kind": "rate", "times": 2.0, "d_model": 64, "parameters": 320_000}
    return [rate | {"tokens": 133_000, "lr": 0.02}, *found]


def a_ladder() -> dict:
    found = {"target": {"config": "quickstart", "parameters": 2_820_608, "tokens": 471_040}, "sizes": [64, 96, 128]}
    found |= {"budgets": [133_000, 266_000, 532_000], "machine": "cpu x 1", "runs": runs()}
    found |= {"hours": {"limit": 0.5, "planned": 0.2, "spent": 0.1}}
    return found | dict.fromkeys(("rates", "fit", "foretold"))


def finished(width: float) -> dict:
    """A ladder whose runs are done, with an interval of this width as a share of the loss."""
    found = copy.deepcopy(a_ladder())
    for one in found["runs"]:
        one |= {"loss": 5 - one["tokens"] / 1e6, "hours": 0.01}
    tried = [{"lr": lr, "times": lr / 0.01, "loss": loss} for lr, loss in ((0.005, 5.1), (0.01, 5.0), (0.02, None))]
    found["rates"] = {"tried": tried, "best": 0.011, "edge": False, "lr": 0.01, "rule": 0.03}
    law = {"e": 1.5, "a": 60.0, "b": 400.0, "alpha": 0.3, "beta": 0.35}
    found["fit"] = {"law": law, "noise": 0.005, "missed": -0.012}
    sizes = {"parameters": 2_820_608, "loss": 4.0, "low": 4.0 - 2 * width, "high": 4.0 + 2 * width}
    found["foretold"] = [sizes | {"tokens": tokens} for tokens in (133_120, 266_240, 471_040, 1_064_960)]
    return found


def test_the_plan_has_each_run_with_its_time():
    text = ladder_text.runs(a_ladder())
    head = "10 runs, about 12 min on cpu x 1, of 30 min at most, foretell quickstart: 2.82M parameters, 471k tokens"
    assert text.splitlines()[0] == head
    assert text.splitlines()[2].split() == ["d64-133-rate2", "320k", "133k", "260", "2", "0.02", "1.2", "min"]
    assert "of them are done" not in text


def test_what_is_done_has_its_loss_and_its_time():
    found = a_ladder()
    found["runs"][1] |= {"loss": 4.5, "hours": 0.05}
    text = ladder_text.runs(found)
    assert "; 1 of them are done" in text
    assert text.splitlines()[3].split()[-3:] == ["3", "min", "4.5000"]


def test_what_was_found_is_a_grid_a_rate_a_law_and_what_it_foretells():
    text = ladder_text.found(finished(width=0.02))
    words = " ".join(text.split())
    for part in (
        "LOSS held out 133k 266k 532k",
        "480k (d 96, 1 layer) 4.8670 4.7340 4.4680",
        "RATE 0.005: 5.1000, 0.01: 5.0000, 0.02: -.",
        "the published rule's 0.03; best is about 0.011, 1.1 times the config's own.",
        "LAW L = 1.5 + 60 / N^0.3 + 400 / D^0.35; runs scatter around it by 0.5%.",
        "off by 1.2%.",
        "FORETOLD quickstart loss 80% interval",
        "2.82M parameters, 471k tokens 4.000 3.960 to 4.040",
        "HOURS 6 min so far, 12 min were planned",
    ):
        assert part in words, part
    assert max(map(len, text.splitlines())) <= 100


def test_a_wide_interval_is_called_so():
    assert "wide" not in ladder_text.found(finished(width=0.09))
    assert "The interval is wide and decides little" in ladder_text.found(finished(width=0.11))


def test_before_the_end_there_is_a_grid_alone():
    text = ladder_text.found(a_ladder())
    assert "FORETOLD" not in text
    assert text.splitlines()[1].split()[-3:] == ["-", "-", "-"]
