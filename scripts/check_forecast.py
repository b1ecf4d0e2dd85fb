"""Prints the errors of the forecasts of `jaxlm/plan/forecast.py` on runs whose whole curves are known.

    python scripts/check_forecast.py --curves=DIR                      # a CSV per run, with the columns step, lr and loss
    python scripts/check_forecast.py --curves=DIR --prior B/A=0.33     # other means of the priors; other widths by --drift

Each run is forecast from its first 25, 40, 60 and 80% of the steps. Its end is the median of its last five losses. The forecast
knows the future learning rates, as a run does. The steps before the first row are taken as a linear warm-up.
The priors come from the curves of arXiv:2503.12811: github.com/thu-yao-01-luo/MultiPowerLaw.
"""

import argparse
import math
import pathlib
import sys

import numpy as np

from jaxlm.plan import forecast

SHARES = (0.25, 0.4, 0.6, 0.8)


def read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, forecast.Rate]:
    """Returns the steps and the losses of a curve, and its learning rates by step."""
    steps, rates, losses = np.loadtxt(path, delimiter=",", skiprows=1).T
    warmup = min(steps[0], 2160)  # the paper's

    def rate(at: np.ndarray) -> np.ndarray:
        return np.interp(at, [0, warmup, *steps], [0, rates[0], *rates])

    return steps.astype(int), losses, rate


def errors(path: pathlib.Path, share: float) -> tuple[float, float]:
    """Returns a forecast's error at the end of the run, and half its 80% interval; NaN if it is too early for a forecast."""
    steps, losses, rate = read(path)
    end = int(steps[-1])
    done = int(share * end)
    seen = steps <= done
    found = forecast.fit(steps[seen], losses[seen], rate, done, end)
    if isinstance(found, forecast.TooEarly):
        return math.nan, math.nan
    loss, low, high = found.at(end)
    return loss - float(np.median(losses[-5:])), (high - low) / 2


def _cell(error: float, half: float) -> str:
    if math.isnan(error):
        return f"{'too early':>18}"
    return f"{f'{error:+.4f} +-{half:.4f}':>17}" + (" " if abs(error) <= half else "!")


def _kind(path: pathlib.Path) -> str:
    return path.stem.split("_")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=pathlib.Path, required=True)
    parser.add_argument("--drift", type=float, default=forecast.DRIFT)
    parser.add_argument("--prior", nargs="*", default=[], metavar="NAME=MEAN")
    args = parser.parse_args()
    for name, mean in (one.split("=") for one in args.prior):
        forecast.PRIORS[name] = math.log(float(mean)), forecast.PRIORS[name][1]
    forecast.DRIFT = args.drift
    paths = sorted(args.curves.glob("*.csv"))
    print(f"{'nats':<24}" + "".join(f"{f'{share:.0%} done':>18}" for share in SHARES))
    table = np.array([[errors(path, share) for share in SHARES] for path in paths])
    for path, row in zip(paths, table, strict=True):
        print(f"{path.stem:<24}" + "".join(_cell(*pair) for pair in row))
    for name in ("", *sorted({_kind(path) for path in paths})):
        rows = table[[name in ("", _kind(path)) for path in paths]]
        off, half = np.abs(rows[..., 0]), rows[..., 1]
        held = [(o <= h)[o == o].mean() for o, h in zip(off.T, half.T, strict=True)]
        of = name or "all"
        whole = np.mean((off <= half)[off == off])
        print(f"{of + ': median error':<24}" + "".join(f"{v:>18.4f}" for v in np.nanmedian(off, 0)))
        print(f"{of + ': worst error':<24}" + "".join(f"{v:>18.4f}" for v in np.nanmax(off, 0)))
        print(f"{of + ': intervals hold':<24}" + "".join(f"{v:>18.0%}" for v in held) + f"{whole:>10.0%} of all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
