"""Computes the first and last steps of a run's phases. Imports no JAX."""

import dataclasses

from jaxlm.config import ConfigError, PhaseConfig, PhasesConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Phase:
    """The steps `first` to `last` of a run; `config` has the budget and the gate."""

    name: str
    first: int
    last: int
    config: PhaseConfig


def planned(config: PhasesConfig, train: TrainConfig) -> tuple[Phase, ...]:
    """Returns the phases in the order in which they end. A phase that ends after `train.steps` is never closed.

    Raises ConfigError if two phases end at the same step.
    """
    a_step = train.batch_size * train.seq_len
    ends = sorted((phase.steps or -(-phase.tokens // a_step), name) for name, phase in config.plan.items())
    phases, first = [], 1
    for last, name in ends:
        if last < first:
            raise ConfigError(f"phases.plan: {phases[-1].name} and {name} both end at step {last}; remove one of them")
        phases.append(Phase(name, first, last, config.plan[name]))
        first = last + 1
    return tuple(phases)
