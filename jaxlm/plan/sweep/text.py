"""Writes the text of `jaxlm sweep`: its runs and their price, what it can tell apart, and what came of it."""

import math
import typing
from collections.abc import Mapping

from jaxlm.host.console import dollars, hours, human
from jaxlm.plan.sweep.noise import LEVEL, POWER

Sweep = Mapping[str, typing.Any]  # as `plan.sweep` describes it
Table = list[list[str]]  # the first row is the head


def runs(sweep: Sweep, left: float | None, usd_per_hour: float, at_once: int) -> str:
    """Returns a line on the runs, how many train at a time, and the hours that they still take (0: none; None: unknown)."""
    done = sum(run["loss"] is not None for run in sweep["runs"])
    takes = "an unknown time" if left is None else f"about {hours(left)}"
    takes += f", {dollars(left * usd_per_hour)}" if left and usd_per_hour else ""
    several = f" {at_once} at a time, on {sweep['threads']} of the machine's cores each;" if at_once > 1 else ""
    arms = "" if sweep["same"].get("search") else f" of {len(sweep['arms'])} arms"
    rest = f";{several} the others take {takes}" if left or left is None else ""
    return f"{len(sweep['runs'])} runs{arms}, {done} done{rest}"


def lines(sweep: Sweep) -> list[str]:
    """Returns sentences on the noise, on the smallest difference, and on arms without a result."""
    noise, borrowed, smallest, result = (sweep[key] for key in ("noise", "borrowed", "smallest", "result"))
    told, size = [], "one seed tells nothing apart, unless a finished sweep like this lies beside it: give --seeds=3"
    if sweep["same"].get("search"):
        size = "the best of a search is so in part by luck: a sweep of its values and the config's own tells them apart"
    if smallest:
        size = (
            f"the smallest difference that all seeds tell apart, in {POWER:.0%} of cases: {smallest['scatters']:.2g} "
        )
        size += f"times a run's scatter; half of it takes {smallest['seeds_for_half']} seeds"
    if df := noise["df"] + borrowed["df"]:
        scatter = math.sqrt((noise["squares"] + borrowed["squares"]) / df)
        of = f", {borrowed['df']} of them borrowed from {', '.join(borrowed['of'])}" * bool(borrowed["df"])
        told.append(
            f"noise: a run scatters by {_number(scatter)} beyond its arm and its seed ({df} degrees of freedom{of})"
        )
        size += f"; in numbers: {_number(smallest['scatters'] * scatter)}" if smallest else ""
    why = {_arm(sweep, run["arm"]): f"{run['name']}: {run['why']}" for run in sweep["runs"] if run["why"]}
    told += [size, *(f"left out: {name}: {words}" for name, words in why.items())]
    by = f"seeds that all arms have done: {result['seeds']}" if result and result["differences"] else ""
    return [*told, *filter(None, [by])]


def tables(sweep: Sweep) -> list[Table]:
    """Returns the table of arms and that of differences, which a search has not; [] before there is a result."""
    if not (result := sweep["result"]):
        return []
    arms = [["arm", f"mean {sweep['same']['metric']}", "scatter over seeds"]]
    for arm, mean, scatter in zip(*(result[key] for key in ("arms", "means", "scatters")), strict=True):
        arms.append([_arm(sweep, arm), f"{mean:.4f}", _number(scatter) if result["seeds"] > 1 else "unknown"])
    rows = [["change", "", "difference", f"{1 - LEVEL:.0%} interval, all together", "worth"]]
    for row in result["differences"]:
        change, half = row["difference"], row["half"]
        verdict = "better" if (change > 0) == sweep["same"]["highest"] else "worse"
        verdict = "can't be told apart" if half is None or abs(change) <= half else verdict
        span = "unknown" if half is None else f"{_number(change - half, '+')} to {_number(change + half, '+')}"
        name = f"{row['key']} {sweep['base'][row['key']]} -> {row['value']}"
        rows.append([name, verdict, _number(change, "+"), span, _worth(row.get("saves"))])
    return [arms, rows] if rows[1:] else [arms]


def _worth(saves: list[float] | None) -> str:
    """Returns a share of a run's tokens, the tokens and their dollars: "23%: 108k tokens, $0.12"."""
    if not saves:
        return ""
    share, tokens, usd = saves
    return f"{share:.0%}: {human(tokens)} tokens" + (f", {dollars(usd)}" if usd else "")


def _arm(sweep: Sweep, arm: int) -> str:
    return " ".join(f"{key}={value}" for key, value in sweep["arms"][arm].items())


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if abs(value) >= 0.001 or not value else f"{value:{sign}.2g}"
