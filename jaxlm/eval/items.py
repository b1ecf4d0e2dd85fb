"""Which questions of a benchmark are asked, and the mean of what they score."""

from collections.abc import Sequence

import numpy as np

from jaxlm.data.rows import permute
from jaxlm.eval.results import Item


def spread(size: int, items: int) -> list[int]:
    """Returns which of `size` questions to ask: `items` of them, drawn from all; all if `items` is 0.

    They are always the same, and those of fewer are among those of more.
    """
    return sorted(permute(np.arange(items), size, "items").tolist()) if 0 < items < size else list(range(size))


def shares(sizes: dict[str, int], items: int) -> dict[str, int]:
    """Returns name -> how many questions of each task to ask: of a group `items` in all, in proportion; all if 0."""
    total, found, before = sum(sizes.values()), {}, 0
    for name, size in sizes.items():
        after = before + size
        found[name] = after * items // total - before * items // total if 0 < items < total else size
        before = after
    return found


def means(items: Sequence[Item]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (metric -> its mean, metric -> the mean's standard error), of the metrics that all items have.

    Ten wrong answers do not show that all are: a share of 0 or 1 has the standard error of one with two right and two wrong
    answers more (Agresti and Coull 1998).
    """
    metrics, stderr = {}, {}
    for name in items[0].metrics if items else ():
        if all(name in item.metrics for item in items):
            values = np.asarray([item.metrics[name] for item in items], float)
            metrics[name] = float(values.mean())
            if np.all(values == 0) or np.all(values == 1):
                values = np.append(values, (0, 0, 1, 1))
            if len(values) > 1:
                stderr[name] = float(values.std(ddof=1) / len(values) ** 0.5)
    return metrics, stderr
