"""Writes one page on several runs: their curves over each other, what came of each, and which keys differ."""

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from jaxlm.host.console import count, dollars, duration, human, loss
from jaxlm.report import benchmarks, chart, markup, run_page
from jaxlm.report.chart import Curve
from jaxlm.report.markup import Markup, table, tag

_COLOURS = 6  # of a chart; a seventh run has the first colour, dotted
_DIGITS = 12  # of a hash, enough to see that two differ


def write(
    path: pathlib.Path,
    summaries: Mapping[str, Mapping],
    differing: Sequence[Mapping],
    texts: Mapping[str, Sequence[str]],
    first: Mapping[str, Markup] | None = None,
) -> None:
    """Writes the page. `first`: title -> content of sections in front.

    `summaries`: name -> what `run_page.write` takes, `differing`: rows of `differences.of_runs`.

    texts: name of a held-out text -> the runs that measure it. Losses on different texts can't be compared.
    """
    parts = {**(first or {}), "What came of them": _outcomes(summaries, texts), "Curves": _curves(summaries, texts)}
    parts["Benchmarks"] = _benchmarks(summaries)
    junk = {name: run_page.junk(summary) for name, summary in summaries.items()}
    parts["Junk"] = markup.join(part for name, of_run in junk.items() if of_run for part in (tag("h3", name), of_run))
    parts["What differs"] = _differences(differing, list(summaries))
    title = f"Sweep {path.resolve().parent.name}" if first else f"Runs {', '.join(summaries)}"
    markup.write(path, title, Markup(""), parts.items())


def _outcomes(summaries: Mapping[str, Mapping], texts: Mapping[str, Sequence[str]]) -> Markup:
    rows, priced = [], any(summary["run"]["cost_usd"] for summary in summaries.values())
    for name, summary in summaries.items():
        run = summary["run"]
        held_out = [loss(run.get("held_out")) if name in runs else "" for runs in texts.values()]
        paid = [dollars(run["cost_usd"])] * priced
        done = f"{count(run['step'])} of {count(run['steps'])}"
        rows.append(
            (name, done, human(run["tokens"]), loss(run.get("loss")), *held_out, duration(run["wall_s"]), *paid)
        )
    head = ("run", "steps", "tokens", "training loss", *texts, "time", *["dollars"] * priced)
    outcomes = table(head, rows, "What came of each run")
    if len(texts) < 2:
        return outcomes
    line = "The runs measure different held-out texts: compare losses within a column (jaxlm eval RUN --text=FOLDER: one text)."
    return markup.join([tag("p", line), outcomes])


def _benchmarks(summaries: Mapping[str, Mapping]) -> Markup:
    """Returns the last score of each run on each task. What differs by more than chance `jaxlm compare A B` says."""
    last = {name: {t: p[-1] for t, p in (s.get("benchmarks") or {}).items() if p} for name, s in summaries.items()}
    scores = dict.fromkeys(
        (task, metric)
        for points in last.values()
        for task, point in points.items()
        for metric in (benchmarks.accuracy(point["metrics"]), benchmarks.BITS)
        if metric in point["metrics"]
    )
    rows = [
        (
            f"{benchmarks.title(task)}: {metric}",
            *(markup.with_error(points.get(task) or {"metrics": {}, "stderr": {}}, metric) for points in last.values()),
        )
        for task, metric in scores
    ]
    return table(("", *summaries), rows, "Last scores (two standard errors)") if rows else Markup("")


def _curves(summaries: Mapping[str, Mapping], texts: Mapping[str, Sequence[str]]) -> Markup:
    def over(label: str, along: str, points_of: Callable[[Mapping], Sequence], runs: Sequence[str], **more) -> Markup:
        drawn = []
        for i, name in enumerate(summaries):  # all of them: a run has one colour in all charts
            dotted = i >= _COLOURS
            points = points_of(summaries[name]) if name in runs else []
            drawn.append(Curve(name + " (dotted)" * dotted, points, dotted))
        return chart.lines(drawn, label, along=along, shown=lambda value: f"{value:.4g}", **more)

    def column(x: str, y: str) -> Callable[[Mapping], Sequence]:
        return lambda summary: run_page.columns(summary, x, y)

    runs, nats = list(summaries), {"unit": "nats a token"}
    charts = [
        over(words[0].upper() + words[1:], "steps", lambda s: (s.get("held_out") or {}).get("", ()), group, **nats)
        for words, group in texts.items()
    ]
    charts.append(over("Training loss", "steps", column("step", "loss"), runs, **nats))
    if any(summary["run"]["cost_usd"] for summary in summaries.values()):
        charts.append(over("Training loss by dollars", "dollars", column("cost_usd", "loss"), runs, **nats))
    charts.append(over("Tokens a second", "steps", column("step", "tokens_per_second"), runs))
    charts.append(over("Learning rate", "steps", column("step", "lr"), runs))
    return chart.grid(charts)


def _short(item: object) -> object:
    hashed = isinstance(item, str) and re.fullmatch("[0-9a-f]{40,}", item)
    return item[:_DIGITS] if hashed else markup.value(item)


def _differences(differing: Sequence[Mapping], names: Sequence[str]) -> Markup:
    rows = [(f"{row['what']}: {row['name']}", *map(_short, row["values"])) for row in differing]
    return (
        table(("", *names), rows, "What differs") if rows else tag("p", "Code, config, data and hardware are the same.")
    )
