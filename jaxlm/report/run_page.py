"""Writes the report of a run: curves, goodput, the phases' bill, three futures, samples, spikes, starts.

`write` takes a summary with these keys, as `jaxlm report --json` prints it. Only `run` is required:

run         name, model, params, data (its folder), step, steps, tokens, tokens_per_step, loss, held_out, best, wall_s, ...
curves      columns of metrics.jsonl, NAME -> values, of the same length
held_out    SOURCE -> [[step, loss], ...]; "" is the mean of all sources
average     [[step, loss], ...] of the moving average of the weights
decays      rows: name, end and decay (step and loss at the end of a decay of the rate); step, weights and average before it
figures     WORDS -> [[step, value], ...]: the figure that the run optimises if that is no loss, such as a reward
bends       rows: step, change in nats, over (steps), why (words), explained (by the rate, in nats, or null)
activities  NAME -> seconds, of run.clock
phases      rows of the bill, as train.phases writes them
futures     rows and advice (`plan.forecast.summary`)
benchmarks  TASK -> [{step, metrics, stderr, chance, n, fewshot}, ...]
junk        step, strings: rows of `jaxlm junk`, the strongest first
before      the runs that this one came from, first to last: name, benchmarks, samples
stages      rows, first to last, of the stages that led to the run, and of the run (`run.lineage.stages`)
commands    rows of each command of a script: name, wall_s, cost_usd
samples     PROMPT -> [{step, temperature, text, repetition, ...}, ...]; older versions wrote the first three alone
spikes, rollbacks, starts      rows
"""

import datetime
import pathlib
from collections.abc import Callable, Mapping, Sequence

from jaxlm.corpus.stages.junk_patterns import SURE
from jaxlm.host.console import count, dollars, duration, hours, human, loss
from jaxlm.report import benchmarks, chart, markup
from jaxlm.report.chart import Curve
from jaxlm.report.markup import Markup, cell, details, join, table, tag

_BY_STEP = {"along": "steps"}


def write(path: pathlib.Path, summary: dict) -> None:
    """Writes the page of a summary. The module's docstring lists the summary's keys."""
    parts = [
        ("All stages", took),
        ("All commands", commands),
        ("Why the curve bent", _bends),
        ("Loss", lambda summary: chart.grid(_curves(summary)[1:])),
        ("Where the time went", _activities),
        ("Bill", _bill),
        ("Three futures", _futures),
        ("As if decayed now", _as_if_decayed),
        ("Benchmarks", benchmarks.scores),
        ("Beside published models", benchmarks.beside),
        ("Red team", benchmarks.redteam),
        ("Junk", junk),
        ("Before and after", before_and_after),
        ("Samples", _samples),
        ("Optimizer and speed", _speed),
        ("Spikes and rollbacks", _spikes),
        ("Starts", _starts),
    ]
    sections = ((title, render(summary)) for title, render in parts)
    lead = join([_now(summary), _tiles(summary), *_curves(summary)[:1], _about(path, summary["run"])])
    markup.write(path, f"Run {summary['run']['name']}", lead, sections)


def _about(path: pathlib.Path, run: dict) -> Markup:
    data = pathlib.Path(run["data"]) / markup.NAME if run.get("data") else None
    link = data and data.is_file() and tag("p", "Trained on ", markup.link("this data", data, path), ".")
    return join([tag("p", run["model"], class_="dim"), link or ""])


