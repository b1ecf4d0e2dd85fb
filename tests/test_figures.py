"""The tables of docs/faq.md and docs/memory.md say what `plan` says now. A table that is out of date is printed anew."""

import dataclasses
import functools
import pathlib
import re

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.host.console import dollars, gigabytes, hours, human
from jaxlm.models import hardware
from jaxlm.plan import accelerators, fit, summary
from jaxlm.plan.flops import count_params

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


@functools.cache
def planned(name: str, *overrides: str) -> config.Config:
    """A shipped config as `plan` takes it, on a GPU."""
    found = config.resolve(config_files.load(name, list(overrides)))
    return dataclasses.replace(found, model=hardware.for_platform(found.model, "gpu"))


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head line begins with `head`, and its head first."""
    lines = re.search(rf"^\| {re.escape(head)} .*\n\|-.*\n((?:\|.*\n)+)", (DOCS / page).read_text(), re.M)
    return [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines() if "---" not in line
    ]


def check(table: list[list[str]], found: list[list[str]]) -> None:
    assert table[1:] == found, "it should be\n" + "\n".join(f"| {' | '.join(row)} |" for row in found)


@pytest.mark.engines
def test_hours_and_dollars_are_those_of_plan():
    table = rows("faq.md", "config")
    found = []
    for name in (row[0].strip("`") for row in table[1:]):
        c = planned(name)
        row = [f"`{name}`", human(count_params(c.model)), human(c.train.steps * c.train.batch_size * c.train.seq_len)]
        for card in table[0][3:]:
            (one,) = summary.summarise(planned(name, f"plan.accelerator={card}"))["accelerators"]
            devices = f"{one['devices']} x " if (one["devices"] or 1) > 1 else ""
            row.append(f"{devices}{hours(one['hours'])}, {dollars(one['usd'])}")
        found.append(row)
    assert len(found) > 3
    check(table, found)


def cell(planner: fit.Planner, gb: float) -> str:
    """What makes a config fit into so much memory: as it is; (remat, microbatch, optimizer); or how many cards."""
    own = fit.own_microbatch(planner.config, fit.ONE_DEVICE)
    if planner.memory(fit.ONE_DEVICE, microbatch=own).total <= gb * 1e9:
        return "as it is"
    found = planner.remedy(fit.ONE_DEVICE, gb * 1e9)
    if not found:
        return f"{planner.fewest(gb * 1e9).devices} cards"
    changed = [f"microbatch {found.microbatch}"]
    changed += [f"remat {found.remat}"] * (found.remat != planner.config.model.remat)
    changed += [found.optimizer] * (found.optimizer != planner.config.optim.name)
    return ", ".join(changed)


@pytest.mark.engines
@pytest.mark.parametrize("gb", [[11, 22, 37, 75]])
def test_what_fits_where_is_what_plan_says(gb):
    table = rows("memory.md", "config")
    assert [int(re.search(r"\((\d+)\)", title)[1]) for title in table[0][2:]] == gb
    found = []
    for name in (row[0].strip("`") for row in table[1:]):
        planner = fit.Planner(planned(name))
        own = planner.memory(fit.ONE_DEVICE, microbatch=fit.own_microbatch(planner.config, fit.ONE_DEVICE))
        found.append([f"`{name}`", gigabytes(own.total, 1), *(cell(planner, limit) for limit in gb)])
    assert len(found) > 3
    check(table, found)


@pytest.mark.engines
def test_what_fine_tuning_takes_is_what_plan_says():
    table = rows("memory.md", "fine-tuning")
    cards = accelerators.load().accelerators
    found = []
    for name in dict.fromkeys(row[0].split("`")[1] for row in table[1:]):
        c = planned(name, "program=sft", "train.seq_len=2048", "model.scan_layers=False")
        compared = fit.by_method(c, cards)
        for remat in ("none", "full"):
            cells = [gigabytes(row["bytes"][remat], 1) for row in compared]
            found.append([f"`{name}`, remat {remat}", *cells])
    assert len(found) == 6
    check(table, found)
