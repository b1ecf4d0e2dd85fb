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
import typing
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.plan import forecast
from jaxlm.run import lineage

LEVEL = {True: 0.04, False: 0.01}  # shares of curves without a bend on which one counts: at an event; elsewhere
WIDTHS = (0.0, 0.05, 0.2, 1.0)  # of a ramp, as shares of the run; 0: a step
MOST, SMALLEST = 6, forecast.CENTINAT  # bends; nats
_SKIPPED, _APART = 0.05, 0.04  # shares of the run: its steep beginning; the least distance of two bends
_MEANS, _FEWEST, _EDGE = 128, 20, 5  # means at most; losses at least, in all and on each side of a bend
_AS_GOOD = 4.0  # by how much an event's squared standard errors may be below those of the best place
# Variances, as multiples of the noise's: of the spline; of lasting noise, with its length as a share of the run.
_SMOOTH, _LASTING = 10.0 ** np.arange(-1, 11, 1.5), [(0.0, 1.0), *itertools.product((0.3, 3.0), (0.02, 0.1))]
_POWERS = (0.01, 0.5, 1.0)
_DRAWS, _OUTLIER = 2000, 5.0  # a loss is cut off that many robust deviations from the median of five
_TURNS = {(1, 0): "the warm-up ended", (1, -1): "the warm-up ended", (0, -1): "the decay of the rate began"}
Event = tuple[int, str]  # the first step that it may have changed, in words


def find(steps: np.ndarray, losses: np.ndarray, events: Sequence[Event]) -> list[dict[str, typing.Any]]:
    """Returns the bends of a curve, rows of step, change (nats), over (steps; 0: at once), events (in words), by step."""
    use = np.isfinite(losses) & (steps >= _SKIPPED * np.max(steps, initial=0))
    s, y = steps[use].astype(float), losses[use]
    if len(s) < _FEWEST:
        return []
    middle = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="reflect"), 5), 1)
    y = middle + np.clip(y - middle, *(np.array([-1, 1]) * _OUTLIER * 1.4826 * np.median(np.abs(y - middle))))
    # An event may show one logged step later: a rate changes the loss of the next step, and it may turn between two.
    shows = [(step, s[min(np.searchsorted(s, step, "right"), len(s) - 1)]) for step, _ in events]
    own, parts = sorted(set(itertools.chain(*shows))), np.array_split(np.arange(len(s)), min(len(s), _MEANS))
    at_C = np.repeat(own + [s[part[0]] for part in parts], len(WIDTHS))
    over_C, own_C = np.resize(WIDTHS, at_C.size) * s[-1], np.arange(at_C.size) < len(own) * len(WIDTHS)
    shapes = np.clip((s[:, None] - at_C + 1) / np.maximum(over_C, 1), 0, 1)
    open_C = (shapes[-1] >= 0.25) & (np.minimum(before := np.searchsorted(s, at_C), len(s) - before) >= _EDGE)
    open_C &= own_C | (over_C <= WIDTHS[1] * s[-1])  # a slow turn without an event is the curve's own
    shapes /= shapes[-1].clip(0.25)  # so that a change is the one up to the last step
    y_N, s_N, *shapes = np.stack([np.column_stack([y, s, shapes])[part].mean(0) for part in parts], 1)
    shapes_NxC, free_NxP, bends = np.stack(shapes, 1), np.empty((len(parts), 0)), []
    while len(bends) < MOST:
        rest_N, rest_NxC = _whiten(y_N, s_N, free_NxP, shapes_NxC)
        lengths_C = np.linalg.norm(rest_NxC, axis=0)  # 1 / standard error in nats
        unit_NxC = np.where(open_C & (lengths_C > 1), rest_NxC / np.maximum(lengths_C, 1), 0)
        change_C = rest_N @ unit_NxC / np.maximum(lengths_C, 1)
        errors_C = np.abs(change_C) * lengths_C * (np.abs(change_C) > SMALLEST)
        drawn = np.abs(np.random.default_rng(0).standard_normal((_DRAWS, len(s_N))) @ unit_NxC)
        least, least_own = (np.quantile(drawn[:, own_C == k].max(1, initial=1), 1 - LEVEL[k]) for k in (False, True))
        if not np.any(errors_C > np.where(own_C, least_own, least)):
            break
        named_C = own_C & (errors_C**2 > (errors_C**2).max() - _AS_GOOD)
        best = np.argmax(errors_C * (named_C if named_C.any() else 1))
        here = [event for event, places in zip(events, shows, strict=True) if np.isin(places, at_C[named_C]).any()]
        step, over = min([int(at_C[best]), *(step for step, _ in here)]), int(min(over_C[best], s[-1] - at_C[best]))
        words = [*dict.fromkeys(words for _, words in here)]
        bends.append({"step": step, "change": float(change_C[best]), "over": over, "events": words})
        same = np.unique(shapes_NxC[:, (at_C == at_C[best]) & (own_C == own_C[best])], axis=1)
        free_NxP, apart = np.column_stack([free_NxP, same]), _APART * s[-1]
        open_C &= (at_C < step - apart) | (at_C > step + apart + np.where(own_C, 0, over))
    return sorted(bends, key=lambda bend: bend["step"])


