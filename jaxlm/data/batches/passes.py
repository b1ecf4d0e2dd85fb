"""Computes how many times a run goes through each source of its data."""

import fractions
from collections.abc import Mapping

from jaxlm.data.batches.rows import Rows
from jaxlm.data.shards.mixture import drawn_mixture, rounding

# Times through a source beyond which a token teaches less than a new one (Muennighoff et al. 2023, arXiv:2305.16264).
MOST = 4


def passes(order: Rows, steps: int) -> dict[str, float]:
    """Returns source -> how many times a run of `steps` steps goes through it. Raises ConfigError if a mixture is wrong."""
    tokens, final = order.data.token_counts(), order.final
    last = order.switch()
    stretches = [(order.mixture, steps if last is None else min(steps, last))]
    stretches += [(final.mixture, steps - stretches[0][1])] if final else []
    times: dict[str, float] = {}
    for mixture, length in stretches:
        trained = length * order.batch_size * order.seq_len
        for name, share in drawn_mixture(mixture, list(tokens)).items():
            if tokens[name]:
                times[name] = times.get(name, 0.0) + trained * float(share) / tokens[name]
    return times


def words(order: Rows, steps: int) -> str:
    """Returns both mixtures of a run of `steps` steps for the user; "" if it has one.

    "web 0.9, math 0.1 to step 800, then web 0.6, math 0.4"
    """
    if order.final is None:
        return ""
    names, last = list(order.data.token_counts()), order.switch()
    first, final = (drawn_mixture(mixture, names) for mixture in (order.mixture, order.final.mixture))
    beyond = f" (this run ends at step {steps:,})" if last >= steps else ""
    return f"{_shares(first)} to step {last:,}, then {_shares(final)}{beyond}"


def rounded(order: Rows) -> list[str]:
    """Returns a line for each mixture of a run that draws a source with a share more than 1% off its weight."""
    names, mixtures = list(order.data.token_counts()), [order.mixture, *([order.final.mixture] if order.final else [])]
    return [line for line in (rounding(mixture, names) for mixture in mixtures) if line]


def _shares(shares: Mapping[str, fractions.Fraction]) -> str:
    return ", ".join(f"{name} {float(share):.3g}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
