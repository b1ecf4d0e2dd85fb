"""What the pretraining of a config is made of, for a mesh: model, optimizer, the state that they carry, and the step.

Nothing here takes memory until `create`, or compiles until what `jit` gives is called.
"""

import dataclasses
import functools
import typing

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxlm import models
from jaxlm.config import Config, ModelConfig, OptimConfig
from jaxlm.objectives import lm
from jaxlm.train import optim, state, step


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """A config's parts on a mesh; `abstract` has the shapes and types of the state, `shardings` where each leaf lives."""

    config: Config
    mesh: Mesh | AbstractMesh
    model: typing.Any
    tx: optax.GradientTransformation
    abstract: state.TrainState
    shardings: state.TrainState

    def create(self) -> state.TrainState:
        """The state before the first step, on the devices of the mesh."""
        return state.create(self.model, self.tx, self.shardings, self.config.seed)

    def step(self) -> typing.Callable[[state.TrainState, lm.Batch], tuple[state.TrainState, dict]]:
        """The step as a pure function, see `step.make`."""
        c = self.config
        objective, rate = lm.make(self.model, c.model, c.loss), optim.schedule(c.optim, c.train.steps)
        return step.make(c, objective, self.tx, rate)

    def jit(self) -> typing.Any:
        """The step for the mesh, see `step.jit`."""
        return step.jit(self.step(), self.shardings, self.mesh)


def make(config: Config, mesh: Mesh | AbstractMesh) -> Pretraining:
    """The parts of a config with `model.attention` and `model.dtype` set (not auto); an abstract mesh gives shapes only."""
    model, tx, abstract = _parts(config.model, config.optim)
    where = state.shardings(abstract, model, mesh, config.optim.offload)
    return Pretraining(config, mesh, model, tx, abstract, where)


@functools.lru_cache(maxsize=4)
def _parts(model_config: ModelConfig, optim_config: OptimConfig) -> tuple[typing.Any, typing.Any, state.TrainState]:
    """Traced once where many meshes or batches of the same model are looked at."""
    model = models.build(model_config, model_config.attention)
    tx = optim.make(optim_config, models.abstract_params(model))
    return model, tx, state.abstract(model, tx)
