"""Finds where a run's training curve bends, and names what the run did there.

The curve is taken for the sum of a smooth one (a cubic smoothing spline in log steps), noise, and noise that lasts for some
steps; restricted likelihood chooses their sizes. A bend is a step of the curve, or a ramp over a share of the run. It counts
if it has more standard errors than any has on 1 - LEVEL of curves without one, which are drawn from the fit. The errors are
those of generalised least squares, so a smooth curve's own turns and lasting noise are in them (auxiliary residuals: Harvey
and Koopman 1992). There are fewer events than places, so a smaller bend counts at an event than elsewhere.

Shapes: N means of losses, P columns that the curve is free to follow, C candidates.
"""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxlm.plan import forecast

LEVEL = {True: 0.04, False: 0.01}  # shares of curves without a bend on which one counts: at an event; elsewhere
WIDTHS = (0.0, 0.05, 0.2, 1.0)  # of a ramp, as shares of the run; 0: a step
MOST, SMALLEST, _AS_GOOD = 6, forecast.CENTINAT, 4.0  # bends; nats; squared standard errors that an event may lack
_SKIPPED, _APART = 0.05, 0.04  # shares of the run: its steep beginning; the least distance of two bends
_LEAST_NOISE = 1e-6  # nats: losses may be all equal, and logs are rounded
_MEANS, _FEWEST, _EDGE = 128, 20, 5  # means at most; losses at least, in all and on each side of a bend
# Variances, as multiples of the noise's: of the spline; of lasting noise, with its length as a share of the run.
_SMOOTH, _LASTING = 10.0 ** np.arange(-1, 11, 1.5), [(0.0, 1.0), *itertools.product((0.3, 3.0), (0.02, 0.1))]
_POWERS, _DRAWS = (0.01, 0.5, 1.0), 2000  # of the steps, in which the spline is as smooth everywhere; 0.01: logarithms
_TURNS = {(1, 0): "the warm-up ended", (1, -1): "the warm-up ended", (0, -1): "the decay of the rate began"}


def find(steps: np.ndarray, losses: np.ndarray, events: Sequence[tuple[int, str]]) -> list[dict]:
    """Returns the bends of a curve, rows of step, change (nats), over (steps; 0: at once), events (in words), by step.

    `events`: (the first step that each may have changed, words).
    """
    s, y = (column[steps >= _SKIPPED * np.max(steps, initial=0)].astype(float) for column in (steps, losses))
    if len(s) < _FEWEST:
        return []
    # A loss is cut off five robust deviations from the median of five.
    middle = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="reflect"), 5), 1)
    y = middle + np.clip(y - middle, *(np.array([-7.4, 7.4]) * np.median(np.abs(y - middle))))
    # An event may show one logged step later: a rate changes the loss of the next step, and it may turn between two.
    shows = [(step, s[min(np.searchsorted(s, step, "right"), len(s) - 1)]) for step, _ in events]
    own, parts = sorted(set(itertools.chain(*shows))), np.array_split(np.arange(len(s)), min(len(s), _MEANS))
    at_C, own_C = np.array([*own, *(s[part[0]] for part in parts)]), np.arange(len(own) + len(parts)) < len(own)
    # A slow turn without an event is the curve's own.
    over_CxW = np.where(own_C[:, None], WIDTHS, WIDTHS[:2] * 2) * s[-1]
    shapes = np.clip((s[:, None, None] - at_C[:, None] + 1) / np.maximum(over_CxW, 1), 0, 1)
    shapes *= np.minimum(before := np.searchsorted(s, at_C), len(s) - before)[:, None] >= _EDGE
    shapes /= np.where(shapes[-1] < 0.25, np.inf, shapes[-1])  # so that a change is the one up to the last step
    y_N, s_N, shapes_NxCxW = (np.stack([column[part].mean(0) for part in parts]) for column in (y, s, shapes))
    normal, free_NxP, bends = np.random.default_rng(0).standard_normal((_DRAWS, len(y_N))), np.empty((len(y_N), 0)), []
    while len(bends) < MOST:
        rest_N, rest_CxNxW = _whiten(y_N, s_N, free_NxP, shapes_NxCxW)
        base_CxNxW, upper = np.linalg.qr(rest_CxNxW)
        base_CxNxW *= np.abs(np.diagonal(upper, 0, 1, 2))[:, None] > 1  # known to a nat
        lengths_CxW = np.maximum(np.linalg.norm(rest_CxNxW, axis=1), 1)  # 1 / standard error in nats
        change_CxW = rest_N @ rest_CxNxW / lengths_CxW**2
        best_C = np.abs(change_CxW * lengths_CxW).argmax(1)
        change_C, over_C = (np.take_along_axis(x, best_C[:, None], 1)[:, 0] for x in (change_CxW, over_CxW))
        errors_C = ((rest_N @ base_CxNxW) ** 2).sum(-1) * (np.abs(change_C) > SMALLEST)
        drawn = ((normal @ base_CxNxW) ** 2).sum(-1)
        least, least_own = (np.quantile(drawn[own_C == k].max(0, initial=1), 1 - LEVEL[k]) for k in (False, True))
        if not np.any(errors_C > np.where(own_C, least_own, least)):
            break
        # An event is beforehand as likely as all other places together, and what is nearly as likely is named with it.
        likely_C = errors_C + own_C * 2 * np.log(len(parts))
        best = likely_C.argmax()
        named_C = own_C & (likely_C > likely_C[best] - _AS_GOOD)
        here = [event for event, places in zip(events, shows, strict=True) if np.isin(places, at_C[named_C]).any()]
        step, over = min([int(at_C[best]), *(step for step, _ in here)]), int(min(over_C[best], s[-1] - at_C[best]))
        why = [*dict.fromkeys(words for _, words in here)]
        bends.append({"step": step, "change": float(change_C[best]), "over": over, "events": why})
        same, apart = np.unique(shapes_NxCxW[:, best], axis=1), _APART * s[-1]
        free_NxP = np.column_stack([free_NxP, same[:, same.any(0)]])
        shapes_NxCxW *= ((at_C < step - apart) | (at_C > step + apart + np.where(own_C, 0, over)))[:, None]
    return sorted(bends, key=lambda bend: bend["step"])


