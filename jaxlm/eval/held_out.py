"""Held-out loss of text by source (with bits per byte), of answers and of preference pairs; a reference's log p of pairs.

Bits per byte = summed loss in nats / ln 2 / raw UTF-8 bytes of the targets: it compares models with different tokenizers.
Legend: B rows, T tokens, P pairs in a row, N pairs in all.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import Config, EvalConfig
from jaxlm.data.batches.document_rows import count_targets, validation_rows
from jaxlm.data.batches.example_rows import Packed
from jaxlm.data.batches.replay import Text
from jaxlm.data.shards.shards import DataDir
from jaxlm.devices import processes, sharding
from jaxlm.host.console import told
from jaxlm.models.transformer import Transformer
from jaxlm.step.objectives import base, dpo
from jaxlm.step.objectives.base import Batch, Objective, Variables
from jaxlm.step.step import cast

BASE = "val/base/bits_per_byte"  # of the text that the base of a fine-tuned model was trained on
_AHEAD = 2  # batches that the host is ahead of the device
_FIGURES = ("accuracy", "predicted", "margin")  # of pairs, besides the loss
_WEIGHTS = ("weights", "text_weights")  # of an answer's tokens: with its end token, and without

Evaluator = Callable[[Variables], dict[str, float]]


def sum_axis(config: EvalConfig) -> int | None:
    """Returns the axis of [B, T] that the device sums over in float32: 1, within rows, so that results don't depend on B.

    Older versions summed the whole batch (None); runs with `eval.older_batches` still do, to get the same bits.
    """
    return None if config.older_batches else 1


def token_nll(model: Transformer, tile: int) -> Callable[[Variables, Batch], jax.Array]:
    """Returns a function `(variables, batch) -> nll`, the cross-entropy of each token in nats, float32 [B, T]."""
    dtype = jnp.dtype(model.config.dtype)
    return lambda variables, batch: -base.token_logp(model, cast(variables, dtype), batch, tile)


def summed_nll(model: Transformer, tile: int, axis: int | None = None) -> Callable[[Variables, Batch], jax.Array]:
    nll = token_nll(model, tile)
    return lambda variables, batch: jnp.sum(nll(variables, batch) * batch["weights"], axis=axis)


def make(
    model: Transformer, data: DataDir, mixture: Mapping[str, float], mesh: Mesh, config: Config, halves: bool = False
) -> Evaluator:
    """Returns a function `variables -> metrics`: `val/<source>/loss` (nats a token), `val/<source>/bits_per_byte`, `val/loss`.

    `val/loss` is the mean of the sources' losses, weighted as in the mixture, so that it can be compared with the
    training loss. Every call uses the same text: the first `eval.max_mb` of each source's held-out text. A batch has
    `eval.batch_size` rows, rounded up to the mesh. `halves` adds `val/even` and `val/odd`, the losses of every other row.
    """
    axis, kinds, seq_len = sum_axis(config.eval), {"loss": slice(None)}, config.train.seq_len
    kinds |= {"even": slice(0, None, 2), "odd": slice(1, None, 2)} if halves else {}
    nll_of = jax.jit(summed_nll(model, config.loss.tile_tokens, axis), out_shardings=sharding.replicated(mesh))
    size = sharding.padded_rows(mesh, config.eval.batch_size)
    targets = {source: count_targets(data, source, config.eval, seq_len) for source in mixture}
    total = sum(-(-count // (size * seq_len)) for count in targets.values())

    def evaluate_source(variables: Variables, source: str, done: Callable[[], None]) -> dict[str, float]:
        sums, tokens, n_bytes = [], [], 0
        sizes = {"seq_len": seq_len, "batch_size": size, "targets": targets[source]}
        for held_out in validation_rows(data, source, **sizes):
            sums.append(nll_of(variables, placed(held_out.batch, mesh)))
            tokens.append(held_out.batch["weights"].sum(axis=axis, dtype=np.float64))
            n_bytes += held_out.target_bytes
            if len(sums) > _AHEAD:
                sums[-1 - _AHEAD].block_until_ready()
            done()
        if not sums:
            return {}
        nll_R, tokens_R = np.ravel(jax.device_get(sums)), np.ravel(tokens)
        nll = {kind: float(np.sum(nll_R[rows], dtype=np.float64)) for kind, rows in kinds.items()}
        each = {kind: nll[kind] / max(1.0, float(tokens_R[rows].sum())) for kind, rows in kinds.items()}
        return each | {"bits_per_byte": nll["loss"] / math.log(2) / max(n_bytes, 1)}

    def evaluate(variables: Variables) -> dict[str, float]:
        done = itertools.count(1 - _AHEAD)
        with processes.working("held-out loss", total, "batches") as tell:
            losses = {s: evaluate_source(variables, s, lambda: tell(max(0, next(done)))) for s in mixture}
            tell(total)
        losses = {source: of_source for source, of_source in losses.items() if of_source}
        metrics = {f"val/{source}/{name}": x for source, of_source in losses.items() for name, x in of_source.items()}
        weight = sum(mixture[source] for source in losses)
        for kind in kinds if weight else ():
            metrics[f"val/{kind}"] = sum(mixture[s] * of_source[kind] for s, of_source in losses.items()) / weight
        return metrics

    return evaluate


def of_text(
    model: Transformer, data: DataDir, mixture: Mapping[str, float], mesh: Mesh, config: Config, halves: bool = False
) -> Evaluator | None:
    """Returns the function that `make` returns, for a run's held-out text; None if no text is held out."""
    if not any(data.stream(source, "val").tokens > 1 for source in mixture):
        return None
    return make(model, data, mixture, mesh, config, halves)


