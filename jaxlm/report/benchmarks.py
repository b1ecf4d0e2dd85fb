"""The benchmarks of a run's page: accuracy with two standard errors and chance, bits per byte, and what other models score.

`scores` and `beside` take the summary of `report.run`.
"""

import collections
import math

from jaxlm.console import count, human
from jaxlm.report import chart, published, redteam
from jaxlm.report.chart import Curve
from jaxlm.report.page import Markup, details, join, table, tag, with_error
from jaxlm.report.published import BITS, MARGIN, Model

_WAYS = {"acc_norm": "n", "acc_own": "o", "acc_5shot": "f"}  # how a published score was asked -> its mark


def scores(summary: dict) -> Markup:
    """Returns the run's scores: the last of each task as a table, and all of them by step."""
    every = summary.get("benchmarks") or {}
    found = {task: points for task, points in every.items() if not task.startswith(redteam.PREFIX)}
    rows = [_row(task, points[-1]) for task, points in found.items() if points]
    if not rows:
        return Markup("")
    lines = [line for task, points in found.items() if points and (line := _alarm(summary["run"], task, points[-1]))]
    head = ("task", "accuracy", "chance", "bits per byte", "margin", "metric", "questions", "examples", "step")
    about = (
        "± is two standard errors. Bits per byte of the right answer (less is better) move long before accuracy does; the "
        "margin is how many fewer they are than the best wrong answer's."
    )
    alike = {task: _alike(points) for task, points in found.items() if points}
    charts = [_accuracy(task, points) for task, points in alike.items()]
    bits = [Curve(published.title(task), _points(points, BITS)) for task, points in alike.items()]
    bits = [curve for curve in bits if len(curve.points) > 1][:6]
    charts.append(chart.lines(bits, "Bits per byte of the right answers", along="steps", shown=_figure))
    drawn = [tag("div", *filter(None, charts), class_="charts")] if any(charts) else []
    notes = [about, *(line for task in alike if (line := _left_out(task, found[task], alike[task])))]
    parts = [*(tag("p", line) for line in lines), table(head, rows, "Benchmarks")]
    return join([*parts, *(tag("p", line, class_="dim") for line in notes), *drawn])


def _alike(points: list[dict]) -> list[dict]:
    """The points that were asked as many questions, with as many examples, as most are; of equally many, as the last."""
    ways = [(point.get("n"), point.get("fewshot")) for point in reversed(points)]
    usual = collections.Counter(ways).most_common(1)[0][0]
    return [point for point in points if (point.get("n"), point.get("fewshot")) == usual]


def _left_out(task: str, points: list[dict], drawn: list[dict]) -> str:
    """Returns which steps the curves of a task leave out, as other questions do not compare; "" if none."""
    if len(points) == len(drawn):
        return ""
    steps = ", ".join(f"{point['step']:,}" for point in points if point not in drawn)
    asked = "" if drawn[0].get("n") is None else f" of {count(int(drawn[0]['n']))} questions"
    return f"{published.title(task)}: curves show steps{asked} asked alike; not step {steps}, asked otherwise."


def _alarm(run: dict, task: str, point: dict) -> str:
    tokens = point["step"] * (run.get("tokens_per_step") or 0)
    flops = 6.0 * (run.get("params") or 0) * tokens
    return published.alarm(
        task, point["metrics"], point["stderr"], point.get("chance"), flops, int(point.get("n") or 0)
    )


def _row(task: str, point: dict) -> tuple:
    metrics, metric, chance = point["metrics"], published.accuracy(point["metrics"]), point.get("chance")
    asked, shots = point.get("n"), point.get("fewshot")
    return (
        published.title(task),
        with_error(point, metric, 3) if metric else "",
        "" if chance is None else f"{chance:.3f}",
        with_error(point, BITS, 3) if BITS in metrics else "",
        with_error(point, MARGIN, 3) if MARGIN in metrics else "",
        metric or "",
        "" if asked is None else count(int(asked)),
        "" if shots is None else count(int(shots)),
        count(point["step"]),
    )


def _points(points: list[dict], metric: str, errors: float = 0.0) -> list[tuple[float, float]]:
    """(step, score plus so many standard errors) where the metric was measured."""
    return [
        (point["step"], point["metrics"][metric] + errors * point["stderr"].get(metric, 0.0))
        for point in points
        if metric in point["metrics"]
    ]


def _accuracy(task: str, points: list[dict]) -> Markup:
    metric = published.accuracy(points[-1]["metrics"])
    if not metric or len(_points(points, metric)) < 2:
        return Markup("")
    chance = [(point["step"], point["chance"]) for point in points if point.get("chance") is not None]
    curves = [Curve(metric, _points(points, metric))]
    if any(metric in point["stderr"] for point in points):
        low, high = _points(points, metric, -2.0), _points(points, metric, 2.0)
        curves.append(Curve("± 2 s.e.", [*low, (low[-1][0], math.nan), *high], dotted=True))  # one curve with a gap
    curves += [Curve("chance", chance, dotted=True)] if chance else []
    return chart.lines(curves, f"{published.title(task)} by step", along="steps", shown=_figure)


def _figure(value: float) -> str:
    return f"{value:.3g}"


def beside(summary: dict) -> Markup:
    """Returns the run's scores among those that others published; nothing without a score on one of their tasks."""
    models = [model for model in published.models() if model.shown]
    tasks = [task for task in published.TASKS if any(task in model.scores for model in models)]
    own = {task: points[-1] for task, points in (summary.get("benchmarks") or {}).items() if points and task in tasks}
    if not own:
        return Markup("")
    run = summary["run"]
    step = max(point["step"] for point in own.values())
    tokens = step * (run.get("tokens_per_step") or 0) or run.get("tokens")
    columns = [[_size(run.get("params")), _size(tokens), *(_mine(own[task]) if task in own else "" for task in tasks)]]
    columns += [
        [_size(model.params), _size(model.tokens), *(_other(model, task) for task in tasks)] for model in models
    ]
    names = ("parameters", "tokens", *(published.title(task) for task in tasks))
    rows = list(zip(names, *columns, strict=True))
    head = ("", "this run", *(model.name for model in models))
    about = (
        "Accuracy in %, zero-shot. n: normalised by the answers' bytes (acc_norm); f: with five worked examples; o: asked "
        "in the publisher's own way. Scores that were asked in different ways do not compare. A blank was not found published."
    )
    sources = [tag("p", f"{model.name}: {model.source}") for model in models]
    return join(
        [table(head, rows, "Beside published models"), tag("p", about, class_="dim"), details("Sources", *sources)]
    )


def _mine(point: dict) -> str:
    metric = published.accuracy(point["metrics"])
    if not metric:
        return ""
    error = point["stderr"].get(metric)
    mark = "f" if point.get("fewshot") == 5 else _WAYS.get(metric, "")
    return _percent(point["metrics"][metric], mark) + (f" ± {200 * error:.1f}" if error is not None else "")


def _other(model: Model, task: str) -> str:
    found = model.scores.get(task, {})
    metric = "acc_norm" if "acc_norm" in found else next(iter(found), None)
    return _percent(found[metric], _WAYS.get(metric, "")) if metric else ""


def _percent(value: float, mark: str) -> str:
    return f"{100 * value:.1f}{f' {mark}' if mark else ''}"


def _size(number: float | None) -> str:
    return human(number) if number else ""
