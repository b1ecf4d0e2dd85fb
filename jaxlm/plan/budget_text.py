"""Writes the text of `jaxlm plan --budget`."""

import shlex
import typing
from collections.abc import Sequence

from jaxlm.console import hours, human, spent, table
from jaxlm.data import passes
from jaxlm.plan.text import WIDTH, wrapped


def render(found: dict[str, typing.Any], config: str, overrides: Sequence[str] = ()) -> str:
    """Returns what `budget.plan` found as text.

    Args:
      config: the config whose proportions the models have, as the command line names it.
      overrides: those of the command line, KEY=VALUE: the command that trains the model needs them too.
    """
    rows = found["accelerators"]
    head = ["ACCELERATORS", "devices", "parameters", "tokens", "a step", "tokens/s", "time", "loss", "interval", "MFU"]
    cells = [head, *(_cells(row) for row in rows)]
    best = rows[0]
    lines = [f"BUDGET  {spent(found['budget_usd'])}: the best model on each accelerator, best first", ""]
    lines += [table(cells, right=range(1, 8)), ""]
    lines.append(wrapped(f"BEST  {_sentence(best)}", indent=""))
    typed = dict(override.split("=", 1) for override in overrides if not override.startswith("plan."))
    keys = typed | best["overrides"]
    replaced = [key for key in typed if str(typed[key]) != str(keys[key])]
    lines.append(_command(["jaxlm", "train", config, *(f"--config.{key}={value}" for key, value in keys.items())]))
    lines += ["", "NOTES", *map(wrapped, _notes(found, config, replaced))]
    return "\n".join(lines)


def _cells(row: dict) -> list[str]:
    loss, span = ("-", "-") if row["loss"] is None else (f"{row['loss']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}")
    cells = [row["name"], str(row["devices"]), human(row["parameters"]), human(row["tokens"])]
    cells += [human(row["batch_tokens"]), human(row["tokens_per_second"]), hours(row["hours"]), loss, span]
    return [*cells, "known" if row["mfu_from"] else "assumed"]


def _sentence(row: dict) -> str:
    text = f"{row['name']}: {human(row['parameters'])} parameters on {human(row['tokens'])} tokens, {row['steps']:,} steps; "
    matrices = f" ({row['matrix_lr']:g} for the layers' matrices)" if row["matrix_lr"] != row["lr"] else ""
    text += f"by rule a rate of {row['lr']:g}{matrices} and b2 {row['b2']:g}"
    return text + (f"; {_epochs(row['epochs'])}" if row["epochs"] else "")


def _epochs(epochs: dict[str, float]) -> str:
    text = "times through the data: " + ", ".join(f"{name} {times:.2g}" for name, times in epochs.items())
    many = max(epochs.values()) > passes.MOST
    return text + (" (beyond about four times a token teaches less than a new one: arXiv:2305.16264)" if many else "")


def _command(words: Sequence[str]) -> str:
    """The command for a shell, in lines of at most WIDTH columns where its words allow it."""
    lines = [" "]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def _notes(found: dict, config: str, replaced: Sequence[str]) -> list[str]:
    ladder = (
        f"By the law of the runs in {found['ladder']}: losses are held-out ones on their data, with their tokenizer and "
        "recipe, in 80% intervals. Far beyond those runs they are guesses."
    )
    published = (
        f"No ladder (jaxlm ladder): sizes are chosen by {found['law']}. Its loss is that of its own data, tokenizer and "
        "recipe: it ranks sizes and accelerators, and is no forecast of a loss that you will measure. Interval: that of jaxlm "
        "plan, which spans two laws."
    )
    best = found["accelerators"][0]
    notes = [
        ladder if found["ladder"] else published,
        f"The models have the proportions of {config}. The speed is planned (docs/planning.md): links between devices, the "
        "optimizer's own time, samples and benchmarks are not counted; the start, evaluation and checkpoints are.",
        f"Prices of {found['prices_as_of']}, on demand, from no live offer: put yours into a copy and give it as "
        "config.plan.prices.",
    ]
    if any(key.startswith("phases.") for key in best["overrides"]):
        notes.append(
            "Each phase has its share of the steps, and of the money by what it takes: their limits add up to it. A run "
            "that is slower than planned stops at one (exit code 3, state saved); raise it and stop.usd to go on."
        )
    if replaced:
        notes.append(f"The budget chooses what you gave too: {', '.join(replaced)}.")
    if not best["epochs"]:
        notes.append("No data at hand: --config.data.dir=DATA tells how often the run would read it.")
    return notes
