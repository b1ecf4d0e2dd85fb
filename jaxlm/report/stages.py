"""The runs before a run, itself, and commands around them: what each took, and wrote after the same prompts, clean or not."""

from collections.abc import Callable, Mapping, Sequence

from jaxlm.corpus.stages.junk_patterns import GROUPS
from jaxlm.host.console import count, duration, human, spent
from jaxlm.report.page import Markup, cell, details, join, table, tag

_SURE = 0.8  # a severity of `GROUPS`: of patterns that are junk in any text
_MUCH = 0.5  # of a text's 4-grams stood in it before: it says little else
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

Texts = Mapping[str, Sequence[dict]]  # prompt -> its continuations, as `report.run` has `samples`


def took(summary: dict) -> Markup:
    """Returns the table of a summary of `report.run`: a row for each stage, and their sum; nothing if the run is the first."""
    stages = summary.get("stages") or ()
    if not stages:
        return Markup("")
    runs = [stage for stage in stages if stage["program"] != "prepare"]
    tokens, wall_s, usd = (sum(run[name] or 0 for run in runs) for name in ("tokens", "wall_s", "cost_usd"))
    head = ("stage", "what it changed", "time", "cost", "steps", "tokens", "run", "config")
    rows = [head, *map(_stage, stages), ("all", "", duration(wall_s), spent(usd), "", human(tokens), "", "")]
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
        shown("cost_usd", spent),
        shown("steps", count),
        shown("tokens", human),
        cell(row["name"], kind="text"),
        cell(f"{row['config']}{phases}", kind="text"),
    )


def commands(summary: dict) -> Markup:
    """Returns the table of what each command of a script took, and their sum; nothing if it is not known."""
    rows = summary.get("commands") or ()
    if not rows:
        return Markup("")
    head, *cells = command_cells(rows)
    return join([table(head, cells, "Commands"), tag("p", _COMMANDS_TIME, class_="dim")])


def command_cells(rows: Sequence[dict]) -> list[tuple[str, ...]]:
    """Returns the cells of that table: its head, a row for each command, their sum."""
    wall_s, usd = (sum(row[key] for row in rows) for key in ("wall_s", "cost_usd"))
    whole = {"name": "all", "wall_s": wall_s, "cost_usd": usd}
    cells = [(row["name"], duration(row["wall_s"]), spent(row["cost_usd"])) for row in (*rows, whole)]
    return [row if usd else row[:2] for row in [("command", "time", "cost"), *cells]]


def samples(summary: dict) -> Markup:
    """Returns the section of a summary of `report.run`; nothing if no earlier stage has samples."""
    own = {"name": summary["run"].get("name", ""), "samples": summary.get("samples") or {}}
    runs = [*(summary.get("before") or ()), own]
    stages = [(run["name"], texts) for run in runs if (texts := _latest(run.get("samples") or {}))]
    if len(stages) < 2 or not own["samples"]:
        return Markup("")
    rows = [_row(*stage) for stage in stages]
    parts = [*_persisting(stages), table(("run", "step", "texts", "clean"), rows, "Clean texts")]
    for i, prompt in enumerate(own["samples"]):
        beside = [_text(name, line) for name, texts in stages for line in texts.get(prompt, ())]
        parts.append(details(tag("code", prompt), tag("div", *beside, class_="beside"), opened=not i))
    return join(parts)


def _latest(texts: Texts) -> Texts:
    """The continuations of each prompt at the last step that has any."""
    last = max((line["step"] for lines in texts.values() for line in lines), default=0)
    at_last = {prompt: [line for line in lines if line["step"] == last] for prompt, lines in texts.items()}
    return {prompt: lines for prompt, lines in at_last.items() if lines}


def _persisting(stages: Sequence[tuple[str, Texts]]) -> list[Markup]:
    """A line for each kind of known junk in the first stage's texts and still in the last one's."""
    (first, before), (last, after) = stages[0], stages[-1]
    was, still = ({label for line in _lines(texts) for label in _labels(line["text"])} for texts in (before, after))
    lines = [f"{first} wrote “{label}”, and {last} still does. {_CANT}" for label in sorted(was & still)]
    return [tag("p", line) for line in lines]


def _lines(texts: Texts) -> list[dict]:
    return [line for lines in texts.values() for line in lines]


def _labels(text: str) -> list[str]:
    """The labels of the known junk in a text (`corpus.audit_patterns`), sorted."""
    sure = [group for group in GROUPS.values() if group.severity >= _SURE]
    labels = {group.label_of(match) for group in sure for match in group.matches(text)}
    return sorted(labels | ({"U+FFFD"} if "\ufffd" in text else set()))


def _row(name: str, texts: Texts) -> tuple[str, str, str, str]:
    lines = _lines(texts)
    clean = sum(_verdict(line) == "clean" for line in lines)
    return name, count(lines[0]["step"]), count(len(lines)), f"{clean} of {len(lines)}"


def _verdict(line: dict) -> str:
    """Says "clean", or why the text of a line of a file of samples is not: known junk, a loop, much repeated."""
    loop, repeated, labels = line.get("degenerates_at"), line.get("repetition"), _labels(line["text"])
    faults = [f"junk: {', '.join(labels)}"] if labels else []
    faults += [f"loops after {count(loop)} words"] if isinstance(loop, int) else []
    if not faults and isinstance(repeated, int | float) and repeated >= _MUCH:
        faults = [f"{repeated:.0%} repeated"]
    return "; ".join(faults) or "clean"


def _text(name: str, line: dict) -> Markup:
    temperature = line.get("temperature")
    way = "" if temperature is None else f", temperature {temperature:g}" if temperature else ", greedy"
    about = tag("p", f"{name}, step {count(line['step'])}{way}", class_="dim")
    text = tag("pre", line["text"].rstrip() or "(white space alone)")
    return tag("div", about, tag("p", _verdict(line), class_="dim small"), text)