def _now(summary: dict) -> Markup:
    """Returns how the run stands, and what to do next: the command to try, or the forecast's advice."""
    run, advice = summary["run"], (summary.get("futures") or {}).get("advice", "")
    stands = run.get("ended") or ""
    if not stands and run.get("time") and run.get("left_s"):
        time = datetime.datetime.fromtimestamp(run["time"], datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        cost = _paid(summary, f" and {dollars(run['left_usd'])}")
        stands = join([f"last seen training at {time}; about {duration(run['left_s'])}", *cost, " left"])
    lines = [markup.sentence(stands)] * bool(stands) + [markup.sentence(f"forecast: {advice}")] * bool(advice)
    lines += [join(["next: ", tag("code", markup.sentence(run["next"]))])] if run.get("next") else []
    return join(tag("p", line) for line in lines)


def _tiles(summary: dict) -> Markup:
    run, figures = summary["run"], (summary.get("figures") or {}).items()
    best = run.get("best")
    lower = best and run["held_out"] is not None and best["loss"] < run["held_out"]
    better = f", best {loss(best['loss'])} at step {count(best['step'])}" if lower else ""
    tiles = [(loss(points[-1][1]), words) for words, points in figures if points]
    tiles += [
        (loss(run.get("held_out")), f"held-out loss{better}"),
        (loss(run.get("loss")), "training loss"),
        *_paid(summary, (dollars(run["cost_usd"]), "spent")),
        (count(run["step"]), f"of {count(run['steps'])} steps, {human(run['tokens'])} tokens"),
        (duration(run["wall_s"]), "in all"),
    ]
    return markup.tiles(tiles)


def _paid(summary: dict, *parts: object) -> tuple:
    """Returns the given parts, which are about dollars; () if the machine has no price."""
    return parts if summary["run"]["cost_usd"] > 0 else ()


def columns(summary: Mapping, x: str, y: str) -> list[tuple[float, float]]:
    """Returns the values of two columns of a summary's `curves`, where both are known; [] if it lacks one."""
    curves = summary.get("curves") or {}
    pairs = zip(curves.get(x, ()), curves.get(y, ()), strict=False)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _resumes(summary: dict) -> list[float]:
    return [start["step"] for start in summary.get("starts", ()) if start["step"]]


def _curves(summary: dict) -> list[Markup]:
    """Returns the charts of the losses, first what the run is trained for."""
    held_out = summary.get("held_out") or {}
    about = [Curve(words, points) for words, points in (summary.get("figures") or {}).items() if points]
    mean, nats = [Curve("held out", held_out.get("", ()))], {"unit": "nats a token", "shown": _nats}
    both = [Curve("training", columns(summary, "step", "loss")), *mean]
    both.append(Curve("as if decayed now", summary.get("average") or ()))
    bent = [row["step"] for row in summary.get("bends") or ()]
    charts = [
        chart.lines(about, "What it is trained for", **_BY_STEP, shown=_nats),
        chart.lines(both, "Loss by step", **_BY_STEP, **nats, marks=_resumes(summary), numbered=bent),
        chart.lines([Curve("", columns(summary, "tokens", "loss"))], "Training loss by tokens", along="tokens", **nats),
    ]
    for by_usd in _paid(summary, Curve("", columns(summary, "cost_usd", "loss"))):
        title = "Training loss by dollars"
        charts.append(chart.lines([by_usd], title, along="dollars", **nats, shown_x=lambda usd: f"${usd:,.4g}"))
    sources = [Curve(name, points) for name, points in held_out.items() if name]
    if len(sources) > 1:  # one alone is the held-out loss above
        charts.append(chart.lines(sources[:6], "Held-out loss by source", **_BY_STEP, **nats))
    return [drawn for drawn in charts if drawn]


def _nats(value: float) -> str:
    return f"{value:.4g}"


def _bends(summary: dict) -> Markup:
    rows = []
    for number, row in enumerate(summary.get("bends") or (), start=1):
        takes = f"{row['change']:+.3f} {'over ' + count(row['over']) + ' steps' if row['over'] else 'at once'}"
        rows.append((count(number), count(row["step"]), takes, cell(row["why"], kind="text")))
    return table(("bend", "from step", "nats", "what came there"), rows, "Bends") if rows else Markup("")


def _activities(summary: dict) -> Markup:
    seconds = {name: s for name, s in (summary.get("activities") or {}).items() if s > 0}
    if not seconds:
        return Markup("")
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    shown = [(name, s, f"{100 * s / whole:.1f}%") for name, s in ordered]
    rest = [("rest", sum(s for _, s, _ in shown[5:]), "")] if len(shown) > 6 else shown[5:]
    rows = [(name, duration(s), part) for name, s, part in shown]
    about = "step is productive; repeated steps were done before and lost; down and hung were paid for too."
    bar = chart.stacked([*shown[:5], *rest], "Where the time went")
    return join([bar, tag("p", about, class_="dim"), table(("activity", "time", "share"), rows, "Activities")])


def _bill(summary: dict) -> Markup:
    latest = {row["phase"]: row for row in summary.get("phases") or ()}  # a resumed phase has several rows
    rows = []
    for name, row in latest.items():
        losses = f"{loss(row['loss_begin'])} → {loss(row['loss_end'])}"
        cost = _paid(summary, dollars(row["usd"]), _price(row["usd_per_point"]))
        rows.append((name, count(row["last_step"]), human(row["tokens"]), losses, hours(row["hours"]), *cost))
    head = ("phase", "to step", "tokens", "loss", "time", *_paid(summary, "cost", "cost of a nat"))
    return table(head, rows, "Bill") if rows else Markup("")


def _price(usd: float | None) -> str:
    return "" if usd is None else dollars(usd)


def _futures(summary: dict) -> Markup:
    futures = summary.get("futures")
    rows = []
    for row in (futures or {}).get("rows", ()):
        expected = f"{row['loss']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        cost = _paid(summary, dollars(row["usd"]), _price(row.get("usd_per_centinat")))
        rows.append((row["name"], count(row["step"]), expected, hours(row["hours"]), *cost))
    head = ("future", "to step", "loss (80%)", "time", *_paid(summary, "cost", "cost of 0.01 nats"))
    return table(head, rows, "Futures") if rows else Markup("")


def _as_if_decayed(summary: dict) -> Markup:
    """Returns the loss of the weights' moving average, beside the forecast and beside decays that were trained."""
    if not (points := summary.get("average")):
        return Markup("")
    (step, average), futures = points[-1], (summary.get("futures") or {}).get("rows", ())
    weights = dict((summary.get("held_out") or {}).get("", ())).get(step)
    text = f"The moving average of the weights has a held-out loss of {loss(average)} at step {count(step)}"
    side = "below" if weights and weights >= average else "above"
    text += f", {_nats(abs(weights - average))} {side} the weights' own" if weights else ""
    if len(futures) > 2:  # the plan, a decay now, the end now
        text += f"; by the forecast a decay now takes {_nats(futures[2]['loss'] - futures[1]['loss'])} off the training loss"
    rows = []
    for row in summary.get("decays") or ():
        gained, all_ = row["weights"] - row["average"], row["weights"] - row["decay"]
        share = f"{gained / all_:.0%}" if row["step"] == row["end"] and all_ > 0 else ""
        before = (count(row["step"]), loss(row["weights"]), loss(row["average"]))
        rows.append(
            (row["name"], *before, count(row["end"]), loss(row["decay"]), _nats(row["average"] - row["decay"]), share)
        )
    head = ("decay", "at step", "weights", "average", "decay ends", "its loss", "average above it", "of the way")
    return join([tag("p", f"{text}.", class_="dim"), *([table(head, rows, "Decays")] if rows else [])])


def junk(summary: dict) -> Markup:
    """Returns the strings that `jaxlm junk` named, or that it named none; empty if it was not run."""
    if not (result := summary.get("junk")):
        return Markup("")
    strings = result["strings"]
    about = "written after different prompts, and repeated over and over in a small source" if strings else "none"
    rows = [(tag("code", row["string"]), *map(markup.value, list(row.values())[1:])) for row in strings]
    shown = [table([name.replace("_", " ") for name in strings[0]], rows, "Junk")] if rows else []
    return join([tag("p", f"Step {count(result['step'])}: {about}.", class_="dim"), *shown])


def _samples(summary: dict) -> Markup:
    """Returns the samples by prompt; for each temperature, greedy first, those of all milestones side by side."""
    parts = []
    for prompt, texts in (summary.get("samples") or {}).items():
        ways: dict[float | None, list[Markup]] = {}
        for line in texts:
            ways.setdefault(line.get("temperature"), []).append(_sample("", line, _degeneration(line)))
        order = sorted(ways, key=lambda way: -1 if way is None else way)
        rows = (tag("div", *ways[way], class_="beside") for way in order)
        parts.append(details(tag("code", prompt), *rows, opened=not parts))
    if parts and any("repetition" in line for texts in summary["samples"].values() for line in texts):
        about = (
            "Repeated: 4-grams of words that occur earlier in the text. Different: distinct 2-grams. Loops after: the words "
            "before the text only repeats itself. Junk: chat tokens, labels and the like, by characters."
        )
        parts.insert(0, tag("p", about, class_="dim"))
    return join(parts)


def _degeneration(line: dict) -> str:
    """The degeneration figures of a sample; "" if an older version wrote it."""
    if not isinstance(line.get("repetition"), int | float):
        return ""
    loop, junk = line.get("degenerates_at"), line.get("junk") or 0
    parts = [f"{line['repetition']:.0%} repeated", f"{line.get('distinct_2') or 0:.0%} different"]
    parts += [f"loops after {count(loop)} words"] if isinstance(loop, int) else []
    return ", ".join([*parts, *([f"{junk:.1%} junk"] if junk else [])])


def _temperature(value: float | None) -> str:
    return "" if value is None else f", temperature {value:g}" if value else ", greedy"


def _speed(summary: dict) -> Markup:
    def by_step(column: str, label: str, **more: object) -> Markup:
        return chart.lines([Curve("", columns(summary, "step", column))], label, **_BY_STEP, **more)

    marks = _resumes(summary)
    return chart.grid(
        [
            by_step("lr", "Learning rate", shown=_nats),
            by_step("grad_norm", "Gradient norm", marks=marks, shown=_nats),
            by_step("tokens_per_second", "Tokens a second", marks=marks),
            by_step("mfu_palm", "MFU (PaLM)", marks=marks, shown=lambda share: f"{share:.0%}"),
        ]
    )


def _spikes(summary: dict) -> Markup:
    parts, spikes, backs = [], summary.get("spikes") or (), summary.get("rollbacks") or ()
    if spikes:
        rows = []
        for row in spikes:
            score = "" if row["score"] is None else f"{row['score']:.1f}"
            figures = (count(row["step"]), count(row["batch"]), _nats(row["loss"]), score)
            rows.append((*figures, cell(", ".join(row["documents"]), kind="text")))
        parts.append(table(("step", "batch", "loss", "score", "documents"), rows, "Spikes"))
    if backs:
        rows = []
        for row in backs:
            steps, batches = ("{} to {}".format(*row[name]) for name in ("steps", "batches"))
            rows.append((steps, count(row["to"]), batches, cell(row["why"], kind="text")))
        parts.append(table(("steps", "back to", "skipped batches", "why"), rows, "Rollbacks"))
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


_MUCH = 0.5  # of a text's 4-grams repeat earlier ones: it says little else
_CANT = "Fine-tuning can't remove this: look at the pretraining data (jaxlm audit, jaxlm trace)."

_TITLES = {
    "prepare": "data",
    "pretrain": "pretraining",
    "sft": "SFT",
    "dpo": "DPO",
    "reward": "reward model",
    "ppo": "PPO",
    "grpo": "GRPO",
    "": "not here",
}
_DATA_TIME = "Data: the seconds of its stages, of all workers together, which are not in the sum."
_COMMANDS_TIME = "Whole commands, with start-up, evaluation and export. The table of stages counts training runs only."
_DATA_INSIDE = "Pretraining prepared its data itself: its time holds both."

Texts = Mapping[str, Sequence[dict]]  # prompt -> its continuations, like `samples` of the summary


def took(summary: dict) -> Markup:
    """Returns the table of a summary's stages: a row for each, and their sum; empty Markup if it lists no stages."""
    stages = summary.get("stages") or ()
    if not stages:
        return Markup("")
    runs = [stage for stage in stages if stage["program"] != "prepare"]
    tokens, wall_s, usd = (sum(run[name] or 0 for run in runs) for name in ("tokens", "wall_s", "cost_usd"))
    head = ("stage", "what it changed", "time", "cost", "steps", "tokens", "run", "config")
    rows = [head, *map(_stage, stages), ("all", "", duration(wall_s), dollars(usd), "", human(tokens), "", "")]
    if not any(stage["cost_usd"] for stage in stages):  # without a price, dollars say nothing
        rows = [(*row[:3], *row[4:]) for row in rows]
    parts = [table(rows[0], rows[1:], "Stages")]
    for stage in stages:
        if stage["program"] == "prepare":
            parts.append(tag("p", _DATA_INSIDE if stage["wall_s"] is None else _DATA_TIME, class_="dim"))
        if stage.get("held_out"):
            parts.append(tag("p", f"{stage['name']}: {stage['held_out']}.", class_="dim"))
    return join(parts)


def _stage(row: dict) -> tuple[object, ...]:
    def shown(name: str, words: Callable[[float], str]) -> str:
        return "" if row[name] is None else words(row[name])

    ends = [row[name] for name in ("begin", "end") if row[name] is not None]
    figures = [count(figure) if isinstance(figure, int) else f"{figure:.3f}" for figure in ends]
    phases = f" in phases: {', '.join(row['phases'])}" if row["phases"] else ""
    return (
        _TITLES.get(row["program"], row["program"]),
        cell(f"{row['figure']} {' → '.join(figures)}" if ends else "", kind="text"),
        shown("wall_s", duration),
        shown("cost_usd", dollars),
        shown("steps", count),
        shown("tokens", human),
        cell(row["name"], kind="text"),
        cell(f"{row['config']}{phases}", kind="text"),
    )


def commands(summary: dict) -> Markup:
    """Returns a table of the time and cost of each command of a script, and their sum; empty Markup if unknown."""
    rows = summary.get("commands") or ()
    if not rows:
        return Markup("")
    head, *cells = command_cells(rows)
    return join([table(head, cells, "Commands"), tag("p", _COMMANDS_TIME, class_="dim")])


def command_cells(rows: Sequence[dict]) -> list[tuple[str, ...]]:
    """Returns the cells of the table of `commands`: its head, a row for each command, their sum."""
    wall_s, usd = (sum(row[key] for row in rows) for key in ("wall_s", "cost_usd"))
    whole = {"name": "all", "wall_s": wall_s, "cost_usd": usd}
    cells = [(row["name"], duration(row["wall_s"]), dollars(row["cost_usd"])) for row in (*rows, whole)]
    return [row if usd else row[:2] for row in [("command", "time", "cost"), *cells]]


def before_and_after(summary: dict) -> Markup:
    """Returns the samples of all stages side by side; empty Markup unless the run and an earlier stage have samples."""
    own = {"name": summary["run"].get("name", ""), "samples": summary.get("samples") or {}}
    runs = [*(summary.get("before") or ()), own]
    stages = [(run["name"], texts) for run in runs if (texts := _latest(run.get("samples") or {}))]
    if len(stages) < 2 or not own["samples"]:
        return Markup("")
    rows = []
    for name, texts in stages:
        lines = _lines(texts)
        clean = sum(_verdict(line) == "clean" for line in lines)
        rows.append((name, count(lines[0]["step"]), count(len(lines)), f"{clean} of {len(lines)}"))
    parts = [*_persisting(stages), table(("run", "step", "texts", "clean"), rows, "Clean texts")]
    for i, prompt in enumerate(own["samples"]):
        beside = [
            _sample(f"{name}, ", line, _verdict(line)) for name, texts in stages for line in texts.get(prompt, ())
        ]
        parts.append(details(tag("code", prompt), tag("div", *beside, class_="beside"), opened=not i))
    return join(parts)


def _latest(texts: Texts) -> Texts:
    """Returns the continuations of each prompt at the last step that has any."""
    last = max((line["step"] for line in _lines(texts)), default=0)
    at_last = {prompt: [line for line in lines if line["step"] == last] for prompt, lines in texts.items()}
    return {prompt: lines for prompt, lines in at_last.items() if lines}


def _persisting(stages: Sequence[tuple[str, Texts]]) -> list[Markup]:
    """Returns a line for each kind of known junk in the texts of both the first and the last stage."""
    (first, before), (last, after) = stages[0], stages[-1]
    was, still = ({label for line in _lines(texts) for label in _labels(line["text"])} for texts in (before, after))
    return [tag("p", f"{first} wrote “{label}”, and {last} still does. {_CANT}") for label in sorted(was & still)]


def _lines(texts: Texts) -> list[dict]:
    return [line for lines in texts.values() for line in lines]


def _labels(text: str) -> list[str]:
    """The labels of the known junk in a text, sorted."""
    labels = {group.label_of(match) for group in SURE for match in group.matches(text)}
    return sorted(labels | ({"U+FFFD"} if "\ufffd" in text else set()))


def _verdict(line: dict) -> str:
    """Returns the faults of a sample (`line`: its line of the file): known junk, a loop, much repetition; or "clean"."""
    loop, repeated, labels = line.get("degenerates_at"), line.get("repetition"), _labels(line["text"])
    faults = [f"junk: {', '.join(labels)}"] if labels else []
    faults += [f"loops after {count(loop)} words"] if isinstance(loop, int) else []
    if not faults and isinstance(repeated, int | float) and repeated >= _MUCH:
        faults = [f"{repeated:.0%} repeated"]
    return "; ".join(faults) or "clean"


def _sample(name: str, line: dict, figures: str) -> Markup:
    """One text of a run, below its step and its figures."""
    about = f"{name}step {count(line['step'])}{_temperature(line.get('temperature'))}"
    parts = [tag("p", about, class_="dim")] + [tag("p", figures, class_="dim small")] * bool(figures)
    return tag("div", *parts, tag("pre", line["text"].rstrip() or "(white space alone)"))
