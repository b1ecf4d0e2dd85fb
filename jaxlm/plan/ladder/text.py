"""Writes the text of `jaxlm ladder` and `jaxlm plan --budget`: planned runs, their results, the best models."""

import shlex
from collections.abc import Mapping, Sequence

from jaxlm.data.batches.document_rows import MOST_PASSES
from jaxlm.host.console import dollars, hours, human, table
from jaxlm.plan.ladder.law import LEVEL, WIDE
from jaxlm.plan.text import WIDTH, block, wrapped

Ladder = Mapping  # as `plan.ladder` describes it


def runs(ladder: Ladder) -> str:
    """Returns the table of runs, with their hours, and their losses if they are done."""
    rows = [["run", "parameters", "tokens", "steps", "rows", "rate", "time", "loss"]]
    for run in ladder["runs"]:
        took, loss = (run["hours"], _loss(run)) if run["loss"] else (run["planned_hours"], run["why"][:20])
        size = [run["name"], human(run["parameters"]), human(run["tokens"]), str(run["steps"]), str(run["batch_size"])]
        rows.append([*size, f"{run['lr']:.3g}", hours(took) if took else "?", loss])
    target, planned, limit = ladder["target"], ladder["hours"]["planned"], ladder["hours"]["limit"]
    shown = f"about {hours(planned)} on {ladder['machine']}" if planned else "for an unknown time"
    shown += f", of {hours(limit)} at most" if limit else ""
    done = sum(bool(run["loss"]) for run in ladder["runs"])
    shown += f"; {done} of them are done" if done else ""
    head = f"{len(ladder['runs'])} runs, {shown}, foretell {target['config']}: {_size(target)}"
    return f"{head}\n{table(rows, right=range(1, 8))}"


def found(ladder: Ladder) -> str:
    planned = ladder["hours"]["planned"]
    took = f"HOURS  {hours(ladder['hours']['spent'])} so far" + (f", {hours(planned)} were planned" if planned else "")
    parts = {"runs": _grid, "rates": _rates, "fit": _law, "foretold": _foretold}
    return "\n\n".join([*(part(ladder) for key, part in parts.items() if ladder.get(key)), took])


def _loss(run: Mapping) -> str:
    return f"{run['loss']:.4f}" if run["loss"] else "-"


def _size(row: Mapping) -> str:
    return f"{human(row['parameters'])} parameters, {human(row['tokens'])} tokens"


def _grid(ladder: Ladder) -> str:
    rows = [["LOSS held out", *(human(budget) for budget in ladder["budgets"])]]
    for width in ladder["sizes"]:
        own = [run for run in ladder["runs"] if (run["kind"], run["d_model"]) == ("grid", width)]
        own.sort(key=lambda run: run["tokens"])
        layers = f"{own[0]['n_layers']} layer{'s' * (own[0]['n_layers'] > 1)}"
        rows.append([f"  {human(own[0]['parameters'])} (d {width}, {layers})", *map(_loss, own)])
    return table(rows, right=range(1, len(rows[0])))


def _rates(ladder: Ladder) -> str:
    """Returns the results of the runs at several rates."""
    rates = ladder["rates"]
    tried = ", ".join(f"{run['lr']:.3g}: {_loss(run)}" for run in rates["tried"])
    where = f"{rates['best'] / rates['lr']:.2g} times the config's own"
    where = "the end of the tried rates: the best may lie beyond" if rates["edge"] else where
    return block(
        f"RATE  {tried}. The config's own, scaled to the smallest run, is {rates['lr']:.3g}, the published rule's "
        f"{rates['rule']:.3g}; best is about {rates['best']:.2g}, {where}. It is one seed: half a percent means nothing."
    )


def _law(ladder: Ladder) -> str:
    fit, law = ladder["fit"], ladder["fit"]["law"]
    return block(
        f"LAW  L = {law['e']:.3g} + {law['a']:.3g} / N^{law['alpha']:.3g} + {law['b']:.3g} / D^{law['beta']:.3g}; runs scatter "
        f"around it by {fit['noise']:.1%}. The largest size, predicted from the others, is off by {abs(fit['missed']):.1%}."
    )