def joined(evaluators: Sequence[Evaluator | None]) -> Evaluator | None:
    """Returns a function that returns the metrics of all evaluators; None if all are None."""
    there = [evaluate for evaluate in evaluators if evaluate]
    if not there:
        return None
    return lambda variables: {name: x for evaluate in there for name, x in evaluate(variables).items()}


def of_answers(model: Transformer, data: Packed, mesh: Mesh, config: Config) -> Evaluator | None:
    """Returns a function `variables -> metrics`: `val/loss` and `val/text_loss`, nats a token; None if nothing is held out.

    `val/loss` falls as soon as a model learns where answers end. `val/text_loss` leaves out the tokens that end answers, so it
    can be compared with the `val/text_loss` of a base model, which never saw these tokens. Every call uses the same examples:
    the first `eval.max_examples`.
    """
    if not len(data.val):
        return None
    nll, axis = token_nll(model, config.loss.tile_tokens), sum_axis(config.eval)
    size, examples = sharding.padded_rows(mesh, config.eval.batch_size), data.count_held_out(config.eval)

    def weighted(variables: Variables, batch: Batch) -> jax.Array:
        nll_BxT = nll(variables, batch)
        return jnp.stack([jnp.sum(nll_BxT * batch[name], axis=axis) for name in _WEIGHTS], axis=-1)

    sums_of = jax.jit(weighted, out_shardings=sharding.replicated(mesh))

    def evaluate(variables: Variables) -> dict[str, float]:
        sums, tokens = [], np.zeros(len(_WEIGHTS))
        both = zip(data.held_out(size, examples), data.held_out(size, examples, ends=False), strict=True)
        with processes.working("held-out answers", data.held_out_batches(size, examples), "batches") as tell:
            for whole, without_ends in told(both, tell):
                batch = {**whole, "text_weights": without_ends["weights"]}
                tokens += [batch[name].sum() for name in _WEIGHTS]
                sums.append(jax.block_until_ready(sums_of(variables, placed(batch, mesh))))
        summed = np.sum(np.reshape(jax.device_get(sums), (-1, len(_WEIGHTS))), axis=0, dtype=np.float64)
        return dict(zip(("val/loss", "val/text_loss"), (summed / np.maximum(tokens, 1)).tolist(), strict=True))

    return evaluate


