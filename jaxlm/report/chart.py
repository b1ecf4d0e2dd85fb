"""Draws line charts as static SVG that is readable at any width: the curves stretch, the numbers beside them do not."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from jaxlm.host.console import human
from jaxlm.report.markup import Markup, tag

_PARTS = 400  # points of a curve at most
_DOTS = 30  # a curve with at most so many points shows each
_SIZE = 1000.0  # of the drawing's own coordinates


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a chart: (x, y) in ascending x, with a gap where y is not finite; dotted if it is predicted, not measured."""

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


def lines(
    curves: Sequence[Curve],
    label: str,
    *,
    along: str,
    unit: str = "",
    marks: Sequence[float] = (),
    numbered: Sequence[float] = (),
    shown: Callable[[float], str] = human,
    shown_x: Callable[[float], str] = human,
) -> Markup:
    """Returns a chart of at most six curves with a legend; empty Markup if no curve has two finite points.

    `along` labels the x axis, `unit` the y axis; `shown` formats the y axis's numbers. `marks` are the x values of vertical
    lines, such as restarts; `numbered` are such, with numbers from 1 on.
    """
    thinned = [dataclasses.replace(curve, points=thin(curve.points)) for curve in curves]
    drawable = [i for i, curve in enumerate(thinned) if sum(math.isfinite(y) for _, y in curve.points) > 1]
    if not drawable:
        return Markup("")
    thinned = [thinned[i] for i in drawable]  # a curve keeps the colour of its place
    xs = [x for curve in thinned for x, _ in curve.points]
    ys = [y for curve in thinned for _, y in curve.points if math.isfinite(y)]
    low, high = min(xs), max(xs)
    y_ticks = ticks(*_view(ys))
    bottom, top = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return _SIZE * (x - low) / ((high - low) or 1)

    def at_y(y: float) -> float:
        return _SIZE * (1 - (min(max(y, bottom), top) - bottom) / ((top - bottom) or 1))

    x_ticks = [x for x in ticks(low, high) if low <= x <= high]
    grid = [_line(0, at_y(y), _SIZE, at_y(y), "grid") for y in y_ticks]
    grid += [_line(at_x(x), 0, at_x(x), _SIZE, "mark") for x in marks if low <= x <= high]
    grid += [_line(at_x(x), 0, at_x(x), _SIZE, "bend") for x in numbered]
    drawn = [path for i, curve in zip(drawable, thinned, strict=True) for path in _paths(curve, i, at_x, at_y)]
    view = {"viewBox": f"0 0 {_SIZE:.0f} {_SIZE:.0f}", "preserveAspectRatio": "none"}
    svg = tag("svg", *grid, *drawn, **view, aria_hidden="true")
    beside = [tag("span", shown(y), style=f"top:{at_y(y) / _SIZE:.2%}") for y in y_ticks]
    below = [tag("span", shown_x(x), style=f"left:{at_x(x) / _SIZE:.2%}") for x in x_ticks]
    above = [tag("span", number, style=f"left:{at_x(x) / _SIZE:.2%}") for number, x in enumerate(numbered, start=1)]
    legend = _legend([curve.name for curve in thinned], drawable)
    title = [tag("b", label), *(legend if len(thinned) > 1 else [])]
    title += [tag("span", unit, class_="dim unit")] if unit else []
    numbers = tag("div", *above, class_="xs tops")
    plot = tag("div", tag("div", *beside, class_="ys"), svg, tag("div", *below, class_="xs"), numbers, class_="plot")
    under = tag("div", along, class_="along")
    return tag("figure", tag("figcaption", *title), plot, under, class_="chart", role="img", aria_label=label)


def grid(charts: Sequence[Markup]) -> Markup:
    drawn = [drawing for drawing in charts if drawing]
    return tag("div", *drawn, class_="charts") if drawn else Markup("")


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most a few hundred points: the means of the points in equal parts of the x axis."""
    points = [(float(x), float(y)) for x, y in points]
    if len(points) <= _PARTS:
        return points
    low, high = points[0][0], points[-1][0]
    parts: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        parts.setdefault(min(int((x - low) / ((high - low) or 1) * _PARTS), _PARTS - 1), []).append((x, y))
    finite = {part: [y for _, y in pairs if math.isfinite(y)] for part, pairs in parts.items()}
    means = {part: sum(ys) / len(ys) if ys else math.nan for part, ys in finite.items()}
    return [(sum(x for x, _ in pairs) / len(pairs), means[part]) for part, pairs in sorted(parts.items())]


def _view(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of values to show. The highest twentieth is cut off if it would flatten the rest, like a first loss."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    most = ordered[int(0.95 * (len(ordered) - 1))]
    return (low, most) if len(ordered) > 20 and high - low > 4 * (most - low) > 0 else (low, high)


def ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers, at equal distances, that cover low to high."""
    if not high > low:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", class_=kind)


def _paths(curve: Curve, number: int, at_x: Callable, at_y: Callable) -> list[Markup]:
    """Returns the pieces of a curve between its gaps, and a dot for each point if there are few."""
    runs = itertools.groupby(curve.points, key=lambda point: math.isfinite(point[1]))
    pieces = [[f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in points] for finite, points in runs if finite]
    kind = f"line c{number % 6}{' dotted' * curve.dotted}"
    drawn = [tag("path", d="M" + "L".join(piece), class_=kind) for piece in pieces if len(piece) > 1]
    # A line without length and with round ends is a dot, however the drawing is stretched.
    if sum(map(len, pieces)) <= _DOTS:
        dots = "".join(f"M{point}h0" for piece in pieces for point in piece)
        drawn.append(tag("path", d=dots, class_=f"dot c{number % 6}"))
    return drawn


def stacked(parts: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Returns one bar of coloured parts with its legend. Each part is (name, number, text of the number)."""
    whole = sum(number for _, number, _ in parts) or 1
    styles = [f"width:{100 * number / whole:.2f}%" for _, number, _ in parts]
    titles = [f"{name}: {shown}" for name, _, shown in parts]
    spans = (tag("span", class_=f"c{i % 6}", style=styles[i], title=titles[i]) for i in range(len(parts)))
    bar = tag("div", *spans, class_="bar wide", role="img", aria_label=label)
    return tag(
        "figure", bar, tag("figcaption", *_legend([f"{name} {shown}" for name, _, shown in parts], range(len(parts))))
    )


def _legend(names: Sequence[str], places: Sequence[int]) -> list[Markup]:
    keys = (tag("span", class_=f"key c{i % 6}") for i in places)
    return [tag("span", key, name, class_="nowrap") for key, name in zip(keys, names, strict=True)]
