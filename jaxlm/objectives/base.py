"""What every kind of training hands to the step: an objective, and the few functions that objectives are made of.

Everything is packed: a row holds several documents, told apart by `segment_ids` (from 1). An objective returns sums, not
means, so that the step can add microbatches of any token counts and divide once: accumulation is then exact.

Legend: B rows, T tokens, D model, S segments of a row.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxlm import models, sharding
from jaxlm.config import Config
from jaxlm.models.transformer import Transformer
from jaxlm.ops import spmd, xent

Variables = dict[
    str, dict
]  # collection -> tree, as `model.apply` takes it: "params", "lora", ...; scalar heads "value"
Batch = dict[str, jax.Array]  # rows first: [B, T] by token, [B, S] by segment, [B] by row
Running = dict[str, jax.Array]  # scalars that an objective adapts from step to step


class Sums(typing.NamedTuple):
    """Sums over a batch. The step adds them over microbatches and divides them by `weight` once.

    Attributes:
      loss: float32 scalar, differentiated.
      weight: what the loss is a mean over: tokens, pairs or rows.
      metrics: float32 scalars by name, divided by `weight` too; "nll" is the plain cross-entropy.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]


def unchanged(running: Running, metrics: dict[str, jax.Array]) -> Running:
    """`running` as it was: nothing adapts."""
    del metrics
    return running


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised, on batches of which shapes.

    Attributes:
      sums: (variables, batch, key) -> Sums. Without a key there is no dropout. Evaluations use the same `hidden` and
        masks and read `metrics["nll"]`, never `loss`, which may hold a z-loss.
      shapes: (config, mesh) -> the batch as ShapeDtypeStructs with their shardings.
      heads: names of scalar heads (`scalar`), trained beside the model: a collection of variables each.
      updates: optimizer updates in one step. Each takes every `updates`-th row of the batch, the first row first.
      running: initial values of what `adapt` changes.
      adapt: (running, metrics) -> running, once a step (an adaptive KL coefficient).
    """

    sums: typing.Callable[[Variables, Batch, jax.Array | None], Sums]
    shapes: typing.Callable[[Config, Mesh | AbstractMesh], dict[str, jax.ShapeDtypeStruct]]
    heads: tuple[str, ...] = ()
    updates: int = 1
    running: dict[str, float] = dataclasses.field(default_factory=dict)
    adapt: typing.Callable[[Running, dict[str, jax.Array]], Running] = unchanged


Maker = typing.Callable[[Transformer, Config], Objective]  # the objectives' own `make`


def hidden(model: Transformer, variables: Variables, batch: Batch, key: jax.Array | None) -> jax.Array:
    """Hidden states (B, T, D) of a packed batch, in the compute dtype; with dropout if there is a key."""
    rngs = {} if key is None else {"dropout": key}
    inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
    return model.apply(variables, *inputs, train=key is not None, rngs=rngs)


def token_logp(
    model: Transformer, variables: Variables, batch: Batch, key: jax.Array | None, tile: int = 0
) -> jax.Array:
    """log p(target) of each token, float32 [B, T], in nats. Its backward pass works by tiles too.

    Args:
      key: for dropout; None: without.
      tile: tokens whose logits exist at one time; 0 = all.
    """
    config = model.config
    token_nll = functools.partial(xent.token_nll, vocab_size=config.vocab_size, tile=tile)
    hidden_BxTxD = hidden(model, variables, batch, key)
    head_DxV = models.head_kernel(variables["params"], config)
    return -spmd.over_tokens(token_nll, hidden_BxTxD, head_DxV, batch["targets"], summed=False)


def by_segment(x_BxT: jax.Array, segment_ids_BxT: jax.Array, n: int) -> jax.Array:
    """Sums of `x_BxT` over each segment: [B, S] with S = n; column s is segment s + 1, further segments are left out."""
    chosen_BxTxS = segment_ids_BxT[:, :, None] == jnp.arange(1, n + 1)
    return jnp.sum(jnp.where(chosen_BxTxS, x_BxT[:, :, None], 0), axis=1)


def init_head(name: str, d_model: int) -> dict:
    """The collection of a new scalar head. It gives 0 for everything, so that training begins undecided."""
    return {f"{name}_head": {"kernel": jnp.zeros(d_model, jnp.float32)}}


def scalar(variables: Variables, name: str, hidden_BxTxD: jax.Array) -> jax.Array:
    """One float32 number a token, [B, T], by the scalar head of that name."""
    kernel_D = variables[name][f"{name}_head"]["kernel"].astype(hidden_BxTxD.dtype)
    return jnp.einsum("btd,d->bt", hidden_BxTxD, kernel_D, preferred_element_type=jnp.float32)


def token_shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of packed tokens: `tokens`, `targets`, `segment_ids`, `positions` int32 and `weights` float32, [B, T]."""
    shape, placed = (config.train.batch_size, config.train.seq_len), sharding.batch_sharding(mesh)
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placed) for name in integers}
    return batch | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)}
