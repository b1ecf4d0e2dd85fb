"""Writes the report of a run: curves, goodput, the phases' bill, three futures, samples, spikes, starts.

`write` takes a summary with these keys, as `jaxlm report --json` prints it. Only `run` must be there:

    run         name, model, step, steps, tokens, loss, held_out, best {step, loss}, wall_s, cost_usd, goodput, ended
    curves      columns of metrics.jsonl, NAME -> values, of the same length: step, tokens, cost_usd, loss, grad_norm, lr,
                tokens_per_second, mfu_palm
    held_out    SOURCE -> [[step, loss], ...]; "" is the mean of all sources
    activities  NAME -> seconds, of train.clock
    phases      rows of the bill, as train.phases writes them: phase, last_step, tokens, loss_begin, loss_end, hours, usd, ...
    futures     rows: name, step, loss, low, high, hours, usd, usd_per_centinat; and `advice`, a line
    samples     PROMPT -> [{step, temperature, text}, ...]
    spikes      rows: step, batch, loss, score, documents
    rollbacks   rows: steps, batches, to, why
    starts      rows: time, step, usd_per_hour, device, devices, commit, dirty, changed, ended
"""

import pathlib
import typing

from jaxlm.console import count, dollars, duration, human
from jaxlm.report import chart, page
from jaxlm.report.chart import Curve
from jaxlm.report.page import Markup, cell, details, join, table, tag


def write(path: pathlib.Path, summary: dict[str, typing.Any]) -> None:
    """Writes the page of a summary. The module's docstring lists the summary's keys."""
    parts = [
        ("Loss", _loss),
        ("Where the time went", _activities),
        ("Bill", _bill),
        ("Three futures", _futures),
        ("Samples", _samples),
        ("Optimizer and speed", _speed),
        ("Spikes and rollbacks", _spikes),
        ("Starts", _starts),
    ]
    rendered = [(title, render(summary)) for title, render in parts]
    sections = [page.section(title, content) for title, content in rendered if content]
    page.write(path, f"Run {summary['run']['name']}", _tiles(summary["run"]), sections)