def _whiten(y_N: np.ndarray, s_N: np.ndarray, free_NxP: np.ndarray, shapes_NxCxW: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns losses and shapes without what `free` explains, in units in which the likeliest noise is white and of size 1."""
    best, lag = (-np.inf, None, None), np.abs(s_N[:, None] - s_N) / s_N[-1]
    for power in _POWERS:
        x = (1 - (s_N / s_N[0]) ** -power) / (1 - (s_N[-1] / s_N[0]) ** -power)
        first, gap = np.minimum(x[:, None], x), np.abs(x[:, None] - x)
        spline, columns_NxP = first**2 * (first / 3 + gap / 2), np.column_stack([np.ones_like(x), x, free_NxP, y_N])
        sizes_P = np.diag(np.linalg.qr(columns_NxP[:, :-1])[1])
        for smooth, (lasting, length) in itertools.product(_SMOOTH, _LASTING):
            root = np.linalg.cholesky(np.eye(len(x)) + smooth * spline + lasting * np.exp(-lag / length))
            white = np.linalg.solve(root, columns_NxP)
            along, upper = np.linalg.qr(white[:, :-1])
            noise = np.linalg.norm(white[:, -1] - along @ (along.T @ white[:, -1])) / np.sqrt(len(x) - along.shape[1])
            noise = max(noise, _LEAST_NOISE)
            likely = (along.shape[1] - len(x)) * np.log(noise) - np.log(np.diag(root)).sum() - 2 * (lasting > 0)
            likely += np.log(np.abs(sizes_P / np.diag(upper))).sum()
            best = max(best, (likely, noise * root, along), key=lambda fit: fit[0])
    rest = np.linalg.solve(best[1], np.column_stack([y_N, shapes_NxCxW.reshape(len(x), -1)]))
    rest -= best[2] @ (best[2].T @ rest)
    return rest[:, 0], np.moveaxis(rest[:, 1:].reshape(shapes_NxCxW.shape), 0, 1)


def of_run(folder: pathlib.Path, summary: Mapping, final: Sequence[tuple[int, str]]) -> list[dict]:
    """Returns the bends of a run: rows of `find`, with `explained`, the part of the change by the rate, and `why` in words.

    `summary`: as `outlook.gather` returns it. `final`: the event that the final mixture began, if it did.
    """
    points = np.array([summary["curves"][name] for name in ("step", "loss", "lr")], float).T
    if summary["figures"] or not points.size:  # it is trained for something else than the loss
        return []
    events = [
        (r["step"] + 1, f"a restart: {'; '.join(r['changed']) or 'nothing changed'}") for r in summary["starts"][1:]
    ]
    events += [(r["last_step"] + 1, f"phase {r['phase']} was over") for r in summary["phases"]]
    events += [(r["steps"][0], "a rollback, past batches {} to {}".format(*r["batches"])) for r in summary["rollbacks"]]
    events += [(r["step"], f"a spike at batch {r['batch']}") for r in summary["spikes"]]
    columns = points[np.isfinite(points).all(1)].T
    bends = find(*columns[:2], [*_turns(*columns[::2]), *final, *events])
    for bend in bends:
        bend["explained"] = explained = _explained(bend, *columns)
        why = list(bend["events"]) or ["no event of the run is there", *_seeds(folder, summary["run"], bend["change"])]
        why += [f"the forecast's law expects {explained:+.3f} of the rate"] if abs(explained or 0) > SMALLEST else []
        bend["why"] = "; ".join(why)
    return bends


def _turns(s: np.ndarray, r: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yields where the logged learning rate jumps, by a twentieth of its peak, or its slope changes by half a peak a run."""
    slopes = np.diff(r) / np.diff(s) * s.max(initial=0) / max(r.max(initial=0), 1e-30)
    steep, turned = np.abs(np.pad(slopes, 1)), False
    jumps = (np.abs(slopes) * np.diff(s) > 0.05 * s.max(initial=0)) & (
        steep[1:-1] > 5 * np.maximum(steep[:-2], steep[2:])
    )
    for i in range(1, len(slopes)):
        before, turned = turned, not jumps[i - 1] and abs(slopes[i] - slopes[i - 1]) > 0.5
        if jumps[i]:
            yield int(s[i + 1]), f"the rate went from {r[i]:.3g} to {r[i + 1]:.3g}"
        elif turned and not before:
            ends = slopes[i - 1], slopes[i : i + 2][-1]  # the next slope, as it may turn between two logged steps
            signs = tuple(0 if abs(slope) < 0.1 else int(np.sign(slope)) for slope in ends)
            yield int(s[i]) + 1, _TURNS.get(signs, "the slope of the rate changed")


def _explained(bend: Mapping, steps: np.ndarray, losses: np.ndarray, rates: np.ndarray) -> float | None:
    """Returns how the law, fitted before the bend, changes the loss by the rates after it, in nats; None if it is too early."""
    before = int(steps[np.searchsorted(steps, bend["step"]) - 1])
    after = min(bend["step"] + max(bend["over"], round(WIDTHS[1] * steps[-1])), int(steps[-1]))
    with contextlib.suppress(ValueError, ArithmeticError):
        fitted = forecast.fit(steps, losses, forecast.logged(steps, rates), before, before)
        if isinstance(fitted, forecast.Forecast):
            held = fitted.gain(after, lambda s: fitted.rate(np.full(len(s), before)))
            return float(held[0] - fitted.gain(after)[0])


def _seeds(folder: pathlib.Path, run: Mapping, change: float) -> Iterator[str]:
    """Yields a line on how the seeds of each sweep of such runs scatter."""
    from jaxlm.plan.sweep import sweep  # here, because its import takes a sixth of a start

    for place in (folder.resolve().parent.parent, *sorted(folder.glob(f"{sweep.FOLDER}/*"))):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no sweep, a damaged one, one without a result
            near = sweep.read(place)
            scatter = float(np.median(near["result"]["scatters"]))
            if (near["shape"]["parameters"], near["shape"]["steps"]) == (run["params"], run["steps"]):
                yield f"{'within' if abs(change) <= 2 * scatter else 'beyond'} the noise of seeds, {scatter:.3f} ({place.name})"
