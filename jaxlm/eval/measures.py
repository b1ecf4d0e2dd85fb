"""Measures that see differences where accuracy does not: bits per byte of the right answer, and its margin.

At 10^20 FLOPs a benchmark's accuracy hardly leaves chance, while what the model gives the right answer improves all the time
(Heineman et al. 2025, "Signal and Noise", arXiv:2508.13144: a metric such as perplexity has more signal for its noise than
accuracy). It is -log2 p(answer | question) over the answer's UTF-8 bytes, as they are scored.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxlm.eval.results import Item, TaskResult
from jaxlm.report import published
from jaxlm.report.published import BITS, MARGIN


def of_choices(logp: Sequence[float], sizes: Sequence[int], gold: int | Sequence[int]) -> dict[str, float]:
    """Returns `bits_per_byte` of the right answer, and its `margin`: by how much that is below the best wrong one's.

    Of several right answers `bits_per_byte` is the mean, and the margin that of the best. Without wrong answers there is
    no margin; without a right one, or one of no length, there is nothing.

    Args:
      logp: log p of each choice after the question, in nats.
      sizes: the UTF-8 bytes of each choice.
      gold: the index of the right choice; several if several are right.
    """
    right = [gold] if isinstance(gold, int) else list(gold)
    if not right or not all(0 <= choice < len(logp) for choice in right) or min(sizes, default=0) < 1:
        return {}
    bits = [-nats / math.log(2) / size for nats, size in zip(logp, sizes, strict=True)]
    found = {BITS: sum(bits[choice] for choice in right) / len(right)}
    if wrong := [value for choice, value in enumerate(bits) if choice not in right]:
        found[MARGIN] = min(wrong) - min(bits[choice] for choice in right)
    return found


def measured(result: TaskResult) -> TaskResult:
    """Returns a task's result in which the items that have choices have these measures, and the task their means."""
    items = [_with_measures(item) for item in result.items]
    metrics, stderr = dict(result.metrics), dict(result.stderr)
    for name in (BITS, MARGIN):
        values = [item.metrics[name] for item in items if math.isfinite(item.metrics.get(name, math.nan))]
        if values and len(values) == len(items):
            metrics[name] = sum(values) / len(values)
            if len(values) > 1:
                stderr[name] = standard_error(values)
    return dataclasses.replace(result, items=items, metrics=metrics, stderr=stderr)


def _with_measures(item: Item) -> Item:
    detail = item.detail
    if not all(key in detail for key in ("logp", "bytes", "gold")):
        return item
    return dataclasses.replace(item, metrics=item.metrics | of_choices(detail["logp"], detail["bytes"], detail["gold"]))


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of at least two values."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def alarm(result: TaskResult, flops: float) -> str:
    """Returns a line if a score is so low that the evaluation is more likely wrong than the model; see `published.alarm`."""
    return published.alarm(result.task, result.metrics, result.stderr, result.chance, flops, len(result.items))
