"""Restores a model with the weights that `sample.weights` names, and says what int8 costs on held-out text."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm import models
from jaxlm.config import Config
from jaxlm.data.batches.document_rows import ValidationBatch, validation_rows
from jaxlm.devices import sharding
from jaxlm.devices.processes import say, working
from jaxlm.eval import held_out, model
from jaxlm.models import quantized
from jaxlm.models.transformer import Transformer
from jaxlm.step.objectives import base
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.step import cast
from jaxlm.train import origin

_TOKENS = 4096  # of held-out text, about: the sources share them

Figures = dict[str, tuple[float, np.ndarray]]  # source -> (bits per byte, the likeliest token at each place)


def restore(
    config: Config, checkpoint: str, readers: Sequence[origin.Reader] = (), words: Sequence[str] = ()
) -> model.Restored:
    """Does what `model.restore` does; with `sample.weights=int8` quantises the weights, and prints what that costs."""
    return chosen(config, model.restore(config, checkpoint, readers, words))


def chosen(config: Config, restored: model.Restored) -> model.Restored:
    """Returns the model with the weights that `sample.weights` names; see `restore`."""
    if config.sample.weights == "float":
        return restored
    texts = _texts(restored, config)
    measure = _measure(restored.model, config.loss.tile_tokens)
    with jax.set_mesh(restored.mesh), working("quantising the weights, and measuring what that costs"):
        before = _figures(measure, restored.variables, texts, restored)
        restored = dataclasses.replace(restored, variables=quantized.in_int8(restored.model, restored.variables))
        after = _figures(measure, restored.variables, texts, restored)
    say(cost(before, after))
    return restored


def cost(before: Figures, after: Figures) -> str:
    """Returns a line on what other weights cost; `before` and `after` are of the same texts."""
    if not before:
        return "int8 weights: no held-out text is here to say what they cost; jaxlm eval RUN --text=FILE --weights=int8 does"
    bits = (f"{source} {after[source][0]:.4g} ({after[source][0] - before[source][0]:+.4f})" for source in before)
    stay = np.concatenate([before[source][1] == after[source][1] for source in before])
    words = f"int8 weights, on {stay.size:,} tokens of held-out text: bits per byte {', '.join(bits)}"
    return f"{words}; {stay.mean():.1%} of greedy tokens stay"


def _texts(restored: model.Restored, config: Config) -> dict[str, ValidationBatch]:
    """Returns the beginning of each source's held-out text."""
    data, length = restored.data, config.train.seq_len
    held = [source for source, tokens in data.token_counts("val").items() if tokens > 1] if data else []
    rows = sharding.padded_rows(restored.mesh, max(1, _TOKENS // (length * max(1, len(held)))))
    sizes = {"seq_len": length, "batch_size": rows}
    return {
        source: next(
            validation_rows(data, source, **sizes, targets=min(rows * length, data.token_counts("val")[source] - 1))
        )
        for source in held
    }


def _measure(model: Transformer, tile: int) -> Callable[[Variables, Batch], tuple[jax.Array, jax.Array]]:
    """Returns a function `(variables, batch) -> (summed loss in nats, the likeliest tokens [B, T])`."""
    config = model.config

    def run(variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array]:
        variables = cast(variables, jnp.dtype(config.dtype))
        hidden_BxTxD = base.hidden(model, variables, batch, None)
        logp_BxT = base.hidden_logp(model, variables, hidden_BxTxD, batch["targets"], tile)
        head_DxV = models.head_kernel(variables["params"], config, variables.get("packed"))
        if rows := models.head_rows(model, variables):
            head_DxV = head_DxV.at[:, np.asarray(rows["row_ids"])].add(rows["rows_NxD"].T.astype(head_DxV.dtype))
        head_DxV = head_DxV[:, : config.vocab_size]
        likeliest_BxT = jax.lax.map(lambda hidden_TxD: jnp.argmax(hidden_TxD @ head_DxV, axis=-1), hidden_BxTxD)
        return -jnp.sum(logp_BxT * batch["weights"]), likeliest_BxT

    return jax.jit(run)


def _figures(
    measure: Callable, variables: Variables, texts: Mapping[str, ValidationBatch], restored: model.Restored
) -> Figures:
    figures = {}
    for source, text in texts.items():
        nll, likeliest_BxT = jax.device_get(measure(variables, held_out.placed(text.batch, restored.mesh)))
        bits = float(nll) / math.log(2) / max(text.target_bytes, 1)
        figures[source] = (bits, likeliest_BxT[text.batch["weights"] > 0])
    return figures
