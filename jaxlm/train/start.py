"""What a run says when it starts."""

import jax
from clu import parameter_overview
from jax.sharding import Mesh

from jaxlm.config import ModelConfig, TrainConfig
from jaxlm.console import human
from jaxlm.plan.params import count_params
from jaxlm.processes import say


def announce(model: ModelConfig, train: TrainConfig, params: dict, mesh: Mesh, first: int) -> None:
    """Says which model is about to be trained, on what, and for how long.

    Args:
      model: with nothing left at "auto".
      train: the run's length and batch.
      params: the model's parameters, or their shapes.
      mesh: all devices of the run.
      first: steps that are done already.
    """
    kind, shape = jax.devices()[0].device_kind, " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    say(parameter_overview.get_parameter_overview(stacked_shapes(params), include_stats=False))
    say(
        f"{model.family}, {count_params(model):,} parameters; {mesh.size} x {kind} ({shape}); "
        f"attention {model.attention}, {model.dtype}, remat {model.remat}"
    )
    tokens = train.batch_size * train.seq_len
    at = f"resuming at step {first}, " if first else ""
    say(f"{at}to step {train.steps}: {human(train.steps * tokens)} tokens, {tokens:,} a step")


def stacked_shapes(params: dict) -> dict:
    """Shapes of the parameters with all layers stacked under one name: a table of them is short however deep the model."""
    layers = [tree for name, tree in params.items() if name.startswith("layers_")]
    rest = {name: tree for name, tree in params.items() if not name.startswith("layers_")}
    stack = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(layers), *x.shape), x.dtype), layers[0])
    return {**rest, "layers": stack}
