"""Which questions of a benchmark are asked, and the mean of what they score."""

from collections.abc import Sequence

import numpy as np

from jaxlm.eval.results import Item


def spread(size: int, items: int) -> list[int]:
    """Returns which of `size` questions to ask: `items` of them spread over all, always the same; all if `items` is 0."""
    return list(range(size)) if not 0 < items < size else [number * size // items for number in range(items)]


def shares(sizes: dict[str, int], items: int) -> dict[str, int]:
    """Returns name -> how many questions of each task to ask: of a group `items` in all, in proportion; all if 0."""
    total, found, before = sum(sizes.values()), {}, 0
    for name, size in sizes.items():
        after = before + size
        found[name] = after * items // total - before * items // total if 0 < items < total else size
        before = after
    return found


def means(items: Sequence[Item]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (metric -> its mean, metric -> the mean's standard error), of the metrics that all items have."""
    metrics, stderr = {}, {}
    for name in items[0].metrics if items else ():
        if all(name in item.metrics for item in items):
            values = np.asarray([item.metrics[name] for item in items], float)
            metrics[name] = float(values.mean())
            if len(values) > 1:
                stderr[name] = float(values.std(ddof=1) / len(values) ** 0.5)
    return metrics, stderr
