"""Writes the report of a run: curves, goodput, the phases' bill, three futures, samples, spikes, starts.

`write` takes a summary with these keys, as `jaxlm report --json` prints it. Only `run` must be there:

    run         name, model, params, data (the folder of its data), step, steps, tokens, tokens_per_step, loss, held_out,
                best {step, loss}, wall_s, cost_usd, goodput, ended
    curves      columns of metrics.jsonl, NAME -> values, of the same length: step, tokens, cost_usd, loss, grad_norm, lr,
                tokens_per_second, mfu_palm
    held_out    SOURCE -> [[step, loss], ...]; "" is the mean of all sources
    figures     WORDS -> [[step, value], ...]: what the run is about, if that is not a loss, such as a reward
    activities  NAME -> seconds, of train.clock
    phases      rows of the bill, as train.phases writes them: phase, last_step, tokens, loss_begin, loss_end, hours, usd, ...
    futures     rows: name, step, loss, low, high, hours, usd, usd_per_centinat; and `advice`, a line
    benchmarks  TASK -> [{step, metrics, stderr, chance, n, fewshot}, ...]: `report.benchmarks`
    before      the runs that this one was made from, first to last: name, benchmarks (`report.redteam`), samples
    stages      rows, first to last, of what made the run and of itself, as train.lineage writes them: name, program, config,
                phases, steps, tokens, wall_s, cost_usd, figure, begin, end, held_out; none if nothing was before it
    commands    rows of what each command of a script took: name, wall_s, cost_usd
    samples     PROMPT -> [{step, temperature, text, repetition, distinct_2, degenerates_at, junk}, ...]; runs of older
                versions have no more than the first three
    spikes      rows: step, batch, loss, score, documents
    rollbacks   rows: steps, batches, to, why
    starts      rows: time, step, usd_per_hour, device, devices, commit, dirty, changed, ended
"""

import datetime
import pathlib
import typing

from jaxlm.host.console import count, duration, hours, human, spent
from jaxlm.report import benchmarks, chart, page, redteam, stages
from jaxlm.report.chart import Curve
from jaxlm.report.page import Markup, cell, details, join, table, tag

_BY_STEP = {"along": "steps"}


def write(path: pathlib.Path, summary: dict[str, typing.Any]) -> None:
    """Writes the page of a summary. The module's docstring lists the summary's keys."""
    parts = [
        ("All stages", stages.took),
        ("All commands", stages.commands),
        ("Loss", _loss),
        ("Where the time went", _activities),
        ("Bill", _bill),
        ("Three futures", _futures),
        ("Benchmarks", benchmarks.scores),
        ("Beside published models", benchmarks.beside),
        ("Red team", redteam.scores),
        ("Before and after", stages.samples),
        ("Samples", _samples),
        ("Optimizer and speed", _speed),
        ("Spikes and rollbacks", _spikes),
        ("Starts", _starts),
    ]
    rendered = [(title, render(summary)) for title, render in parts]
    sections = [page.section(title, content) for title, content in rendered if content]
    lead = join([_about(path, summary["run"]), _tiles(summary)])
    page.write(path, f"Run {summary['run']['name']}", lead, sections)


def _about(path: pathlib.Path, run: dict) -> Markup:
    data = pathlib.Path(run["data"]) / page.NAME if run.get("data") else None
    parts = [tag("p", run["model"], class_="dim"), tag("p", page.sentence(run.get("ended") or ""))]
    if data and data.is_file():
        parts.append(tag("p", "Trained on ", page.link("this data", data, path), "."))
    return join(parts)


def _tiles(summary: dict) -> Markup:
    run = summary["run"]
    about = [(_figure(points[-1][1]), words) for words, points in (summary.get("figures") or {}).items() if points]
    tiles = [
        *about,
        (f"{count(run['step'])} of {count(run['steps'])}", "steps"),
        (human(run["tokens"]), "tokens"),
        (_figure(run.get("loss")), "training loss"),
        (_figure(run.get("held_out")), "held-out loss"),
        (duration(run["wall_s"]), "in all"),
        (spent(run["cost_usd"]) if run["cost_usd"] else "", "spent"),
        (f"{100 * run['goodput']:.1f}%" if run.get("goodput") is not None else "", "of the time in new steps"),
    ]
    boxes = [tag("div", tag("b", big), tag("span", small), class_="tile") for big, small in tiles if big]
    return tag("div", *boxes, class_="tiles")


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
    about = [Curve(words, points) for words, points in (summary.get("figures") or {}).items() if points]
    mean, nats = [Curve("held out", held_out.get("", ()))], {"unit": "nats a token", "shown": _nats}
    both = [_curve(summary, "step", "loss", "training"), *mean]
    charts = [
        chart.lines(about, "What it is trained for", **_BY_STEP, shown=_nats),
        chart.lines(both, "Loss by step", **_BY_STEP, **nats, marks=_resumes(summary)),
        chart.lines([_curve(summary, "tokens", "loss", "")], "Training loss by tokens", along="tokens", **nats),
    ]
    if _is_paid(summary):
        by_usd = [_curve(summary, "cost_usd", "loss", "")]
        charts.append(chart.lines(by_usd, "Training loss by dollars", along="dollars", **nats, shown_x=_usd))
    sources = [Curve(name, points) for name, points in held_out.items() if name]
    if len(sources) > 1:  # one alone is the held-out loss above
        charts.append(chart.lines(sources[:6], "Held-out loss by source", **_BY_STEP, **nats))
    return chart.grid(charts)


