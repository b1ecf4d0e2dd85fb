"""Learning rates by schedule, and the loss that the Multi-Power Law gives for them."""

import numpy as np


def schedule(kind: str, end: int, warmup: int, peak: float = 3e-4):
    """Warm-up, then one of the shapes of `optim.schedule`; wsd decays over the last tenth."""

    def rate(steps):
        rest = np.clip((steps - warmup) / (end - warmup), 0, 1)
        shape = {
            "constant": np.ones_like(rest),
            "cosine": 0.55 + 0.45 * np.cos(np.pi * rest),
            "linear": 1 - 0.9 * rest,
            "wsd": np.minimum(1, (end - steps) / (0.1 * end)),
        }[kind]
        return peak * np.where(steps < warmup, steps / warmup, np.maximum(shape, 0))

    return rate


def law(rate, steps, warmup, l0=2.5, a=0.6, b=0.13, alpha=0.45, beta=0.59, gamma=0.64, c=0.11):
    """The Multi-Power Law as the paper writes it, term by term, for the rates as shares of the peak."""
    every = rate(np.arange(1, steps[-1] + 1)) / rate(np.array([warmup]))
    total = np.append(0, np.cumsum(every))
    losses = l0 + a * (total[steps] / (1 / 3e-4)) ** -alpha
    for k in range(warmup + 1, steps[-1] + 1):
        fall, now = every[k - 2] - every[k - 1], every[k - 1]
        later = steps >= k
        if fall and now > 0:
            since = total[steps[later]] - total[k - 1]
            losses[later] -= b * fall * (1 - (1 + c * now**-gamma * since) ** -beta)
    return losses
