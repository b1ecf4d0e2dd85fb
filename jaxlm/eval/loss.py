"""Held-out loss and bits per byte, by source.

Bits per byte (summed loss in nats / ln 2 / raw UTF-8 bytes of the targets) compares models of different tokenizers;
the loss per token does not.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import models, sharding
from jaxlm.config import Config
from jaxlm.data import loader
from jaxlm.data.shards import DataDir
from jaxlm.objectives import lm
from jaxlm.ops import by_device, xent
from jaxlm.train import step as step_lib

Evaluator = typing.Callable[[typing.Any], dict[str, float]]


def make(config: Config, model: typing.Any, data: DataDir, mixture: dict[str, float], mesh: Mesh) -> Evaluator:
    """Returns `params -> metrics`: `val/<source>/loss`, `val/<source>/bits_per_byte`, and `val/loss`.

    `val/loss` is the mean of the sources' losses by mixture weight, so that it compares with the training loss.
    The held-out rows are the same at each call: `eval.max_batches` batches of each source, from its start.
    """
    dtype = jnp.dtype(config.model.dtype)

    token_nll = functools.partial(xent.token_nll, vocab_size=config.model.vocab_size, tile=config.loss.tile_tokens)

    def summed_nll(params, batch):
        params = step_lib.cast(params, dtype)
        hidden_BxTxD = lm.hidden(model, params, batch, key=None, train=False)
        head_DxV = models.head_kernel(params, config.model)
        nll_BxT = by_device.over_tokens(token_nll, hidden_BxTxD, head_DxV, batch["targets"], summed=False)
        return jnp.sum(nll_BxT * batch["weights"])

    summed_nll = jax.jit(summed_nll, out_shardings=sharding.replicated(mesh))
    size = config.eval.batch_size
    rows = sharding.local_rows(mesh, size)
    max_rows = size * config.eval.max_batches or None

    def evaluate_source(params, source: str) -> dict[str, float]:
        sums, tokens, n_bytes = [], 0, 0
        for held_out in loader.validation_rows(
            data, source, seq_len=config.train.seq_len, batch_size=size, max_rows=max_rows
        ):
            local = jax.tree.map(lambda x: x[rows], held_out.batch)
            sums.append(summed_nll(params, sharding.to_global(local, mesh, size)))
            tokens += held_out.target_tokens
            n_bytes += held_out.target_bytes
        if not tokens:
            return {}
        nll = float(np.sum(jax.device_get(sums), dtype=np.float64))
        return {"loss": nll / tokens, "bits_per_byte": nll / math.log(2) / max(n_bytes, 1)}

    def evaluate(params: typing.Any) -> dict[str, float]:
        results = {source: evaluate_source(params, source) for source in mixture}
        results = {source: result for source, result in results.items() if result}
        metrics = {f"val/{source}/{name}": v for source, result in results.items() for name, v in result.items()}
        weight = sum(mixture[source] for source in results)
        if weight:
            metrics["val/loss"] = sum(mixture[s] * r["loss"] for s, r in results.items()) / weight
        return metrics

    return evaluate
