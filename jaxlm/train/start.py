"""Shows and records what is about to run, when a run starts."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
from clu import parameter_overview
from jax.sharding import Mesh

from jaxlm import tree
from jaxlm.config import Config, ModelConfig, TrainConfig
from jaxlm.console import human
from jaxlm.plan.params import count_params
from jaxlm.processes import say
from jaxlm.train import ledger, metrics
from jaxlm.train.loop import Watch


def announce(model: ModelConfig, train: TrainConfig, params: dict, mesh: Mesh, done: int) -> None:
    """Shows the table of parameters, the model, the devices, and how long the run is.

    Args:
      model: the model's config, with nothing left at "auto".
      train: the run's length and batch.
      params: the trained variables, by collection, or their shapes.
      mesh: all devices of the run.
      done: how many steps are done already.
    """
    kind, shape = jax.devices()[0].device_kind, " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    say(parameter_overview.get_parameter_overview(stacked_shapes(tree.merge(params)), include_stats=False))
    say(
        f"{model.family}, {count_params(model):,} parameters; {mesh.size} x {kind} ({shape}); "
        f"attention {model.attention}, {model.dtype}, remat {model.remat}"
    )
    tokens = train.batch_size * train.seq_len
    resuming = f"resuming at step {done}, " if done else ""
    say(f"{resuming}to step {train.steps}: {human(train.steps * tokens)} tokens, {tokens:,} a step")


def stacked_shapes(params: dict) -> dict:
    """Returns the shapes of the parameters. All layers are stacked into one, `layers`, so that a table of them is short."""
    layers = [part for name, part in params.items() if tree.layer_of(name) is not None]
    rest = {name: part for name, part in params.items() if tree.layer_of(name) is None}
    if not layers:
        return rest
    stack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(layers), *x.shape), x.dtype), layers[0])
    return {**rest, "layers": stack}


def begin(
    folder: pathlib.Path, asked: Config, config: Config, data_sha256: str, mesh: Mesh, done: int
) -> metrics.Writer:
    """Records this start in the ledger, and returns the open writer of metrics. Only the first process calls it.

    Args:
      folder: the run's folder.
      asked: the config with "auto" as the user left it. It goes to config.json, so that `sample` on another machine
        chooses for that machine.
      config: the config with nothing left at "auto".
      data_sha256: the sha256 of the data's manifest.
      mesh: all devices of the run.
      done: how many steps are done already.
    """
    choices = {"attention": config.model.attention, "dtype": config.model.dtype, "mesh": dict(mesh.shape)}
    choices |= {"remat": config.model.remat, "microbatch_size": config.train.microbatch_size}
    ledger.record_start(folder, asked, step=done, manifest_sha256=data_sha256, choices=choices)
    return metrics.Writer(folder, config.log, dataclasses.asdict(config))


def make_recorder(
    config: Config, writer: metrics.Writer | None, done: int, watches: Sequence[Watch]
) -> metrics.Recorder:
    """Returns the recorder of a run whose next step is `done` + 1.

    Its wall time and dollars include the earlier starts of the run.

    Args:
      config: the config with nothing left at "auto".
      writer: the writer of metrics on the first process; None on the others.
      done: how many steps are done already.
      watches: the watches over the metrics. The recorder reads the metrics in their `reads` at every step.
    """
    wall_s = writer.last.get("wall_s", 0.0) if writer else 0.0
    meter = metrics.make_meter(config.model, config.train, config.hardware, wall_s)
    reads = [name for watch in watches for name in watch.reads]
    sizes = {"first": done + 1, "steps": config.train.steps, "every_steps": config.log.every_steps}
    return metrics.Recorder(meter, writer, **sizes, reads=reads)
