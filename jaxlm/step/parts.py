"""Builds what training needs from a config and a mesh: model, objective, optimizer, train state and train step.

Nothing here takes device memory before `create`. Nothing compiles before the function that `jit` returns is called.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxlm import models
from jaxlm.config import Config, ConfigError, ModelConfig, OptimConfig
from jaxlm.devices import sharding, tree
from jaxlm.models import params as params_lib
from jaxlm.models import quantized
from jaxlm.models.adapters import Adapter
from jaxlm.models.transformer import Transformer
from jaxlm.step import optim, step
from jaxlm.step import state as state_lib
from jaxlm.step.objectives import base
from jaxlm.step.objectives.base import Objective, Variables
from jaxlm.step.state import TrainState


class Weights(typing.Protocol):
    """Parameters from a checkpoint or a folder (`train.origin.Origin`)."""

    def params(self, abstract: dict, shardings: dict) -> dict:
        """Returns the parameters to train, a tree of arrays with the shapes of `abstract` and these shardings."""

    def leaf(self, name: str) -> np.ndarray:
        """Returns one parameter on the host, by its name. Frozen parameters are read this way, then quantised or cast."""

    def trained(self) -> Variables:
        """Returns the variables besides the parameters (an adapter, scalar heads) by collection, on the host; {} for none."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Everything that training with a config on a mesh needs.

    Attributes:
      frozen, frozen_shardings: the model's parameters as `models.quantized` keeps them; {} if all are trained.
      init: key -> new variables, by collection, that are trained besides the model's parameters.
    """

    config: Config
    mesh: Mesh | AbstractMesh
    model: Transformer
    objective: Objective
    tx: optax.GradientTransformationExtraArgs
    abstract: TrainState
    shardings: TrainState
    frozen: Variables
    frozen_shardings: Variables
    init: typing.Callable[[jax.Array], Variables]

    def create(self, origin: Weights | None = None) -> tuple[TrainState, Variables]:
        """Returns (the state before the first step, the frozen variables), created sharded.

        The model's parameters come from `origin` if it is given, and so do other trained variables that the origin has. All
        else is initialised from `config.seed`.
        """

        def make(given: Variables, key: jax.Array) -> TrainState:
            return state_lib.init(self.init(key) | given, self.tx, self.objective.running)

        made = jax.jit(make, out_shardings=self.shardings, donate_argnums=0)
        with jax.set_mesh(self.mesh):
            given = {} if self.frozen else {"params": self._params(origin)}
            given |= self._beside(origin)
            state = made(given, jax.random.key(self.config.seed))
        return state, self.load_frozen(origin)

    def load_frozen(self, origin: Weights | None = None) -> Variables:
        """Returns the frozen variables, which checkpoints do not hold: read, and quantised, one parameter at a time."""
        if not self.frozen:
            return {}
        c, model = self.config, self.model
        abstract = models.abstract_params(model)
        shardings = sharding.tree_shardings(abstract, models.logical_axes(model), self.mesh)
        with jax.set_mesh(self.mesh):
            if origin is None:
                params = params_lib.each_param(model, jax.random.key(c.seed), shardings)
            else:
                params = quantized.placed(origin.leaf, abstract, shardings)
            return quantized.load(params, c.adapter.quantize, c.model.dtype, self.frozen_shardings)

    def reference(self, origin: Weights, frozen: Variables) -> Variables:
        """Returns the model's variables before training, in a step's compute types, without scalar heads.

        New LoRA factors and rows change nothing at first, so they are left out. Call it under `jax.set_mesh(mesh)`.
        """
        begun = {} if self.frozen else {"params": self._params(origin)}
        begun |= {name: part for name, part in self._beside(origin).items() if name not in self.objective.heads}
        return frozen | jax.jit(step.cast, static_argnums=1)(begun, jnp.dtype(self.config.model.dtype))

    def _params(self, origin: Weights | None) -> dict:
        shardings = self.shardings.params["params"]
        if origin is None:
            return models.create_params(self.model, jax.random.key(self.config.seed), shardings)
        return origin.params(self.abstract.params["params"], shardings)

    def _beside(self, origin: Weights | None) -> Variables:
        """Returns the origin's adapter and heads that are trained here too. Raises ConfigError if names or shapes differ."""
        arrays = {}
        for name, part in (origin.trained() if origin else {}).items():
            if name not in self.abstract.params:
                continue
            here, there = (dict(tree.named_leaves(x)) for x in (self.abstract.params[name], part))
            if odd := {n for n, x in here.items() if n not in there or x.shape != there[n].shape} | there.keys() - here:
                raise ConfigError(
                    f"{name}/{min(odd)} of {self.config.origin} has another shape here, or is missing: keep "
                    "the origin's config.adapter"
                )
            arrays[name] = jax.device_put(part, self.shardings.params[name])
        return arrays

    def step(self) -> step.TrainStep:
        c = self.config
        return step.make(
            c, self.objective, self.tx, optim.rates(c.optim, c.train.steps, tree.merge(self.abstract.params))
        )

    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.objective.shapes(self.config, self.mesh)

    def jit(self) -> jax.stages.Wrapped:
        """Returns the train step, jitted for the mesh, to call under `jax.set_mesh`. It donates the old state."""
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.batch())
        return jax.jit(
            self.step(),
            in_shardings=(self.frozen_shardings, self.shardings, placed),
            out_shardings=(self.shardings, sharding.replicated(self.mesh)),
            donate_argnums=1,
        )

    def lower(self) -> jax.stages.Lowered:
        """Returns the train step lowered from shapes: devices may be absent. An abstract mesh is lowered for this platform."""
        jitted = self.jit()  # before the `with`: it makes a key, which absent devices can't hold
        shapes = (self.frozen, self.abstract, self.batch())
        if isinstance(self.mesh, AbstractMesh):
            with jax.sharding.use_abstract_mesh(self.mesh):
                return jitted.trace(*shapes).lower(lowering_platforms=(jax.default_backend(),))
        with jax.set_mesh(self.mesh):
            return jitted.lower(*shapes)


