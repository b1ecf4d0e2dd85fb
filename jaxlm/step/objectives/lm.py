"""Next-token prediction: the objective of pretraining, and of SFT if only the answers have weight.

Legend: B rows, T tokens, D model, V vocabulary.
"""

import functools

import jax

from jaxlm import models
from jaxlm.config import Config
from jaxlm.models.transformer import Transformer
from jaxlm.ops import spmd, xent
from jaxlm.step.objectives import base


def make(model: Transformer, config: Config) -> base.Objective:
    """Returns the objective: cross-entropy of `targets` weighted by `weights`, with an optional z-loss (arXiv:2204.02311)."""
    m, loss = config.model, config.loss
    cross_entropy = functools.partial(
        xent.cross_entropy, vocab_size=m.vocab_size, z_loss=loss.z_loss, tile=loss.tile_tokens
    )

    def sums(variables: base.Variables, batch: base.Batch, key: jax.Array | None) -> base.Sums:
        hidden_BxTxD = base.hidden(model, variables, batch, key)
        head_DxV = models.head_kernel(variables["params"], m)
        of_tokens = functools.partial(cross_entropy, **models.head_rows(model, variables))
        loss_sum, aux = spmd.over_tokens(
            of_tokens, hidden_BxTxD, head_DxV, batch["targets"], batch["weights"], summed=True
        )
        return base.Sums(loss_sum, aux["weight_sum"], {"accuracy": aux["correct_sum"], "nll": aux["nll_sum"]})

    return base.Objective(sums, base.token_shapes)
