"""What a model says of preference pairs: figures of held-out pairs, and the log-probabilities of a reference.

Legend: B rows, P pairs of a row, N pairs of all.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import processes, sharding
from jaxlm.config import EvalConfig
from jaxlm.data.packed import Batch, Packed
from jaxlm.eval.loss import Evaluator
from jaxlm.models.transformer import Transformer
from jaxlm.objectives import base, dpo
from jaxlm.objectives.base import Objective, Variables
from jaxlm.step.step import cast

_FIGURES = ("accuracy", "predicted", "margin")


def make(objective: Objective, data: Packed, mesh: Mesh, config: EvalConfig, dtype: str) -> Evaluator | None:
    """Returns a function `variables -> metrics`; None if no pair is held out.

    The metrics are `val/loss`, `val/accuracy`, `val/predicted` and `val/margin`: the objective's, means over pairs. Every call
    uses the same pairs: the first `eval.max_examples`.

    Args:
      objective: that of `dpo` or `reward`.
      dtype: the compute type of the model.
    """
    if not len(data.val):
        return None

    def sums(variables: Variables, batch: base.Batch) -> jax.Array:
        found = objective.sums(cast(variables, jnp.dtype(dtype)), objective.prepare(batch), None)
        return jnp.stack([found.weight, found.loss, *(found.metrics[name] for name in _FIGURES)])

    size, examples = sharding.padded_rows(mesh, config.batch_size), data.count_held_out(config)
    sums_of = jax.jit(sums, out_shardings=sharding.replicated(mesh))

    def evaluate(variables: Variables) -> dict[str, float]:
        total = np.zeros(2 + len(_FIGURES))
        with processes.working("held-out pairs") as tell:
            for number, batch in enumerate(data.held_out(size, examples), 1):
                total += np.asarray(sums_of(variables, _placed(batch, mesh)), np.float64)
                tell(number)
        pairs, *means = total
        return dict(
            zip(("val/loss", *(f"val/{name}" for name in _FIGURES)), np.divide(means, pairs).tolist(), strict=True)
        )

    return evaluate


def judge(
    model: Transformer, variables: Variables, data: Packed, mesh: Mesh, batch_size: int, tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log p of the (chosen, rejected) answers of each pair to train on, and of each held out; nats, float32 [N, 2].

    Args:
      variables: those of the reference, in the types in which the step computes.
      batch_size: the rows that are judged at one time, rounded up to the mesh.
      tile: the number of tokens whose logits are in memory at one time; 0 for all.
    """
    size = sharding.padded_rows(mesh, batch_size)
    logp_of = jax.jit(lambda v, b: dpo.answer_logp(model, v, b, tile), out_shardings=sharding.replicated(mesh))

    def judged(val: bool) -> np.ndarray:
        total = len(data.val if val else data.train)
        found_Nx2 = np.zeros((total, 2), np.float32)
        done = 0
        with processes.working(
            "the reference judges held-out pairs" * val or "the reference judges pairs", total
        ) as tell:
            for batch, numbers_BxP in data.judged(val, size):
                there = numbers_BxP >= 0
                logp_BxPx2 = np.asarray(logp_of(variables, _placed(batch, mesh))).reshape(*there.shape, 2)
                found_Nx2[numbers_BxP[there]] = logp_BxPx2[there]
                done += int(there.sum())
                tell(done)
        return found_Nx2

    with jax.set_mesh(mesh):
        return judged(False), judged(True)


def _placed(batch: Batch, mesh: Mesh) -> base.Batch:
    """A batch on the mesh, given all its rows."""
    size, length = batch["tokens"].shape
    local = sharding.local_rows(mesh, size)
    kinds = {True: sharding.batch_sharding(mesh), False: sharding.row_sharding(mesh)}
    placed = {name: kinds[x.shape[1] == length] for name, x in batch.items()}
    return sharding.to_global({name: x[local] for name, x in batch.items()}, mesh, size, placed)
