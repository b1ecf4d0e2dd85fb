"""The lines that a run shows: those that stay, and the live one."""

import math
import re
import time

import pytest

from jaxlm.host import screen
from jaxlm.train.recorder import Progress

RECORD = {"step": 260, "train/loss": 2.0, "train/lr": 3e-4, "tokens_per_second": 1500.0, "mfu_palm": 0.5}
RECORD |= {"cost_usd": 1.5, "wall_s": 91.0, "eta_s": 3725}
WHOLE = (
    "step 260/520  50%  loss 2.0000  best held-out 2.1000  lr 3.00e-04  1.5k tokens/s  MFU 50.0%  $1.50  elapsed 1m31s  "
    "left 1h02m\n"
)


@pytest.fixture
def progress():
    found = Progress(520, 0, lambda: "")
    yield found
    found.close()


def test_the_line_that_stays_has_all_there_is_to_know(progress, capsys):
    progress.stepped(260, 2.0)
    progress.update(RECORD, 2.1)
    assert capsys.readouterr().err == WHOLE


def test_what_is_not_known_is_left_out(progress, capsys):
    progress.stepped(1, 8.3302)
    progress.update({"step": 1, "train/loss": 8.3302, "cost_usd": 0.0, "wall_s": 5.0}, None)
    assert capsys.readouterr().err == "step 1/520  0%  loss 8.3302  elapsed 0m05s\n"


def test_the_loss_is_a_mean_of_the_last_steps(progress, capsys):
    progress.stepped(1, 4.0)
    assert progress.loss == pytest.approx(4.0)  # corrected: an uncorrected mean would begin at 0.2
    progress.stepped(2, 3.0)
    assert progress.loss == pytest.approx((0.95 * 0.05 * 4 + 0.05 * 3) / (1 - 0.95**2))
    for step in range(3, 200):
        progress.stepped(step, 2.0)
    assert progress.loss == pytest.approx(2.0, abs=1e-3)
    progress.stepped(200, math.inf)
    assert progress.loss == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("every", [1, 5])
def test_the_mean_goes_on_where_an_earlier_start_left_it(every, capsys):
    """To the bit where each step was logged; where every fifth was, each stands for five."""
    losses = {step: 4.0 - 0.02 * step for step in range(1, 101)}
    whole = Progress(520, 0, lambda: "")
    for step, loss in losses.items():
        whole.stepped(step, losses[-(-step // every) * every] if every > 1 else loss)
    resumed = Progress(520, 100, lambda: "", {step: loss for step, loss in losses.items() if step % every == 0})
    assert resumed.loss == pytest.approx(whole.loss, abs=1e-12)
    assert abs(resumed.loss - losses[100]) > 0.2  # not the last one alone
    for progress in (whole, resumed):
        progress.close()


def live(progress: Progress, width: int) -> str:
    return screen.joined(screen.fit(progress.parts(alone=True), width), colour=False)


def test_the_live_line_says_where_the_run_is_and_what_it_does(capsys):
    doing = ["compiling"]
    progress = Progress(520, 130, lambda: doing[0])
    assert live(progress, 100) == "step 130/520  [#####...............]  25%  compiling"
    progress.stepped(260, 2.0)
    progress.update(RECORD, 2.1)
    doing[0] = ""
    assert re.fullmatch(r"step 260/520  \[#{10}\.{10}\]  50%  loss 2\.0000  left 1h02m", live(progress, 100))
    doing[0] = "evaluating"
    assert live(progress, 40) == "step 260/520  left 1h02m  evaluating"
    assert live(progress, 30) == "step 260/520  evaluating"
    progress.close()


def test_a_first_step_that_takes_long_is_told(progress, monkeypatch, capsys):
    began = time.monotonic()
    now = lambda seconds: monkeypatch.setattr(time, "monotonic", lambda: began + seconds)  # noqa: E731
    said = []
    for seconds in range(130):
        now(seconds)
        said += [progress.line()]
    assert [line for line in said if line] == [f"step 1/520: {t} so far" for t in ("0m30s", "1m00s", "1m30s", "2m00s")]
    assert live(progress, 100).endswith("0%  step 1 for 2m09s")
    progress.stepped(1, 8.0)
    now(500)
    assert progress.line() == ""
    assert "for" not in live(progress, 100)


def test_the_time_left_runs_down_between_two_logged_steps(progress, monkeypatch, capsys):
    progress.update(RECORD | {"eta_s": 100.0}, None)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 40)
    assert "left 1m00s" in live(progress, 100)
    monkeypatch.setattr(time, "monotonic", lambda: now + 200)
    assert "left 0m00s" in live(progress, 100)
