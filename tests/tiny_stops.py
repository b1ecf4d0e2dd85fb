"""Pairs of signals that ask a run to stop: those that mean one request, and those that ask to stop at once."""

import dataclasses
import random
import signal

INT, TERM, HUP, NOTICE = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, "notice"  # a cloud's, which becomes a SIGTERM
SAME = 1.0  # seconds within which a second SIGTERM is the first one
# (first, second, seconds between them, True if the second asks to stop at once)
KINDS = [
    *((first, HUP, (0.05, 3.0), False) for first in (INT, TERM, HUP, NOTICE)),
    *((first, INT, (0.05, 3.0), True) for first in (INT, TERM, HUP, NOTICE)),
    *((first, TERM, (0.05, 3.0), False) for first in (INT, HUP, NOTICE)),
    *((first, NOTICE, (0.05, 3.0), False) for first in (INT, TERM, HUP)),
    (TERM, TERM, (0.05, 0.9), False),
    (TERM, TERM, (1.2, 3.0), True),
]


@dataclasses.dataclass
class Pair:
    """Two signals, so many seconds apart; `ends`: the second one asks to stop at once."""

    first: object
    second: object
    apart: float
    ends: bool


def pairs(number: int, draw: random.Random) -> list[Pair]:
    """Returns this many pairs, of as many kinds as there can be, each with a time drawn."""
    kinds = [kind for _ in range(-(-number // len(KINDS))) for kind in draw.sample(KINDS, len(KINDS))][:number]
    return [Pair(first, second, draw.uniform(*apart), ends) for first, second, apart, ends in kinds]
