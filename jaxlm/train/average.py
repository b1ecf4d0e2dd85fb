"""Keeps a moving average of the weights while they are trained: it stands about where a decay of the rate would lead them.

The weights after step i count as i^g, a power function (arXiv:2312.02696, section 3.1): so the average is always the same
share of the run behind, whatever the run's length, and forgets its first weights.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlm.config import Config
from jaxlm.devices import sharding
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.state import TrainState, average_shardings
from jaxlm.step.step import Metrics, TrainStep

# Tokens of a device between two updates. An update moves 12 bytes of memory a parameter, a step computes 6 FLOPs a token for
# it: so its share of a step depends on the device's FLOP/s over its bytes/s alone, not on the model.
TOKENS = {"cpu": 2**13, "other": 2**15, "host": 2**20}  # host: the average lies in the host's memory, behind PCIe


def every(config: Config, platform: str, ways: int = 1) -> int:
    """Returns the steps between two updates, so that updates take under 1% of the time: the same at every start on a mesh.

    `ways`: the parts that a batch's rows are split into.
    """
    least = TOKENS["host" if config.optim.offload else "cpu" if platform == "cpu" else "other"]
    return -(-least * ways // (config.train.batch_size * config.train.seq_len))


def following(train_step: TrainStep, config: Config, mesh: Mesh, placed: TrainState, done: int) -> TrainStep:
    """Returns `train_step`, to call for the steps after `done`, which also updates `state.average`. The host does not wait.

    The first update takes the weights as they are. `placed`: the shardings of the state.
    """
    if not config.checkpoint.average:
        return train_step
    shardings = average_shardings(placed)
    between = every(config, mesh.devices.flat[0].platform, sharding.batch_ways(mesh))
    steps = itertools.count(done + 1)
    zeros = jax.jit(functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=shardings)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def update(average: Variables, params: Variables, share: jax.Array) -> Variables:
        return optax.incremental_update(params, jax.device_put(average, jax.memory.Space.Device), share)

    def step(frozen: Variables, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        average = state.average
        state, metrics = train_step(frozen, dataclasses.replace(state, average={}), batch)
        if (number := next(steps)) % between == 0:
            decay = (1 - between / number) ** (1 / config.checkpoint.average - 1) if average else 0.0
            average = update(average or zeros(state.params), state.params, 1 - decay)
        return dataclasses.replace(state, average=average), metrics

    return step