def _tiles(run: dict) -> Markup:
    tiles = [
        (f"{count(run['step'])} of {count(run['steps'])}", "steps"),
        (human(run["tokens"]), "tokens"),
        (_figure(run.get("loss")), "training loss"),
        (_figure(run.get("held_out")), "held-out loss"),
        (duration(run["wall_s"]), "in all"),
        (dollars(run["cost_usd"]) if run["cost_usd"] >= 1 else f"${run['cost_usd']:.3g}", "spent"),
        (f"{100 * run['goodput']:.1f}%" if run.get("goodput") is not None else "", "of the time in new steps"),
    ]
    boxes = [tag("div", tag("b", big), tag("span", small), class_="tile") for big, small in tiles if big]
    return join(
        [tag("p", run["model"], class_="dim"), tag("p", run.get("ended") or ""), tag("div", *boxes, class_="tiles")]
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _curve(summary: dict, x: str, y: str, name: str) -> Curve:
    columns = summary.get("curves") or {}
    pairs = zip(columns.get(x, ()), columns.get(y, ()), strict=False)
    return Curve(name, [(a, b) for a, b in pairs if a is not None and b is not None])


def _resumes(summary: dict) -> list[float]:
    return [start["step"] for start in summary.get("starts", ()) if start["step"]]


def _loss(summary: dict) -> Markup:
    held_out = summary.get("held_out") or {}
    mean = [Curve("held out", held_out.get("", ()))]
    charts = [
        chart.lines(
            [_curve(summary, "step", "loss", "training"), *mean], "Loss by step", marks=_resumes(summary), shown=_nats
        ),
        chart.lines([_curve(summary, "tokens", "loss", "training")], "Loss by tokens", shown=_nats),
        chart.lines([_curve(summary, "cost_usd", "loss", "training")], "Loss by dollars", shown=_nats, shown_x=_usd),
    ]
    sources = [Curve(name, points) for name, points in held_out.items() if name]
    charts.append(chart.lines(sources[:6], "Held-out loss by source", shown=_nats))
    return _grid(charts)


def _nats(value: float) -> str:
    return f"{value:.4g}"


def _usd(value: float) -> str:
    return f"${value:,.4g}"


def _grid(charts: list[Markup]) -> Markup:
    drawn = [one for one in charts if one]
    return tag("div", *drawn, class_="charts") if drawn else Markup("")


def _activities(summary: dict) -> Markup:
    seconds = {name: s for name, s in (summary.get("activities") or {}).items() if s > 0}
    if not seconds:
        return Markup("")
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    shown = [(name, s, f"{100 * s / whole:.1f}%") for name, s in ordered]
    rest = [("rest", sum(s for _, s, _ in shown[5:]), "")] if len(shown) > 6 else shown[5:]
    rows = [(name, duration(s), part) for name, s, part in shown]
    about = "step is productive; repeated was done before and lost; down and hung were paid for too."
    return join(
        [
            chart.stacked([*shown[:5], *rest], "Where the time went"),
            tag("p", about, class_="dim"),
            table(("activity", "time", "share"), rows, "Activities"),
        ]
    )


def _bill(summary: dict) -> Markup:
    latest = {
        row["phase"]: row for row in summary.get("phases") or ()
    }  # a phase that was stopped and went on has several
    rows = [
        (
            row["phase"],
            count(row["last_step"]),
            human(row["tokens"]),
            f"{_figure(row['loss_begin'])} → {_figure(row['loss_end'])}",
            f"{row['hours']:.3g}",
            f"${row['usd']:.4g}",
            f"${row['usd_per_point']:.4g}" if row["usd_per_point"] is not None else "",
        )
        for row in latest.values()
    ]
    head = ("phase", "to step", "tokens", "loss", "hours", "cost", "cost of a point of loss")
    return table(head, rows, "Bill") if rows else Markup("")


def _futures(summary: dict) -> Markup:
    found = summary.get("futures")
    if not found:
        return Markup("")
    rows = [
        (
            row["name"],
            count(row["step"]),
            f"{row['loss']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            f"{row['hours']:.2f}",
            dollars(row["usd"]),
            dollars(row["usd_per_centinat"]) if row.get("usd_per_centinat") is not None else "",
        )
        for row in found.get("rows", ())
    ]
    head = ("future", "to step", "loss (80%)", "hours", "cost", "cost of 0.01 nats")
    advice = tag("p", found.get("advice", ""))
    return join([advice, table(head, rows, "Futures")]) if rows else advice


def _samples(summary: dict) -> Markup:
    """One prompt after the other, each at all milestones side by side."""
    parts = []
    for prompt, texts in (summary.get("samples") or {}).items():
        boxes = []
        for one in texts:
            about = f"step {count(one['step'])}{_temperature(one.get('temperature'))}"
            boxes.append(
                tag("div", tag("p", about, class_="dim"), tag("pre", one["text"].rstrip() or "(white space alone)"))
            )
        parts.append(details(tag("code", prompt), tag("div", *boxes, class_="beside"), opened=not parts))
    return join(parts)


def _temperature(value: float | None) -> str:
    if value is None:
        return ""
    return f", temperature {value:g}" if value else ", greedy"


def _speed(summary: dict) -> Markup:
    marks = _resumes(summary)
    charts = [
        chart.lines([_curve(summary, "step", "lr", "learning rate")], "Learning rate", shown=_nats),
        chart.lines([_curve(summary, "step", "grad_norm", "gradient norm")], "Gradient norm", marks=marks, shown=_nats),
        chart.lines([_curve(summary, "step", "tokens_per_second", "tokens a second")], "Tokens a second", marks=marks),
        chart.lines(
            [_curve(summary, "step", "mfu_palm", "MFU")], "MFU (PaLM)", marks=marks, shown=lambda v: f"{100 * v:.0f}%"
        ),
    ]
    return _grid(charts)


def _spikes(summary: dict) -> Markup:
    rows = [
        (
            count(row["step"]),
            count(row["batch"]),
            _nats(row["loss"]),
            "" if row["score"] is None else f"{row['score']:.1f}",
            cell(", ".join(row["documents"]), kind="text"),
        )
        for row in summary.get("spikes") or ()
    ]
    backs = [
        (
            f"{row['steps'][0]} to {row['steps'][1]}",
            count(row["to"]),
            f"{row['batches'][0]} to {row['batches'][1]}",
            cell(row["why"], kind="text"),
        )
        for row in summary.get("rollbacks") or ()
    ]
    parts = []
    if rows:
        parts.append(table(("step", "batch", "loss", "score", "documents"), rows, "Spikes"))
    if backs:
        parts.append(table(("steps", "back to", "batches passed over", "why"), backs, "Rollbacks"))
    return join(parts)


def _starts(summary: dict) -> Markup:
    rows = []
    for row in summary.get("starts") or ():
        commit = (row.get("commit") or "")[:8] + (" + changes" if row.get("dirty") else "")
        device = f"{row['devices']} x {row['device']}"
        price = f"${row['usd_per_hour']:g}" if row.get("usd_per_hour") else ""
        changed, ended = (
            cell(text, kind="text") for text in ("; ".join(row.get("changed") or ()), row.get("ended") or "")
        )
        rows.append((row["time"], count(row["step"]), device, price, commit, changed, ended))
    head = ("start", "after step", "devices", "an hour", "code", "changed since the start before", "ended")
    return table(head, rows, "Starts") if rows else Markup("")
