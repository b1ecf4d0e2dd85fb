"""Next-token prediction: the objective of pretraining.

An objective is `(params, batch, key, train) -> (loss_sum, weight, metric_sums)`. It returns sums, not means, so that the
train step can add microbatches of any token counts and divide once: gradient accumulation is then exact.

Legend: B batch, T tokens, D model, V vocabulary.
"""

import functools
import typing

import jax

from jaxlm import models
from jaxlm.config import LossConfig, ModelConfig
from jaxlm.ops import by_device, xent

Batch = dict[str, jax.Array]
Objective = typing.Callable[[typing.Any, Batch, jax.Array | None, bool], tuple[jax.Array, jax.Array, dict]]


def make(model: typing.Any, config: ModelConfig, loss: LossConfig) -> Objective:
    """The cross-entropy of `targets_BxT`, weighted by `weights_BxT`, with an optional z-loss."""

    cross_entropy = functools.partial(
        xent.cross_entropy, vocab_size=config.vocab_size, z_loss=loss.z_loss, tile=loss.tile_tokens
    )

    def objective(params, batch: Batch, key: jax.Array | None, train: bool):
        hidden_BxTxD = hidden(model, params, batch, key=key, train=train)
        head_DxV = models.head_kernel(params, config)
        loss_sum, aux = by_device.over_tokens(
            cross_entropy, hidden_BxTxD, head_DxV, batch["targets"], batch["weights"], summed=True
        )
        return loss_sum, aux["weight_sum"], {"accuracy": aux["correct_sum"], "nll": aux["nll_sum"]}

    return objective


def hidden(model: typing.Any, params: typing.Any, batch: Batch, *, key: jax.Array | None, train: bool) -> jax.Array:
    """Hidden states (B, T, D) of a packed batch; dropout is on when training with a key."""
    rngs = {} if key is None else {"dropout": key}
    inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
    return model.apply({"params": params}, *inputs, train=train and key is not None, rngs=rngs)
