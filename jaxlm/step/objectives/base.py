"""Defines the objective, which each kind of training gives to the train step, and functions to build objectives from.

All batches are packed: a row holds several documents, numbered from 1 by `segment_ids`. An objective returns sums, not
means. The step adds the sums of all microbatches and divides once, so that accumulation is exact even if the
microbatches differ in their number of tokens.

Legend: B rows, T tokens, D model, S segments of a row, A parts of a batch, M rows of a part.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxlm import models
from jaxlm.config import Config
from jaxlm.devices import sharding
from jaxlm.models.transformer import Transformer
from jaxlm.ops import spmd, xent

# Collection -> tree, as `model.apply` takes it: "params", "lora", ...; scalar heads "value".
Variables = dict[str, dict]
Batch = dict[str, jax.Array]  # rows first: [B, T] by token, [B, S] by segment, [B] by row
Running = dict[str, jax.Array]  # scalars that an objective adapts from step to step


class Sums(typing.NamedTuple):
    """Sums over a batch. The step adds them over microbatches and divides them by `weight` (tokens, pairs or rows) once.

    `metrics` are float32 scalars, divided too; "nll", where there is one, is the plain cross-entropy.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


def unchanged(running: Running, metrics: dict[str, jax.Array]) -> Running:
    del metrics
    return running


@dataclasses.dataclass(frozen=True)
class Objective:
    """The function that training minimises, and the shapes of its batches.

    Attributes:
      sums: (variables, batch, key) -> Sums. If the key is None there is no dropout. Evaluations of pairs call it too; those of
        tokens call `token_logp`, since the loss here may include a z-loss.
      shapes: (config, mesh) -> the batch as ShapeDtypeStructs with their shardings.
      heads: the scalar heads (see `scalar`) that are trained besides the model. Each is a collection.
      passes: how often a step goes over its batch, each time in `minibatches` parts, with an optimizer update for each. Update
        u takes the rows m, m + minibatches, ... of the batch, where m is u modulo `minibatches`.
      running: the initial values of the scalars that `adapt` changes, once a step.
      prepare: adds arrays [B, ...] that depend on all rows of an update, before the rows are split into microbatches.
    """

    sums: typing.Callable[[Variables, Batch, jax.Array | None], Sums]
    shapes: typing.Callable[[Config, Mesh | AbstractMesh], dict[str, jax.ShapeDtypeStruct]]
    heads: tuple[str, ...] = ()
    passes: int = 1
    minibatches: int = 1
    running: dict[str, float] = dataclasses.field(default_factory=dict)
    prepare: typing.Callable[[Batch], Batch] = lambda batch: batch
    adapt: typing.Callable[[Running, dict[str, jax.Array]], Running] = unchanged

    @property
    def updates(self) -> int:
        return self.passes * self.minibatches


Maker = typing.Callable[[Transformer, Config], Objective]  # the objectives' own `make`


def hidden(model: Transformer, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
    """Returns the hidden states [B, T, D] of a packed batch in the compute dtype, with dropout if `key` is not None.

    The batch has `until` in place of `segment_ids` if its texts share prefixes (see `eval.likelihood`).
    """
    rngs = {} if key is None else {"dropout": key}
    inputs = (batch["tokens"], batch["positions"], batch.get("segment_ids"))
    return model.apply(variables, *inputs, train=key is not None, rngs=rngs, until_BxT=batch.get("until"))


def token_logp(model: Transformer, variables: Variables, batch: Batch, tile: int = 0) -> jax.Array:
    """Returns log p(target) of each token in nats, float32 [B, T], without dropout. `tile`: tokens with logits in memory."""
    return hidden_logp(model, variables, hidden(model, variables, batch, None), batch["targets"], tile)


def hidden_logp(
    model: Transformer, variables: Variables, hidden_BxTxD: jax.Array, targets_BxT: jax.Array, tile: int = 0
) -> jax.Array:
    """Returns log p(target) of each token, as `token_logp`, from given hidden states."""
    config = model.config
    rows = models.head_rows(model, variables)
    token_nll = functools.partial(xent.token_nll, vocab_size=config.vocab_size, tile=tile, **rows)
    head_DxV = models.head_kernel(variables["params"], config, variables.get("packed"))
    return -spmd.over_tokens(token_nll, hidden_BxTxD, head_DxV, targets_BxT, summed=False)


def by_segment(x_BxT: jax.Array, segment_ids_BxT: jax.Array, n: int) -> jax.Array:
    """Returns the sums of `x_BxT` over each segment, [B, S] with S = n; segments after n are ignored."""
    chosen_BxTxS = segment_ids_BxT[:, :, None] == jnp.arange(1, n + 1)
    return jnp.sum(jnp.where(chosen_BxTxS, x_BxT[:, :, None], 0), axis=1)


def from_segments(x_BxS: jax.Array, segment_ids_BxT: jax.Array) -> jax.Array:
    """Returns for each token the value of its segment, [B, T]; 0 in segments after the S-th. The transpose of `by_segment`."""
    chosen_BxTxS = segment_ids_BxT[:, :, None] == jnp.arange(1, x_BxS.shape[1] + 1)
    return jnp.sum(jnp.where(chosen_BxTxS, x_BxS[:, None, :], 0), axis=2)


def split_rows(x_Bx: jax.Array, parts: int) -> jax.Array:
    """Returns [B, ...] as [A, M, ...] with A = `parts`. Part a has every A-th row: contiguous rows would be on few devices."""
    x_AxMx = x_Bx.reshape(x_Bx.shape[0] // parts, parts, *x_Bx.shape[1:]).swapaxes(0, 1)
    return sharding.constrain(x_AxMx, None, "batch", *(None,) * (x_Bx.ndim - 1))


def join_rows(x_AxMx: jax.Array) -> jax.Array:
    return x_AxMx.swapaxes(0, 1).reshape(-1, *x_AxMx.shape[2:])


def init_head(name: str, d_model: int) -> dict:
    """Returns the variables of a new scalar head, zeros: at first its output is 0 for every input."""
    return {f"{name}_head": {"kernel": jnp.zeros(d_model, jnp.float32)}}


def scalar(variables: Variables, name: str, hidden_BxTxD: jax.Array) -> jax.Array:
    """Returns the output of the scalar head `name` for each token, float32 [B, T]."""
    kernel_D = variables[name][f"{name}_head"]["kernel"].astype(hidden_BxTxD.dtype)
    return jnp.einsum("btd,d->bt", hidden_BxTxD, kernel_D, preferred_element_type=jnp.float32)


def token_shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a packed batch, all [B, T]: four int32 arrays, and `weights`, float32."""
    shape, placed = (config.train.batch_size, config.train.seq_len), sharding.batch_sharding(mesh)
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placed) for name in integers}
    return batch | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)}