def _whiten(y_N: np.ndarray, s_N: np.ndarray, free_NxP: np.ndarray, shapes_NxC: np.ndarray) -> tuple[np.ndarray, ...]:
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
            likely = (along.shape[1] - len(x)) * np.log(noise) - np.log(np.diag(root)).sum() - 2 * (lasting > 0)
            likely += np.log(np.abs(sizes_P / np.diag(upper))).sum()
            best = max(best, (likely, noise * root, along), key=lambda fit: fit[0])
    whites = (np.linalg.solve(best[1], columns) for columns in (y_N, shapes_NxC))
    return tuple(white - best[2] @ (best[2].T @ white) for white in whites)


def of_run(folder: pathlib.Path, summary: Mapping, final: Sequence[Event]) -> list[dict[str, typing.Any]]:
    """Returns the bends of a run: rows of `find`, with `explained`, the part of the change by the rate, and `why` in words.

    `summary`: as `outlook.gather` returns it. `final`: the event that the final mixture began, if it did.
    """
    config, curves = lineage.config_of(folder), summary["curves"]
    points = np.array([curves["step"], curves["loss"], curves["lr"]], float).T
    if summary["figures"] or not points.size:  # it is trained for something else than the loss
        return []
    events = [(row["step"] + 1, "; ".join(row["changed"]) or "nothing changed") for row in summary["starts"][1:]]
    events = [*final, *((step, f"a restart: {changed}") for step, changed in events)]
    events += [(row["last_step"] + 1, f"phase {row['phase']} was over") for row in summary["phases"]]
    events += [
        (row["steps"][0], "a rollback, past batches {} to {}".format(*row["batches"])) for row in summary["rollbacks"]
    ]
    events += [(row["step"], f"a spike at batch {row['batch']}") for row in summary["spikes"]]
    for trunk, _ in lineage.origins(folder)[-1:] * bool(config and config.origin_state):
        rows = [(r["step"], r.get("train/loss"), r.get("train/lr")) for r in lineage.records(trunk)]
        events.append((int(points[0, 0]), f"the branch of {trunk.name} began"))
        points = np.array([*(row for row in rows if row[0] < points[0, 0]), *points], float)
    bends = find(*points.T[:2], [*_turns(*points.T[::2]), *events])
    for bend in bends:
        bend["explained"] = explained = _explained(bend, *points.T)
        why = bend["events"] or ["no event of the run is there", *_seeds(folder, summary["run"], bend["change"])]
        why += [f"the forecast's law expects {explained:+.3f} of the rate"] if abs(explained or 0) > SMALLEST else []
        bend["why"] = "; ".join(why)
    return bends


def _turns(steps: np.ndarray, rates: np.ndarray) -> Iterator[Event]:
    """Yields where the logged learning rate jumps, by a twentieth of its peak, or its slope changes by half a peak a run."""
    s, r = steps[np.isfinite(rates)], rates[np.isfinite(rates)]
    slopes = np.diff(r) / np.diff(s) * steps[-1] / max(r.max(initial=0), 1e-30)
    steep, turned = np.abs(np.pad(slopes, 1)), False
    jumps = (np.abs(slopes) * np.diff(s) > 0.05 * steps[-1]) & (steep[1:-1] > 5 * np.maximum(steep[:-2], steep[2:]))
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
    before, known = int(steps[np.searchsorted(steps, bend["step"]) - 1]), np.isfinite(rates)
    after = min(bend["step"] + max(bend["over"], round(WIDTHS[1] * steps[-1])), int(steps[-1]))
    with contextlib.suppress(ValueError, ArithmeticError):
        fitted = forecast.fit(
            steps, losses, lambda s: np.interp(s, [0, *steps[known]], [0, *rates[known]]), before, before
        )
        if isinstance(fitted, forecast.Forecast):
            held = fitted.gain(after, lambda s: fitted.rate(np.full(len(s), before)))
            return float(held[0] - fitted.gain(after)[0])
    return None


def _seeds(folder: pathlib.Path, run: Mapping, change: float) -> Iterator[str]:
    """Yields a line on how the seeds of each sweep of such runs scatter."""
    from jaxlm.plan.sweep import sweep  # here, because its import takes a sixth of a start

    for place in (folder.resolve().parents[1], *sorted(folder.glob(f"{sweep.FOLDER}/*"))):
        with contextlib.suppress(ConfigError, TypeError, KeyError):  # no sweep, a damaged one, one without a result
            found = sweep.read(place)
            scatter = float(np.median(found["result"]["scatters"]))
            if (found["shape"]["parameters"], found["shape"]["steps"]) == (run["params"], run["steps"]):
                inside = "within" if abs(change) <= 2 * scatter else "beyond"
                yield f"{inside} the noise of seeds, {scatter:.3f} in sweep {place.name}"
