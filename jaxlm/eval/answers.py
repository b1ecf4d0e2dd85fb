"""Held-out loss of answers, with the token that ends each of them and without; and of the text that the base was trained on.

`val/loss` falls by itself as soon as a model learns that answers end: `val/text_loss` leaves these tokens out, and can be
compared with that of a base, which never saw them.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import processes, sharding
from jaxlm.config import EvalConfig
from jaxlm.data.packed import Batch, Packed
from jaxlm.data.replay import Text
from jaxlm.eval import loss
from jaxlm.eval.loss import Evaluator
from jaxlm.models.transformer import Transformer
from jaxlm.objectives import base
from jaxlm.objectives.base import Variables
from jaxlm.step.step import cast

BASE = "val/base/bits_per_byte"
_WEIGHTS = ("weights", "text_weights")


def make(
    model: Transformer, data: Packed | None, text: Text | None, mesh: Mesh, config: EvalConfig, seq_len: int, tile: int
) -> Evaluator | None:
    """Returns a function `variables -> metrics`; None if nothing is held out.

    The metrics are `val/loss` and `val/text_loss` of the held-out examples, in nats a token, and BASE of the held-out text: the
    mean of its sources' bits per byte, weighted as in the mixture. Every call uses the same examples and text: the first
    `eval.max_examples`, and the first `eval.max_mb` of each source.

    Args:
      data: the examples; None if they are measured elsewhere.
      text: the text that the base was trained on; None if it is not here.
      tile: the number of tokens whose logits are in memory at one time; 0 for all.
    """
    made: list[Evaluator] = []
    if data and len(data.val):
        made.append(_of_answers(model, data, mesh, config, tile))
    if text and any(text.token_counts("val").values()):
        made.append(_of_text(model, text, mesh, config, seq_len, tile))
    return (lambda variables: {name: x for one in made for name, x in one(variables).items()}) if made else None


def _of_answers(model: Transformer, data: Packed, mesh: Mesh, config: EvalConfig, tile: int) -> Evaluator:
    dtype, size = jnp.dtype(model.config.dtype), sharding.padded_rows(mesh, config.batch_size)
    axis, sizes = loss.sum_axis(config), (-1, len(_WEIGHTS))
    rows, examples = sharding.local_rows(mesh, size), data.count_held_out(config)

    def nll(variables: Variables, batch: base.Batch) -> jax.Array:
        nll_BxT = -base.token_logp(model, cast(variables, dtype), batch, None, tile)
        return jnp.stack([jnp.sum(nll_BxT * batch[name], axis=axis) for name in _WEIGHTS], axis=-1)

    nll_of = jax.jit(nll, out_shardings=sharding.replicated(mesh))

    def evaluate(variables: Variables) -> dict[str, float]:
        sums, tokens = [], np.zeros(len(_WEIGHTS))
        total = data.held_out_batches(size, examples)
        with processes.working("held-out answers", total, "batches") as tell:
            for number, batch in enumerate(_batches(data, size, examples), 1):
                tokens += [batch[name].sum() for name in _WEIGHTS]
                local = jax.tree.map(lambda x: x[rows], batch)
                sums.append(jax.block_until_ready(nll_of(variables, sharding.to_global(local, mesh, size))))
                tell(number)
        nll = np.sum(np.reshape(jax.device_get(sums), sizes), axis=0, dtype=np.float64)
        nll, text_nll = nll / np.maximum(tokens, 1)
        return {"val/loss": float(nll), "val/text_loss": float(text_nll)}

    return evaluate


def _batches(data: Packed, size: int, examples: int) -> Iterator[Batch]:
    """The first held-out examples in batches, with a second kind of weights: 0 too for what ends an answer."""
    for batch, without in zip(data.held_out(size, examples), data.held_out(size, examples, ends=False), strict=True):
        yield {**batch, "text_weights": without["weights"]}


def _of_text(model: Transformer, text: Text, mesh: Mesh, config: EvalConfig, seq_len: int, tile: int) -> Evaluator:
    evaluate = loss.make(model, text, text.mixture, mesh, config, seq_len=seq_len, tile=tile)

    def bits(variables: Variables) -> dict[str, float]:
        found = evaluate(variables)
        each = {name: found[key] for name in text.mixture if (key := f"val/{name}/bits_per_byte") in found}
        weight = sum(text.mixture[name] for name in each)
        return {BASE: sum(text.mixture[name] * x for name, x in each.items()) / weight} if weight else {}

    return bits
