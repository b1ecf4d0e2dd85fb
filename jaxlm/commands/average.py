"""`jaxlm average`: makes the average of a run's checkpoints, a run of its own in RUN/average, measured beside them."""

import argparse
import dataclasses
import functools
import pathlib

import jax

from jaxlm import models
from jaxlm.commands.import_hf import becoming, write
from jaxlm.config import Config, ConfigError, config_files
from jaxlm.data.batches.open import open_mixture
from jaxlm.data.shards import vocabulary
from jaxlm.devices import tree
from jaxlm.devices.processes import say, together
from jaxlm.eval import held_out, model
from jaxlm.host import files
from jaxlm.host.console import print_table
from jaxlm.host.redact import redact
from jaxlm.run.checkpoints import keep, saving
from jaxlm.train import origin

Weights = dict[int, float]  # step -> its share of the average
_CHOOSES = "loss_that_chooses"
_IN_TRAINING = "in training"  # the moving average that the last checkpoint holds (checkpoint.average)


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the held-out loss of each part and average, and writes the best average to RUN/average.

    The average is chosen by every other row of the held-out text (`loss_that_chooses`); `loss` is that on the others.
    """
    flags = (args.last, args.ema, args.steps or None)
    _check(*flags)
    model.check_run(config, args.config)
    folder = pathlib.Path(config.workdir)
    if config.adapter.kind != "none":
        raise ConfigError(f"{folder} trained an adapter: only whole models are averaged")
    if config.program != "pretrain":
        raise ConfigError(
            f"{folder} was trained by {config.program}: averages are chosen by held-out text, which only pretraining has"
        )
    moving = together(lambda: origin.averaged_in_training(origin.open(folder))) if flags == (None,) * 3 else None
    ways = together(lambda: _ways(folder, args, bool(moving)))
    parts = {step: origin.open(folder, step) for step in sorted({step for way in ways.values() for step in way})}
    latest = model.restore(config, str(max(parts)))
    abstract = models.abstract_params(latest.model)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, latest.variables["params"])
    averages = {name: origin.averaged([parts[step] for step in way], list(way.values())) for name, way in ways.items()}
    averages |= {_IN_TRAINING: moving} if moving else {}
    measured = {f"step {step}": part for step, part in parts.items()} | averages
    evaluate = _evaluator(latest, config)
    rows, out, needed = [], folder / config_files.AVERAGE, 4 * tree.count(abstract)
    together(lambda: files.check_room(folder, needed, str(out)), first_only=True)
    with jax.set_mesh(latest.mesh):
        for name, weights in measured.items():
            losses = evaluate({"params": weights.params(abstract, shardings)})
            row = {"checkpoint": name, "parts": len(ways.get(name, "1"))}
            rows.append(row | {_CHOOSES: losses["val/even"], "loss": losses["val/odd"]})
    by_loss = sorted(rows, key=lambda row: row[_CHOOSES])
    best = next(row for row in by_loss if row["checkpoint"] in ways)
    alone = next(row for row in by_loss if row["checkpoint"] not in ways)
    name = best["checkpoint"]
    made = f"{name}, of the steps {', '.join(map(str, ways[name]))}"
    with becoming(out, needed, str(out), replaces=True) as part:
        params = functools.partial(averages[name].params, abstract, shardings)
        _write(dataclasses.replace(config, workdir=str(out)), part, averages[name], params, made)
    if jax.process_index() == 0:
        print_table(rows, args.json)
    worse = best["loss"] > alone["loss"]
    say(f"wrote {out}: {made}" + f"; it is worse than {alone['checkpoint']} alone ({alone['loss']:.4g})" * worse)
    better = f" --checkpoint={alone['checkpoint'].split()[-1]}" if worse else f"@{config_files.AVERAGE}"
    say(f"next: jaxlm eval {folder}{better}")
    return 0


def _check(last: int | None, ema: float | None, steps: str | None) -> None:
    """Raises ConfigError if more than one flag is given, or --ema is out of bounds."""
    if sum(flag is not None for flag in (last, ema, steps)) > 1:
        raise ConfigError("--last, --ema and --steps are three ways: give one of them, or none to try several ways")
    if ema is not None and not 0 < ema < 1:
        raise ConfigError(f"--ema={ema:g}: between 0 and 1")


def _ways(folder: pathlib.Path, args: argparse.Namespace, moving: bool = False) -> dict[str, Weights]:
    """Returns name -> the average's weights. Raises ConfigError if a checkpoint is missing, or there are fewer than two.

    `moving`: True if the last checkpoint holds an average of its own, which then is a way too.
    """
    saved = [step for step in keep.steps(folder / "checkpoints") if step]
    if args.steps:
        named = [int(word) for word in args.steps.split(",") if word.strip().isdecimal()]
        if len(set(named)) < 2 or len(named) != args.steps.count(",") + 1 or set(named) - set(saved):
            raise ConfigError(f"--steps={args.steps}: two or more of the checkpoints {', '.join(map(str, saved))}")
        return {"average": _equal(sorted(set(named)))}
    if len(saved) < 2 and not moving:
        raise ConfigError(
            f"{folder} has {len(saved)} checkpoint{'s' * (len(saved) != 1)}, an average needs two: "
            "--config.checkpoint.keep_last=10 keeps more, --config.checkpoint.average=0.1 keeps a moving one"
        )
    if args.last is not None:
        if not 2 <= args.last <= len(saved):
            raise ConfigError(f"--last={args.last}: there are {len(saved)} checkpoints; at least 2 make an average")
        return {f"last {args.last}": _equal(saved[-args.last :])}
    if args.ema is not None:
        return {f"ema {args.ema:g}": _ema(saved, args.ema)}
    means = {_IN_TRAINING: {saved[-1]: 1.0}} if moving else {}
    means |= {f"last {count}": _equal(saved[-count:]) for count in (2, 3, 5, 10) if count <= len(saved)}
    return means | ({f"ema {decay:g}": _ema(saved, decay) for decay in (0.5, 0.8)} if len(saved) > 2 else {})


def _equal(steps: list[int]) -> Weights:
    return dict.fromkeys(steps, 1 / len(steps))


def _ema(steps: list[int], decay: float) -> Weights:
    """Returns the weights of an exponential moving average that begins at the first step."""
    shares = [decay ** (len(steps) - 1)] + [(1 - decay) * decay**after for after in range(len(steps) - 2, -1, -1)]
    return dict(zip(steps, shares, strict=True))


def _evaluator(run: model.Restored, config: Config) -> held_out.Evaluator:
    """Returns the evaluator of the run's held-out text, in halves. Raises ConfigError if there is no text."""
    data, mixture = open_mixture(config.data, config.prepare, vocabulary.required(config))
    if evaluate := held_out.of_text(run.model, data, mixture, run.mesh, config, halves=True):
        return evaluate
    raise ConfigError(f"{config.workdir} has no held-out text to measure averages by")


def _write(config: Config, part: pathlib.Path, average: origin.Origin, params, how: str) -> None:
    """Writes the run that becomes `config.workdir`, RUN/average, into the folder `part`."""
    run = pathlib.Path(config.workdir).parent.resolve()
    data = dataclasses.replace(config.data, dir=str(pathlib.Path(config.data.dir).resolve()))
    made = dataclasses.replace(config, origin=str(run), origin_state=False, data=data)
    saving.save_weights(part / "checkpoints", params, redact(dataclasses.asdict(made)))
    together(lambda: write(made, average.tokenizer(), part, f"the average of {run}: {how}"), first_only=True)
