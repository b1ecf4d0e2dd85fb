"""The runs before a run, itself, and commands around them: what each took, and wrote after the same prompts, clean or not."""

from collections.abc import Mapping, Sequence

from jaxlm.console import count, duration, human, spent
from jaxlm.corpus.audit_patterns import GROUPS
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
    rows = summary.get("stages") or ()
    if not rows:
        return Markup("")
    paid = any(row["cost_usd"] for row in rows)
    head = ("stage", "what it changed", "time", *(["cost"] if paid else []), "steps", "tokens", "run", "config")
    cells = [_stage(row, paid) for row in rows]
    runs = [row for row in rows if row["program"] != "prepare"]
    total = {name: sum(row[name] or 0 for row in runs) for name in ("tokens", "wall_s", "cost_usd")}
    sums = (duration(total["wall_s"]), *([spent(total["cost_usd"])] if paid else []), "", human(total["tokens"]))
    parts = [table(head, [*cells, ("all", "", *sums, "", "")], "Stages")]
    for row in rows:
        if row["program"] == "prepare":
            parts.append(tag("p", _DATA_INSIDE if row["wall_s"] is None else _DATA_TIME, class_="dim"))
        if row.get("held_out"):
            parts.append(tag("p", f"{row['name']}: {row['held_out']}.", class_="dim"))
    return join(parts)


def commands(summary: dict) -> Markup:
    """Returns the table of what each command of a script took, and their sum; nothing if it is not known."""
    rows = summary.get("commands") or ()
    if not rows:
        return Markup("")
    head, *cells = command_cells(rows)
    return join([table(head, cells, "Commands"), tag("p", _COMMANDS_TIME, class_="dim")])


def command_cells(rows: Sequence[dict]) -> list[tuple[str, ...]]:
    """Returns the cells of that table: its head, a row for each command, their sum."""
    paid = any(row["cost_usd"] for row in rows)
    total = {"name": "all", **{key: sum(row[key] for row in rows) for key in ("wall_s", "cost_usd")}}
    cells = [(r["name"], duration(r["wall_s"]), *([spent(r["cost_usd"])] if paid else [])) for r in (*rows, total)]
    return [("command", "time", *(["cost"] if paid else [])), *cells]


def _stage(row: dict, paid: bool) -> tuple[object, ...]:
    """The cells of a stage."""
    phases = f" in phases: {', '.join(row['phases'])}" if row["phases"] else ""
    known = {name: row[name] is not None for name in ("steps", "tokens", "wall_s", "cost_usd")}
    return (
        _TITLES.get(row["program"], row["program"]),
        cell(_change(row), kind="text"),
        duration(row["wall_s"]) if known["wall_s"] else "",
        *([spent(row["cost_usd"]) if known["cost_usd"] else ""] if paid else []),
        count(row["steps"]) if known["steps"] else "",
        human(row["tokens"]) if known["tokens"] else "",
        cell(row["name"], kind="text"),
        cell(f"{row['config']}{phases}", kind="text"),
    )


def _change(row: dict) -> str:
    """The figure that a stage is about: "held-out loss 8.321 → 5.118"."""
    ends = [row[name] for name in ("begin", "end") if row[name] is not None]
    shown = [count(value) if isinstance(value, int) else f"{value:.3f}" for value in ends]
    return f"{row['figure']} {' → '.join(shown)}" if ends else ""


def samples(summary: dict) -> Markup:
    """Returns the section of a summary of `report.run`; nothing if no earlier stage has samples."""
    own = {"name": summary["run"].get("name", ""), "samples": summary.get("samples") or {}}
    stages = [
        stage | {"samples": _latest(stage.get("samples") or {})} for stage in (*(summary.get("before") or ()), own)
    ]
    stages = [stage for stage in stages if stage["samples"]]
    if len(stages) < 2 or stages[-1]["name"] != own["name"]:
        return Markup("")
    parts = [tag("p", line) for line in persisting(stages)]
    parts.append(table(("run", "step", "texts", "clean"), [_row(stage) for stage in stages], "Clean texts"))
    for prompt in own["samples"]:
        beside = [_text(stage["name"], one) for stage in stages for one in stage["samples"].get(prompt, ())]
        parts.append(
            details(
                tag("code", prompt), tag("div", *beside, class_="beside"), opened=prompt == next(iter(own["samples"]))
            )
        )
    return join(parts)


def persisting(stages: Sequence[dict]) -> list[str]:
    """Returns a line for each kind of known junk in the first stage's texts and still in the last one's.

    Args:
      stages: each with `name` and `samples`, first to last.
    """
    first, last = ({label for one in _all(stage) for label in labels(one["text"])} for stage in (stages[0], stages[-1]))
    return [
        f"{stages[0]['name']} wrote “{label}”, and {stages[-1]['name']} still does. {_CANT}"
        for label in sorted(first & last)
    ]


def verdict(one: dict) -> str:
    """Returns "clean", or why a text is not: known junk, a loop, much repeated. `one` is a line of a file of samples."""
    loop, repeated = one.get("degenerates_at"), one.get("repetition")
    found = [f"junk: {', '.join(labels(one['text']))}"] if labels(one["text"]) else []
    found += [f"loops after {count(loop)} words"] if isinstance(loop, int) else []
    if not found and isinstance(repeated, int | float) and repeated >= _MUCH:
        found = [f"{repeated:.0%} repeated"]
    return "; ".join(found) or "clean"


def labels(text: str) -> list[str]:
    """Returns the labels of the known junk in a text (`corpus.audit_patterns`), sorted."""
    sure = [group for group in GROUPS.values() if group.severity >= _SURE]
    return sorted(
        {group.label_of(match) for group in sure for match in group.matches(text)}
        | ({"U+FFFD"} if "\ufffd" in text else set())
    )


def _latest(texts: Texts) -> dict[str, list[dict]]:
    """The continuations of each prompt at the last step that has any."""
    last = max((one["step"] for lines in texts.values() for one in lines), default=0)
    return {prompt: kept for prompt, lines in texts.items() if (kept := [one for one in lines if one["step"] == last])}


def _all(stage: dict) -> list[dict]:
    return [one for lines in stage["samples"].values() for one in lines]


def _row(stage: dict) -> tuple[str, str, str, str]:
    lines = _all(stage)
    clean = sum(verdict(one) == "clean" for one in lines)
    return stage["name"], count(lines[0]["step"]), count(len(lines)), f"{clean} of {len(lines)}"


def _text(name: str, one: dict) -> Markup:
    temperature = one.get("temperature")
    way = "" if temperature is None else f", temperature {temperature:g}" if temperature else ", greedy"
    about = tag("p", f"{name}, step {count(one['step'])}{way}", class_="dim")
    text = tag("pre", one["text"].rstrip() or "(white space alone)")
    return tag("div", about, tag("p", verdict(one), class_="dim small"), text)
