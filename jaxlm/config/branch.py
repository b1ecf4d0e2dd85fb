"""Makes the config of a branch: a run, in its own folder, that starts from a checkpoint of another run with its whole state.

Imports no JAX, because the supervisor calls it too.
"""

import argparse
import pathlib
from collections.abc import Sequence

from ml_collections import config_dict

from jaxlm.config import ConfigError, config_files
from jaxlm.host.files import is_step


def config(args: argparse.Namespace, overrides: Sequence[str]) -> config_dict.ConfigDict | None:
    """Returns the config of the branch that a command line asks for; None without --branch.

    Args:
      args: `branch`, `steps` and `checkpoint` of the command line, and in `config` the folder of the run.
      overrides: as in `decay`.
    """
    if not args.branch:
        if args.steps:
            raise ConfigError(f"--steps={args.steps} is for --branch=decay; did you mean --config.train.steps?")
        return None
    option, usage = f"--branch={args.branch}", "jaxlm train RUN --branch=decay --steps=N"
    return decay(config_files.run_named(args.config, option, usage), args.steps, args.checkpoint, overrides)


def decay(run: pathlib.Path, steps: int, checkpoint: str, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config of a run that continues from a checkpoint of `run` while the learning rate falls to 0.

    The branch keeps the order of batches, and the schedule up to the checkpoint's step. A final mixture (`data.final`)
    begins at that step, unless it began before. The branch's folder is `RUN-decay-STEP`, or the overrides' `workdir`.
    `run`, the trunk, is only read. Phases, stop limits and traces are not inherited; a mirror gets another name.

    Args:
      steps: the number of steps after the checkpoint.
      checkpoint: "latest" or a step.
      overrides: `KEY=VALUE`, as on the command line.

    Raises:
      ConfigError: the run has no such checkpoint, or the folder is the trunk's or another run's.
    """
    if steps < 1:
        raise ConfigError("--branch=decay needs --steps=N, the number of steps over which the learning rate falls to 0")
    if begins := config_files.from_run(run / "config.json").optim.decay_at_step:
        raise ConfigError(f"{run} decays already, from step {begins}: branch from the run before it")
    step = _step(run, checkpoint)
    config = begun(run, "decay", step)
    config.train.steps = step + steps
    config.optim.decay_at_step = step
    return finished(config, run, overrides)


def begun(run: pathlib.Path, name: str, step: int) -> config_dict.ConfigDict:
    """Returns the config of a branch from step `step` of `run`, 0 for new weights: as in `decay`, in `RUN-NAME-STEP`."""
    trunk, home = config_files.from_run(run / "config.json"), str(run.resolve())
    config = config_dict.ConfigDict(trunk.to_dict())
    config.workdir = f"{str(run).rstrip('/')}-{name}-{step}"
    if step:
        config.origin, config.origin_checkpoint, config.origin_state = home, str(step), True
    if not trunk.data.dir:
        config.data.dir = f"{home}/data"
    config.optim.schedule_steps = trunk.optim.schedule_steps or trunk.train.steps
    config.phases.plan, config.phases.accept = config_dict.ConfigDict(), ""
    config.stop.usd = config.stop.hours = config.stop.usd_per_centinat = 0.0
    config.stop.steps = 0
    config.profile.steps = ""
    if trunk.checkpoint.mirror:
        config.checkpoint.mirror = f"{trunk.checkpoint.mirror.rstrip('/')}-{name}-{step}"
    return config.lock()


def finished(config: config_dict.ConfigDict, run: pathlib.Path, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config with the overrides. Raises ConfigError if its folder is `run`'s, or holds another run."""
    for override in overrides:
        config_files.apply_override(config, override)
    folder = pathlib.Path(config.workdir)
    if folder.resolve() == run.resolve():
        raise ConfigError(f"config.workdir={folder} is the run that is branched from: give the branch another folder")
    if (folder / "config.json").is_file():
        there = config_files.from_run(folder / "config.json")
        if (there.origin, there.origin_checkpoint) != (config.origin, config.origin_checkpoint):
            raise ConfigError(f"{folder} holds another run: give another --config.workdir")
        if (was := there.train.steps) != (now := config.train.steps):
            raise ConfigError(f"{folder} holds a branch to step {was:,}, not to {now:,}: give another --config.workdir")
    return config


def _step(run: pathlib.Path, checkpoint: str) -> int:
    steps = sorted(int(path.name) for path in (run / "checkpoints").glob("*") if is_step(path.name))
    if not steps or steps[-1] < 1:
        raise ConfigError(f"no checkpoints in {run}/checkpoints: nothing to branch from")
    by_name = {str(step): step for step in steps} | {"latest": steps[-1]}
    if checkpoint not in by_name:
        raise ConfigError(f"no checkpoint {checkpoint!r} in {run}; there are {', '.join(map(str, steps))} and latest")
    return by_name[checkpoint]