def make(
    config: Config,
    mesh: Mesh | AbstractMesh,
    make_objective: base.Maker,
    adapter: Adapter | None = None,
    rows: tuple[int, ...] = (),
) -> Parts:
    """Returns the parts of a settled config. Raises ConfigError if `optim.decay` and `no_decay` do not split the variables."""
    model = _model(config.model, adapter)
    objective = make_objective(model, config)
    running, quantize = tuple(objective.running.items()), config.adapter.quantize
    init, tx, abstract, frozen = _abstract(
        config.model, config.optim, objective.heads, running, adapter, quantize, rows
    )
    if adapter:
        logical, frozen_axes = adapter.logical_axes(model), quantized.frozen_axes(model, quantize)
    else:
        logical, frozen_axes = {"params": models.logical_axes(model)}, {}
    logical |= {head: jax.tree.map(lambda x: (None,) * x.ndim, abstract.params[head]) for head in objective.heads}
    frozen_shardings = sharding.tree_shardings(frozen, frozen_axes, mesh)
    placed = state_lib.shardings(abstract, logical, mesh, config.optim.offload)
    return Parts(config, mesh, model, objective, tx, abstract, placed, frozen, frozen_shardings, init)


def _model(config: ModelConfig, adapter: Adapter | None) -> Transformer:
    model = models.build(config, config.attention)
    return adapter.attach(model) if adapter else model


@functools.lru_cache(maxsize=4)
def _abstract(
    model_config: ModelConfig,
    optim_config: OptimConfig,
    heads: tuple[str, ...],
    running: tuple[tuple[str, float], ...],
    adapter: Adapter | None,
    quantize: str,
    rows: tuple[int, ...],
) -> tuple[typing.Callable, optax.GradientTransformationExtraArgs, TrainState, Variables]:
    """Returns (init, optimizer, abstract state, frozen shapes); cached, since plans try many meshes for one model."""
    model = _model(model_config, adapter)

    def init(key: jax.Array) -> Variables:
        # Another key: else an adapter would get the same random numbers as the parameters.
        beside = adapter.init(model, jax.random.fold_in(key, 1)) if adapter else {}
        return beside | {head: base.init_head(head, model_config.d_model) for head in heads}

    params = models.abstract_params(model)
    trained = jax.eval_shape(lambda: init(jax.random.key(0)))
    frozen: Variables = {}
    if adapter:
        frozen = jax.eval_shape(lambda params: quantized.freeze(params, quantize, model_config.dtype), params)
    else:
        trained = {"params": params} | trained
    tx = optim.make(optim_config, tree.merge(trained), rows, model_config.dtype)
    return init, tx, jax.eval_shape(lambda trained: state_lib.init(trained, tx, dict(running)), trained), frozen
