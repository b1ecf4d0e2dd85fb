"""Charts: round ticks, thinned curves, gaps, and nothing where there is nothing to draw."""

import itertools
import math
import re

import pytest

from jaxlm.report import chart
from jaxlm.report.chart import Curve


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.31, 2.38), (-5, 900), (1e-9, 3e-4), (0, 90_000), (5, 5), (0, 0)])
def test_ticks_are_few_round_and_cover(low, high):
    found = chart.ticks(low, high)
    assert 3 <= len(found) <= 7
    assert found[0] <= low
    assert found[-1] >= high - 1e-12
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps) == pytest.approx(min(gaps))
    digits = f"{gaps[0]:.6e}".split("e")[0].rstrip("0").replace(".", "")
    assert digits in ("1", "2", "25", "5")


def test_a_long_curve_is_thinned_to_means():
    points = [(x, x % 2) for x in range(10_000)]
    thinned = chart.thin(points)
    assert len(thinned) == 400
    assert {round(y, 1) for _, y in thinned} == {0.5}
    assert chart.thin(points[:10]) == [(x, x % 2) for x in range(10)]


def paths(markup: str) -> list[list[tuple[float, float]]]:
    """The points of each drawn curve."""
    found = re.findall(r'<path d="M([^"]*)" class="line', markup)
    return [[tuple(map(float, pair.split())) for pair in d.split("L")] for d in found]


def test_a_curve_fills_the_drawing_from_corner_to_corner():
    (path,) = paths(chart.lines([Curve("loss", [(0, 10), (50, 5), (100, 0)])], "Loss", along="steps"))
    assert path == [(0, 0), (500, 500), (1000, 1000)]


def test_what_is_not_finite_makes_a_gap():
    points = [(0, 1), (1, 2), (2, math.nan), (3, 3), (4, math.inf), (5, 4), (6, 5)]
    assert [len(path) for path in paths(chart.lines([Curve("loss", points)], "Loss", along="steps"))] == [2, 2]


def test_a_first_loss_does_not_press_the_rest_flat():
    curve = Curve("loss", [(0, 1e5), *((x, 3 - x / 100) for x in range(1, 100))])
    (path,) = paths(chart.lines([curve], "Loss", along="steps"))
    heights = [y for _, y in path]
    assert heights[0] == 0
    assert max(heights) - min(heights[5:]) > 500


def test_marks_legends_and_labels():
    curves = [Curve("<b>", [(0, 1), (10, 2)]), Curve("two", [(0, 2), (10, 1)])]
    drawn = chart.lines(curves, "Loss", along="steps", unit="nats", marks=[5, 99])
    assert drawn.count('class="mark"') == 1
    assert "&lt;b&gt;" in drawn
    assert 'role="img" aria-label="Loss"' in drawn
    assert ">steps<" in drawn
    assert ">nats<" in drawn
    assert "&lt;b&gt;" not in chart.lines(curves[:1], "Loss", along="steps")  # the title says what one curve is


def test_nothing_is_drawn_of_nothing():
    assert chart.lines([Curve("loss", [])], "Loss", along="steps") == ""
    assert chart.lines([Curve("loss", [(0, 1)])], "Loss", along="steps") == ""
    assert chart.lines([Curve("loss", [(0, math.nan), (1, math.nan)])], "Loss", along="steps") == ""


def test_the_points_of_a_short_curve_are_dots():
    def dots(points: int) -> int:
        return chart.lines([Curve("loss", [(x, x) for x in range(points)])], "Loss", along="steps").count("h0")

    assert (dots(3), dots(30), dots(31)) == (3, 30, 0)
