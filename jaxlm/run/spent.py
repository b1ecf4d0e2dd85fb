"""Carries a run's time and dollars over from earlier starts, and finds when this start began.

Every second since the run first began is paid at the price of the start in which it passed, and never priced again.
"""

import dataclasses
import datetime
import os
import pathlib
import time

from jaxlm.host import files
from jaxlm.run import ledger, metrics, supervised
from jaxlm.run.clock import ACTIVITIES, DOWN, HUNG, START, STEP, Clock


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A run's time and cost until this start began, including the gap since a previous start on the same machine died."""

    wall_s: float = 0.0
    cost_usd: float = 0.0

    def with_now(self, wall_s: float, usd_per_hour: float) -> float:
        return self.cost_usd + (wall_s - self.wall_s) / 3600 * usd_per_hour


def begun() -> float:
    since = supervised.since()
    return process_began() if since is None else since


def process_began() -> float:
    """Returns the `time.monotonic()` at which this process started (Linux; elsewhere, now)."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # since the machine booted; see proc(5), starttime
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0) if ticks else now


def opening(record: dict, usd_per_hour: float, refused: bool = False) -> dict:
    """Returns the first record of a start: `record` and the start's machine and price. See `carry_on`.

    If the start dies before run.json lists it, the next start reads the machine and the price from this record.
    `refused`: it is also the last record, since the start ends with exit code 2 before its first step.
    """
    return record | {metrics.START: ledger.machine() | {"usd_per_hour": usd_per_hour, "refused": refused}}


def carry_on(folder: pathlib.Path, clock: Clock) -> Earlier:
    """Adds the seconds of earlier starts to the clock, sets its `redo` to their last step, and returns their time and cost.

    If the previous start ran on this machine, which has not been rebooted since, the time from its last record until now was
    paid for too, at its price. That time counts as HUNG for the seconds that the supervisor reports, else as DOWN. It does not
    count if that start did all its steps, or was refused before its first step.

    Reads metrics.jsonl and run.json, so only the first process calls this. If a record has no activities, its time is STEP.
    """
    highest, last = 0, None
    for record in metrics.records(folder / "metrics.jsonl"):
        highest = max(highest, record["step"])
        if all(files.is_number(record.get(key)) and record[key] >= 0 for key in ("wall_s", "cost_usd")):
            last = record
    clock.redo = highest
    if last is None:
        return Earlier()
    spent, before = _activities(last), _before(last, ledger.read(folder)["starts"])
    for name, seconds in spent.items():
        clock.add(name, seconds)
    gap = _gap(clock, last, before)
    hung = min(supervised.lost(), gap)
    clock.add(HUNG, hung)
    clock.add(DOWN, gap - hung)
    price = before.get("usd_per_hour")
    dollars = gap / 3600 * price if files.is_number(price) else 0.0
    return Earlier(sum(spent.values()) + gap, last["cost_usd"] + dollars)


def _before(last: dict, starts: list[dict]) -> dict:
    """Returns the previous start from run.json, or from its `opening` if it died before any other record; {} if none."""
    start = starts[-1] if starts else {}
    opened = last.get(metrics.START)
    if not isinstance(opened, dict):
        return start
    price = {"hardware": opened, "usd_per_hour": opened.get("usd_per_hour")}
    refused = {"step": 0, "ended": {"code": 2, "step": 0}}
    return price | (refused if opened.get("refused") else {"ended": start.get("ended")})


def _activities(record: dict) -> dict[str, float]:
    spent = {name: record.get(f"time/{name}_s", 0.0) for name in ACTIVITIES}
    if f"time/{STEP}_s" in record and all(files.is_number(seconds) and seconds >= 0 for seconds in spent.values()):
        return spent
    return dict.fromkeys(ACTIVITIES, 0.0) | {STEP: record["wall_s"]}


def _gap(clock: Clock, last: dict, start: dict) -> float:
    """Returns the seconds from the previous start's last sign until this process began; 0 if they were not paid for."""
    hardware, here = start.get("hardware"), ledger.machine()
    if not here["boot_id"] or not isinstance(hardware, dict) or any(hardware.get(key) != here[key] for key in here):
        return 0.0
    signs = [t for t in (last.get("time"), _seconds(start.get("time"))) if files.is_number(t)]
    if not signs:
        return 0.0
    # A supervisor counts a start from before its process was up. That time belongs to the gap, not to the clock's START.
    unix = time.time() - time.monotonic()  # of monotonic time 0
    then, began = max(signs), unix + clock.began
    up = max(then, began, min(unix + process_began(), time.time()))
    clock.add(START, began - up)
    return 0.0 if _not_the_run_s(start) else up - then


def _not_the_run_s(start: dict) -> bool:
    """True if the run does not pay for the time after a start: it did all its steps, or was refused before its first step."""
    ended = start.get("ended")
    if not isinstance(ended, dict):
        return False
    return ended.get("code") == 0 or (ended.get("code") == 2 and ended.get("step", 0) <= start.get("step", -1))


def _seconds(iso: object) -> float | None:
    try:
        return datetime.datetime.fromisoformat(iso).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
