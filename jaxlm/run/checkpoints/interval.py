"""Computes how often to save: often enough that a crash costs little, and seldom enough that saving costs little."""

import math

AUTO = -1.0  # the value of `checkpoint.every_minutes` that asks for the interval below
LEAST, MOST = 1.0, 120.0  # minutes
_STALL = 0.01  # at most this share of the time may be lost to the stall of the loop
_BESIDE = 0.02  # and this share may be spent on verifying, beside the training


def minutes(stall_s: float, verify_s: float, failures_per_day: float) -> float:
    """Returns the interval in minutes at which the least time is lost, to saving and to work that a failure undoes.

    It is Young's and Daly's sqrt(2 * stall * mean time between failures) (Young, CACM 17(9), 1974; Daly, FGCS 22(3),
    2006), from 1 to 120 minutes, and long enough that the stall stays under 1% and verifying under 2% of the time.

    Args:
      stall_s: the seconds for which a save holds the loop.
      verify_s: the seconds that verifying a checkpoint takes.
      failures_per_day: how often a machine of this kind is lost; 0 if never.
    """
    between_s = 86400 / failures_per_day if failures_per_day > 0 else math.inf
    best = min(MOST, math.sqrt(2 * stall_s * between_s) / 60) if stall_s > 0 else LEAST
    return max(LEAST, best, stall_s / _STALL / 60, verify_s / _BESIDE / 60)
