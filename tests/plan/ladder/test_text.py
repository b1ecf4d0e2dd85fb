"""What `jaxlm ladder` says before and after its runs."""

import copy

from jaxlm.plan.ladder import text as ladder_text

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
    return {
        "target": {"config": "quickstart", "parameters": 2_820_608, "tokens": 471_040},
        "sizes": [64, 96, 128],
        "budgets": [133_000, 266_000, 532_000],
        "machine": "cpu x 1",
        "hours": {"limit": 0.5, "planned": 0.2, "spent": 0.1},
        "runs": runs(),
        "rates": None,
        "fit": None,
        "foretold": None,
    }


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
