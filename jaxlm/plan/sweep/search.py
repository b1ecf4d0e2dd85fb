"""Chooses the values of a search's runs by Optuna's TPE, and which runs its median pruner stops. Needs the extra `search`.

Optuna's study is made anew for each question, from the sweep and its runs' metrics.jsonl: there is no other state.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from jaxlm.run import metrics

Space = Mapping[str, Sequence]  # key -> values; a tuple: the two ends of a range
Sweep = Mapping  # as `plan.sweep` describes it: arms without values are not begun
_ASKS = 20  # before the first combination that is left is taken
optuna.logging.set_verbosity(optuna.logging.WARNING)


def ask(space: Space, sweep: Sweep, folder: pathlib.Path) -> dict[str, str]:
    """Returns key -> value for the next run, values that no run has. A range above 0 is searched by its logarithm."""
    study = _study(space, sweep, folder)
    for digits in range(4, 4 + _ASKS):  # what is asked again is liked less, and of a number has more digits
        params = study.ask(_distributions(space)).params
        values = {key: f"{value:.{digits}g}" if isinstance(value, float) else value for key, value in params.items()}
        if values not in sweep["arms"]:
            return values
    combinations = (dict(zip(space, map(str, values), strict=True)) for values in itertools.product(*space.values()))
    return next(values for values in combinations if values not in sweep["arms"])


def pruned(space: Space, sweep: Sweep, folder: pathlib.Path, arm: int) -> bool:
    """True if the best metric of the arm's run so far is worse than the median of the other runs after as many steps."""
    study = _study(space, sweep, folder)
    return study.pruner.prune(study, study.trials[arm])


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    ranges = {key: FloatDistribution(*ends, log=ends[0] > 0) for key, ends in space.items() if isinstance(ends, tuple)}
    return {key: ranges.get(key) or CategoricalDistribution(values) for key, values in space.items()}


def _study(space: Space, sweep: Sweep, folder: pathlib.Path) -> optuna.Study:
    """Returns the study of all runs that are begun: trial i is arm i."""
    begun = [run for run in sweep["runs"] if sweep["arms"][run["arm"]]]
    # A seed of its own for each question, so that a search that goes on asks what an uninterrupted one asks. Hashed: the
    # questions are independent, and no other search's.
    (seed,) = np.random.SeedSequence([sweep["runs"][0]["seed"], len(begun)]).generate_state(1)
    sampler = optuna.samplers.TPESampler(seed=int(seed), constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if sweep["same"]["highest"] else "minimize")
    for run in begun:
        state = "COMPLETE" if run["loss"] is not None else "PRUNED" if run["why"] else "RUNNING"
        path = folder / "runs" / run["name"] / "metrics.jsonl"
        curve = metrics.held_out_losses(path, (), sweep["same"]["metric"])
        trial = {"value": run["loss"], "intermediate_values": curve}
        trial |= {"distributions": _distributions(space), "state": optuna.trial.TrialState[state]}
        arm = sweep["arms"][run["arm"]]  # without the digits that `ask` leaves out
        params = {
            key: float(np.clip(float(arm[key]), *v)) if isinstance(v, tuple) else arm[key] for key, v in space.items()
        }
        study.add_trial(optuna.trial.create_trial(params=params, **trial))
    return study
