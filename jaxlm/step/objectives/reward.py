"""Learns a score of answers from pairs, of which one was preferred: the Bradley-Terry model (arXiv:2203.02155).

The score is the output of a scalar head at a segment's last token. So batches give each text one more token, as a target
only: else the model would not read the text's own last token, which ends the answer.

Legend: B rows, T tokens, P pairs of a row, S segments of a row.
"""

import jax
import jax.numpy as jnp

from jaxlm.config import Config
from jaxlm.models.transformer import Transformer
from jaxlm.step.objectives import base, dpo

HEAD = "score"


def scores(
    model: Transformer, variables: base.Variables, batch: base.Batch, key: jax.Array | None, n: int
) -> jax.Array:
    """Returns the score of each of the first `n` segments of every row, float32 [B, S] with S = n; 0 for absent segments."""
    score_BxT = base.scalar(variables, HEAD, base.hidden(model, variables, batch, key))
    ids_BxT = batch["segment_ids"]
    last_BxT = jnp.concatenate([ids_BxT[:, :-1] != ids_BxT[:, 1:], jnp.ones_like(ids_BxT[:, :1], bool)], axis=1)
    return base.by_segment(jnp.where(last_BxT, score_BxT, 0), ids_BxT, n)


def make(model: Transformer, config: Config) -> base.Objective:
    """Returns the objective: -log sigmoid(chosen score - rejected score - margin), the mean over pairs.

    The metrics are means over pairs: "margin", the difference of the scores; "accuracy", the share of margins above 0 (0
    counts half); "predicted", the probability that the model gives to the preference as it is labelled; "score", the mean
    of both scores; "length_margin", how many tokens the chosen answer is longer.
    """
    del config

    def sums(variables: base.Variables, batch: base.Batch, key: jax.Array | None) -> base.Sums:
        n = 2 * batch["pair"].shape[1]
        score_BxS = scores(model, variables, batch, key, n)
        tokens_BxS = base.by_segment(batch["weights"], batch["segment_ids"], n)
        margin_BxP = score_BxS[:, ::2] - score_BxS[:, 1::2]
        metrics = {
            "margin": margin_BxP,
            "accuracy": dpo.accuracy(margin_BxP),
            "predicted": jax.nn.sigmoid(margin_BxP),
            "score": (score_BxS[:, ::2] + score_BxS[:, 1::2]) / 2,
            "length_margin": tokens_BxS[:, ::2] - tokens_BxS[:, 1::2],
        }
        return dpo.pair_sums(-jax.nn.log_sigmoid(margin_BxP - batch["margin"]), metrics, batch["pair"])

    return base.Objective(sums, dpo.pair_shapes, heads=(HEAD,))
