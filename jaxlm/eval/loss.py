"""Held-out loss and bits per byte, by source.

Bits per byte = summed loss in nats / ln 2 / raw UTF-8 bytes of the targets. Unlike the loss per token, it can compare
models with different tokenizers.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import processes, sharding
from jaxlm.config import EvalConfig
from jaxlm.data.rows import count_targets, validation_rows
from jaxlm.data.shards import DataDir
from jaxlm.models.transformer import Transformer
from jaxlm.objectives import base
from jaxlm.objectives.base import Batch, Variables
from jaxlm.step.step import cast

_AHEAD = 2  # batches that the host is ahead of the device

Evaluator = Callable[[Variables], dict[str, float]]


def sum_axis(config: EvalConfig) -> int | None:
    """Returns the axis of [B, T] that the device sums over, in float32: a row's tokens, so that B changes no result.

    Older versions summed the whole batch. A run that keeps `eval.older_batches` does so still, to have the same bits.
    """
    return None if config.older_batches else 1


def summed_nll(model: Transformer, tile: int, axis: int | None = None) -> Callable[[Variables, Batch], jax.Array]:
    """Returns a function `(variables, batch) -> nll`, the cross-entropy of a packed batch.

    nll is in nats, float32: the sum over the targets, each times its weight in `batch["weights"]`; a scalar, or [B] with
    `axis=1`.

    Args:
      model: the model to evaluate.
      tile: the number of tokens whose logits are in memory at one time; 0 for all.
    """
    dtype = jnp.dtype(model.config.dtype)

    def nll(variables: Variables, batch: Batch) -> jax.Array:
        nll_BxT = -base.token_logp(model, cast(variables, dtype), batch, None, tile)
        return jnp.sum(nll_BxT * batch["weights"], axis=axis)

    return nll


def make(
    model: Transformer,
    data: DataDir,
    mixture: Mapping[str, float],
    mesh: Mesh,
    config: EvalConfig,
    *,
    seq_len: int,
    tile: int,
) -> Evaluator:
    """Returns a function `variables -> metrics`: `val/<source>/loss` (nats a token), `val/<source>/bits_per_byte`, `val/loss`.

    `val/loss` is the mean of the sources' losses, weighted as in the mixture, so that it can be compared with the
    training loss. Every call uses the same text: the first `eval.max_mb` of each source's held-out text. `eval.batch_size`,
    rounded up to the mesh, is how many rows are in memory at a time.
    """
    nll_of = jax.jit(summed_nll(model, tile, sum_axis(config)), out_shardings=sharding.replicated(mesh))
    size = sharding.padded_rows(mesh, config.batch_size)
    rows = sharding.local_rows(mesh, size)
    targets = {source: count_targets(data, source, config, seq_len) for source in mixture}
    total = sum(-(-count // (size * seq_len)) for count in targets.values())

    def evaluate_source(variables: Variables, source: str, done: Callable[[], None]) -> dict[str, float]:
        sums, tokens, n_bytes = [], 0, 0
        sizes = {"seq_len": seq_len, "batch_size": size, "targets": targets[source]}
        for held_out in validation_rows(data, source, **sizes):
            local = jax.tree.map(lambda x: x[rows], held_out.batch)
            sums.append(nll_of(variables, sharding.to_global(local, mesh, size)))
            tokens += held_out.target_tokens
            n_bytes += held_out.target_bytes
            if len(sums) > _AHEAD:
                sums[-1 - _AHEAD].block_until_ready()
            done()
        if not tokens:
            return {}
        nll = float(np.sum(jax.device_get(sums), dtype=np.float64))
        return {"loss": nll / tokens, "bits_per_byte": nll / math.log(2) / max(n_bytes, 1)}

    def evaluate(variables: Variables) -> dict[str, float]:
        done = itertools.count(1 - _AHEAD)
        with processes.working("held-out loss", total, "batches") as tell:
            results = {s: evaluate_source(variables, s, lambda: tell(max(0, next(done)))) for s in mixture}
            tell(total)
        results = {source: result for source, result in results.items() if result}
        metrics = {f"val/{source}/{name}": v for source, result in results.items() for name, v in result.items()}
        weight = sum(mixture[source] for source in results)
        if weight:
            metrics["val/loss"] = sum(mixture[s] * r["loss"] for s, r in results.items()) / weight
        return metrics

    return evaluate