def _is_paid(summary: dict) -> bool:
    """True if the machine has a price. Without one, dollars say nothing."""
    return summary["run"]["cost_usd"] > 0


def _nats(value: float) -> str:
    return f"{value:.4g}"


def _usd(value: float) -> str:
    return f"${value:,.4g}"


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
    bar = chart.stacked([*shown[:5], *rest], "Where the time went")
    return join([bar, tag("p", about, class_="dim"), table(("activity", "time", "share"), rows, "Activities")])


def _bill(summary: dict) -> Markup:
    # A phase that was stopped and went on has several.
    latest = {row["phase"]: row for row in summary.get("phases") or ()}
    rows = [
        (
            row["phase"],
            count(row["last_step"]),
            human(row["tokens"]),
            f"{_figure(row['loss_begin'])} → {_figure(row['loss_end'])}",
            hours(row["hours"]),
            *([spent(row["usd"]), _price(row["usd_per_point"])] if _is_paid(summary) else []),
        )
        for row in latest.values()
    ]
    head = ("phase", "to step", "tokens", "loss", "time", *(["cost", "cost of a nat"] if _is_paid(summary) else []))
    return table(head, rows, "Bill") if rows else Markup("")


def _price(usd: float | None) -> str:
    return "" if usd is None else spent(usd)


def _futures(summary: dict) -> Markup:
    futures = summary.get("futures")
    if not futures:
        return Markup("")
    rows = [
        (
            row["name"],
            count(row["step"]),
            f"{row['loss']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            hours(row["hours"]),
            *([spent(row["usd"]), _price(row.get("usd_per_centinat"))] if _is_paid(summary) else []),
        )
        for row in futures.get("rows", ())
    ]
    head = ("future", "to step", "loss (80%)", "time", *(["cost", "cost of 0.01 nats"] if _is_paid(summary) else []))
    advice = tag("p", page.sentence(futures.get("advice", "")))
    return join([advice, table(head, rows, "Futures")]) if rows else advice


def _samples(summary: dict) -> Markup:
    """One prompt after the other, each way to continue it at all milestones side by side: greedy, then sampled."""
    parts = []
    for prompt, texts in (summary.get("samples") or {}).items():
        ways: dict[float | None, list[Markup]] = {}
        for one in texts:
            about = [tag("p", f"step {count(one['step'])}{_temperature(one.get('temperature'))}", class_="dim")]
            if figures := _degeneration(one):
                about.append(tag("p", figures, class_="dim small"))
            text = tag("pre", one["text"].rstrip() or "(white space alone)")
            ways.setdefault(one.get("temperature"), []).append(tag("div", *about, text))
        rows = [
            tag("div", *ways[way], class_="beside") for way in sorted(ways, key=lambda way: -1 if way is None else way)
        ]
        parts.append(details(tag("code", prompt), *rows, opened=not parts))
    if parts and any("repetition" in one for texts in summary["samples"].values() for one in texts):
        about = (
            "Repeated: 4-grams of words that stood in the text before. Different: 2-grams that differ. Loops after: the words "
            "before the text only repeats itself. Junk: chat tokens, labels and the like, by characters."
        )
        parts.insert(0, tag("p", about, class_="dim"))
    return join(parts)


def _degeneration(one: dict) -> str:
    """What tells of a text that falls apart; "" if its file is of an older version."""
    if not isinstance(one.get("repetition"), int | float):
        return ""
    loop, junk = one.get("degenerates_at"), one.get("junk") or 0
    parts = [f"{one['repetition']:.0%} repeated", f"{one.get('distinct_2') or 0:.0%} different"]
    parts += [f"loops after {count(loop)} words"] if isinstance(loop, int) else []
    return ", ".join([*parts, *([f"{junk:.1%} junk"] if junk else [])])


def _temperature(value: float | None) -> str:
    if value is None:
        return ""
    return f", temperature {value:g}" if value else ", greedy"


def _speed(summary: dict) -> Markup:
    def by_step(column: str, label: str, **more: typing.Any) -> Markup:
        return chart.lines([_curve(summary, "step", column, "")], label, **_BY_STEP, **more)

    marks = _resumes(summary)
    charts = [
        by_step("lr", "Learning rate", shown=_nats),
        by_step("grad_norm", "Gradient norm", marks=marks, shown=_nats),
        by_step("tokens_per_second", "Tokens a second", marks=marks),
        by_step("mfu_palm", "MFU (PaLM)", marks=marks, shown=lambda v: f"{v:.0%}"),
    ]
    return chart.grid(charts)


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


def _date(time: str) -> str:
    """A time as in run.json, to the minute: 2026-11-22T20:07:03.394+00:00 -> 2026-11-22 20:07 UTC."""
    try:
        return datetime.datetime.fromisoformat(time).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return time


def _starts(summary: dict) -> Markup:
    rows = []
    for row in summary.get("starts") or ():
        commit = (row.get("commit") or "")[:8] + (" + changes" if row.get("dirty") else "")
        device = f"{row['devices']} x {row['device']}"
        price = f"${row['usd_per_hour']:g}" if row.get("usd_per_hour") else ""
        texts = ("; ".join(row.get("changed") or ()), row.get("ended") or "")
        about = (_date(row["time"]), count(row["step"]), device, price, commit)
        rows.append((*about, *(cell(text, kind="text") for text in texts)))
    head = ("start", "after step", "devices", "an hour", "code", "changed since the start before", "ended")
    return table(head, rows, "Starts") if rows else Markup("")
