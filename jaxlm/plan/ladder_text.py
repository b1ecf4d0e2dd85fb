"""Writes what `jaxlm ladder` says: the runs before they are done, and what they found."""

import textwrap
import typing
from collections.abc import Mapping, Sequence

from jaxlm.console import hours, human, table
from jaxlm.plan.ladder_fit import LEVEL, WIDE

Ladder = Mapping[str, typing.Any]  # as `plan.ladder` describes it


def runs(ladder: Ladder) -> str:
    """Returns the table of runs, with what they take; those that are done with their losses."""
    rows = [["run", "parameters", "tokens", "steps", "rows", "rate", "time", "loss"]]
    for run in ladder["runs"]:
        took = run["hours"] if run["loss"] else run["planned_hours"]
        size = [run["name"], human(run["parameters"]), human(run["tokens"]), str(run["steps"]), str(run["batch_size"])]
        rows.append(
            [*size, f"{run['lr']:.3g}", hours(took) if took else "?", _loss(run) if run["loss"] else run["why"][:20]]
        )
    target, planned, limit = ladder["target"], ladder["hours"]["planned"], ladder["hours"]["limit"]
    shown = f"about {hours(planned)} on {ladder['machine']}" if planned else "for an unknown time"
    shown += f", of {hours(limit)} at most" if limit else ""
    done = sum(bool(run["loss"]) for run in ladder["runs"])
    shown += f"; {done} of them are done" if done else ""
    head = f"{len(ladder['runs'])} runs, {shown}, foretell {target['config']}: {_size(target['parameters'], target['tokens'])}"
    return f"{head}\n{table(rows, right=range(1, 8))}"


def found(ladder: Ladder) -> str:
    """Returns what the ladder found: losses by size and budget, the rate, the law, what it foretells, hours."""
    parts = [_grid(ladder), _rates(ladder["rates"]) if ladder["rates"] else "", _hours(ladder)]
    if ladder["fit"]:
        parts[2:2] = [_law(ladder["fit"]), _foretold(ladder)]
    return "\n\n".join(part for part in parts if part)


def _loss(run: Mapping[str, typing.Any]) -> str:
    return f"{run['loss']:.4f}" if run["loss"] else "-"


def _size(parameters: float, tokens: float) -> str:
    return f"{human(parameters)} parameters, {human(tokens)} tokens"


def _grid(ladder: Ladder) -> str:
    grid = [run for run in ladder["runs"] if run["kind"] == "grid"]
    rows = [["LOSS held out", *(human(budget) for budget in ladder["budgets"])]]
    for width in ladder["sizes"]:
        own = sorted((run for run in grid if run["d_model"] == width), key=lambda run: run["tokens"])
        layers = f"{own[0]['n_layers']} layer{'s' * (own[0]['n_layers'] > 1)}"
        rows.append([f"  {human(own[0]['parameters'])} (d {width}, {layers})", *map(_loss, own)])
    return table(rows, right=range(1, len(rows[0])))


def _rates(rates: Mapping[str, typing.Any]) -> str:
    tried = ", ".join(f"{one['lr']:.3g}: {_loss(one)}" for one in rates["tried"])
    where = (
        "the end of what was tried: the best may lie beyond"
        if rates["edge"]
        else f"{rates['best'] / rates['lr']:.2g} times the config's own"
    )
    text = (
        f"RATE  {tried}. The config's own, scaled to the smallest run, is {rates['lr']:.3g}, the published rule's "
        f"{rates['rule']:.3g}; best is about {rates['best']:.2g}, {where}. It is one seed: half a percent says nothing."
    )
    return _wrapped(text)


def _law(fit: Mapping[str, typing.Any]) -> str:
    law = fit["law"]
    text = (
        f"LAW  L = {law['e']:.3g} + {law['a']:.3g} / N^{law['alpha']:.3g} + {law['b']:.3g} / D^{law['beta']:.3g}; runs scatter "
        f"around it by {fit['noise']:.1%}. The largest size, foretold from the others, is off by {abs(fit['missed']):.1%}."
    )
    return _wrapped(text)


def _foretold(ladder: Ladder) -> str:
    rows = [[f"FORETOLD {ladder['target']['config']}", "loss", f"{LEVEL:.0%} interval"]]
    for row in ladder["foretold"]:
        size = f"  {_size(row['parameters'], row['tokens'])}"
        rows.append([size, f"{row['loss']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"])
    text = table(rows, right=(1,))
    if is_wide(ladder["foretold"]):
        wide = "The interval is wide and decides little: more hours (--hours) or larger models (--sizes) narrow it."
        text += f"\n{_wrapped(wide)}"
    return text


def is_wide(foretold: Sequence[Mapping[str, typing.Any]]) -> bool:
    """True if the target's own interval is wider than WIDE of its loss."""
    row = foretold[2]
    return row["high"] - row["low"] > WIDE * row["loss"]


def _hours(ladder: Ladder) -> str:
    spent, planned = ladder["hours"]["spent"], ladder["hours"]["planned"]
    return f"HOURS  {hours(spent)} so far" + (f", {hours(planned)} were planned" if planned else "")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  ")