def of_base(model: Transformer, text: Text | None, mesh: Mesh, config: Config) -> Evaluator | None:
    """Returns a function `variables -> metrics`: BASE, the mean of the sources' bits per byte, weighted as in the mixture.

    Returns None if the base's text is missing, or no part of the text is held out.
    """
    if not text or not any(text.token_counts("val").values()):
        return None
    evaluate = make(model, text, text.mixture, mesh, config)

    def bits(variables: Variables) -> dict[str, float]:
        metrics = evaluate(variables)
        each = {name: metrics[key] for name in text.mixture if (key := f"val/{name}/bits_per_byte") in metrics}
        weight = sum(text.mixture[name] for name in each)
        return {BASE: sum(text.mixture[name] * x for name, x in each.items()) / weight} if weight else {}

    return bits


def of_pairs(objective: Objective, data: Packed, mesh: Mesh, config: Config) -> Evaluator | None:
    """Returns a function `variables -> metrics` for the objective of `dpo` or `reward`; None if no pair is held out.

    The metrics are the objective's means over pairs: `val/loss`, `val/accuracy`, `val/predicted` and `val/margin`. Every call
    uses the same pairs: the first `eval.max_examples`.
    """
    if not len(data.val):
        return None

    def sums(variables: Variables, batch: Batch) -> jax.Array:
        of_batch = objective.sums(cast(variables, jnp.dtype(config.model.dtype)), objective.prepare(batch), None)
        return jnp.stack([of_batch.weight, of_batch.loss, *(of_batch.metrics[name] for name in _FIGURES)])

    size, examples = sharding.padded_rows(mesh, config.eval.batch_size), data.count_held_out(config.eval)
    sums_of = jax.jit(sums, out_shardings=sharding.replicated(mesh))

    def evaluate(variables: Variables) -> dict[str, float]:
        total = np.zeros(2 + len(_FIGURES))
        with processes.working("held-out pairs") as tell:
            for batch in told(data.held_out(size, examples), tell):
                total += np.asarray(sums_of(variables, placed(batch, mesh)), np.float64)
        names = ("val/loss", *(f"val/{name}" for name in _FIGURES))
        return dict(zip(names, (total[1:] / total[0]).tolist(), strict=True))

    return evaluate


def judge(
    model: Transformer, variables: Variables, data: Packed, mesh: Mesh, batch_size: int, tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log p of the (chosen, rejected) answers, of the training pairs and of the held-out pairs; nats, float32 [N, 2].

    `variables` are the reference's, in the dtypes in which the step computes. A batch has `batch_size` rows, rounded up to
    the mesh.
    """
    size = sharding.padded_rows(mesh, batch_size)
    logp_of = jax.jit(lambda v, b: dpo.answer_logp(model, v, b, tile), out_shardings=sharding.replicated(mesh))

    def judged(val: bool) -> np.ndarray:
        logp_Nx2 = np.zeros((len(data.val if val else data.train), 2), np.float32)
        done, what = 0, "the reference judges held-out pairs" if val else "the reference judges pairs"
        with processes.working(what, len(logp_Nx2)) as tell:
            for batch, numbers_BxP in data.judged(val, size):
                there = numbers_BxP >= 0
                logp_BxPx2 = np.asarray(logp_of(variables, placed(batch, mesh))).reshape(*there.shape, 2)
                logp_Nx2[numbers_BxP[there]] = logp_BxPx2[there]
                done += int(there.sum())
                tell(done)
        return logp_Nx2

    with jax.set_mesh(mesh):
        return judged(False), judged(True)


def placed(batch: Mapping[str, np.ndarray], mesh: Mesh) -> Batch:
    """Returns a batch on the mesh. `batch` has the rows of all processes."""
    size, length = batch["tokens"].shape
    local = sharding.local_rows(mesh, size)
    kinds = {True: sharding.batch_sharding(mesh), False: sharding.row_sharding(mesh)}
    placed = {name: kinds[x.shape[1] == length] for name, x in batch.items()}
    return sharding.to_global({name: x[local] for name, x in batch.items()}, mesh, size, placed)