def _foretold(ladder: Ladder) -> str:
    rows = [[f"FORETOLD {ladder['target']['config']}", "loss", f"{LEVEL:.0%} interval"]]
    for row in ladder["foretold"]:
        rows.append([f"  {_size(row)}", f"{row['loss']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"])
    text = table(rows, right=(1,))
    whole = ladder["foretold"][2]
    if whole["high"] - whole["low"] > WIDE * whole["loss"]:
        text += "\n" + block(
            "The interval is wide and decides little: more hours (--hours) or larger models (--sizes) narrow it."
        )
    return text


def budget(choice: dict, config: str, overrides: Sequence[str] = ()) -> str:
    """Returns the result of `budget.plan` as text. `config` and `overrides` are those of the command line."""
    rows = choice["accelerators"]
    best = rows[0]
    head = ["ACCELERATORS", "devices", "parameters", "tokens", "a step", "tokens/s", "time", "loss", "interval", "MFU"]
    typed = dict(override.split("=", 1) for override in overrides if not override.startswith("plan."))
    keys = typed | best["overrides"]
    replaced = [key for key in typed if str(typed[key]) != str(keys[key])]
    lines = [
        f"BUDGET  {dollars(choice['budget_usd'])}: the best model on each accelerator, best first",
        "",
        table([head, *map(_cells, rows)], right=range(1, 8)),
        "",
        block(f"BEST  {_sentence(best)}"),
        _command(["jaxlm", "train", config, *(f"--config.{key}={value}" for key, value in keys.items())]),
    ]
    return "\n".join([*lines, "", "NOTES", *map(wrapped, _notes(choice, config, replaced))])


def _cells(row: dict) -> list[str]:
    loss, span = ("-", "-") if row["loss"] is None else (f"{row['loss']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}")
    sizes = [human(row[key]) for key in ("parameters", "tokens", "batch_tokens", "tokens_per_second")]
    origin = "known" if row["mfu_from"] else "assumed"
    return [row["name"], str(row["devices"]), *sizes, hours(row["hours"]), loss, span, origin]


def _sentence(row: dict) -> str:
    matrices = f" ({row['matrix_lr']:g} for the layers' matrices)" if row["matrix_lr"] != row["lr"] else ""
    text = f"{row['name']}: {human(row['parameters'])} parameters on {human(row['tokens'])} tokens, {row['steps']:,} steps; "
    text += f"by rule a rate of {row['lr']:g}{matrices} and b2 {row['b2']:g}"
    if row["epochs"]:
        text += "; times through the data: " + ", ".join(f"{name} {times:.2g}" for name, times in row["epochs"].items())
        if max(row["epochs"].values()) > MOST_PASSES:
            text += " (beyond about four times a repeated token teaches less than a new one: arXiv:2305.16264)"
    return text


def _command(words: Sequence[str]) -> str:
    """Returns the command for a shell, in lines of at most WIDTH columns where its words allow it."""
    lines = [" "]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def _notes(choice: dict, config: str, replaced: Sequence[str]) -> list[str]:
    law = (
        f"By the law of the runs in {choice['ladder']}: losses are held-out ones on their data, with their tokenizer and "
        "recipe, in 80% intervals. Far beyond those runs they are guesses."
        if choice["ladder"]
        else f"No ladder (jaxlm ladder): sizes are chosen by {choice['law']}. Its loss is that of its own data, tokenizer and "
        "recipe: it ranks sizes and accelerators, but does not forecast your loss. Interval: that of jaxlm "
        "plan, which spans two laws."
    )
    best = choice["accelerators"][0]
    notes = [
        law,
        f"The models have the proportions of {config}. The speed is planned (docs/planning.md): links between devices, the "
        "optimizer's own time, samples and benchmarks are not counted; the start, evaluation and checkpoints are.",
        f"Prices of {choice['prices_as_of']}, on demand, from no live offer: put yours into a copy and give it as "
        "config.plan.prices.",
    ]
    if any(key.startswith("phases.") for key in best["overrides"]):
        notes.append(
            "Each phase has its share of the steps, and of the money by its hours: the limits add up to the budget. A run "
            "that is slower than planned stops at a limit (exit code 3, state saved); raise it and stop.usd to go on."
        )
    if replaced:
        notes.append(f"The budget chooses what you gave too: {', '.join(replaced)}.")
    if not best["epochs"]:
        notes.append("No data at hand: --config.data.dir=DATA tells how often the run would read it.")
    return notes
