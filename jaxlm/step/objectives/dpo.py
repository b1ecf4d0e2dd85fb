"""Learns from pairs of answers to one prompt, of which one was preferred: DPO and its relatives.

Most losses compare the policy with a reference, the model before the first step. Its log-probabilities come from a second
forward pass without the trained adapter, if that changes nothing at first (new LoRA), else from `batch["reference"]`.

A pair is two neighbouring segments of a row, so that no microbatch splits it: pair p is segments 2p + 1 (chosen) and 2p + 2
(rejected), counted from 1. Both segments begin with the prompt, with weight 0. (The reward model's pairs are the same.)

Legend: B rows, T tokens, P pairs of a row.
"""

import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxlm.config import Config, DpoConfig, older
from jaxlm.data.batches.pack_examples import pairs_in_row
from jaxlm.devices import sharding
from jaxlm.models import adapters
from jaxlm.models.transformer import Transformer
from jaxlm.step.objectives import base

_WITHOUT_REFERENCE = ("orpo", "simpo")
_BY_TOKEN = ("ipo", "orpo", "simpo")


class Answers(typing.NamedTuple):
    """The answers on one side of the pairs, float32 [B, P]: log p, log-ratio to the reference, tokens, mean log-ratio."""

    logp: jax.Array
    ratio: jax.Array
    tokens: jax.Array
    mean: jax.Array


def has_reference(config: DpoConfig) -> bool:
    return config.loss not in _WITHOUT_REFERENCE


def by_token(config: DpoConfig) -> bool:
    return config.loss in _BY_TOKEN


def judged(config: Config) -> bool:
    """Returns True if batches must hold the reference's log-probabilities, `reference`; see the module's text.

    New LoRA adapters change nothing at first, so the model without them is the reference. Prompts and an origin's adapter do.
    """
    return has_reference(config.dpo) and not (config.adapter.kind == "lora" and config.origin_merge)


def at_start(config: DpoConfig) -> float | None:
    """Returns the loss of a policy that equals its reference, without the term of `nll_weight`; None without a reference."""
    if not has_reference(config):
        return None
    return 1 / (4 * config.beta**2) if config.loss == "ipo" else math.log(2)


def pair_shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a packed batch of pairs: `base.token_shapes`, and `pair` and `margin`, float32 [B, P].

    `pair` is 1 where there is a pair, else 0. `margin` is how much the chosen answer was preferred; 0 if unknown.
    """
    shape = (config.train.batch_size, pairs_in_row(config.train.seq_len))
    by_pair = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding.row_sharding(mesh))
    return base.token_shapes(config, mesh) | {"pair": by_pair, "margin": by_pair}


def pair_sums(loss_BxP: jax.Array, metrics: dict[str, jax.Array], pair_BxP: jax.Array) -> base.Sums:
    """Returns the sums of the loss and of each metric [B, P] over the real pairs; the weight is the number of pairs."""
    return base.Sums(
        _total(loss_BxP, pair_BxP), jnp.sum(pair_BxP), {name: _total(x, pair_BxP) for name, x in metrics.items()}
    )


def _total(x_BxP: jax.Array, pair_BxP: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(pair_BxP > 0, x_BxP, 0))


def accuracy(margin_BxP: jax.Array) -> jax.Array:
    """Returns 1 for each margin above 0, 1/2 for 0, 0 below, [B, P]."""
    return (jnp.sign(margin_BxP) + 1) / 2


def shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch: `pair_shapes` and, if `judged`, `reference` [B, 2P]: log p of each answer, in nats."""
    batch = pair_shapes(config, mesh)
    if judged(config):
        rows, count = batch["pair"].shape
        batch["reference"] = jax.ShapeDtypeStruct((rows, 2 * count), jnp.float32, sharding=batch["pair"].sharding)
    return batch


def answer_logp(model: Transformer, variables: base.Variables, batch: base.Batch, tile: int) -> jax.Array:
    """Returns log p(answer) of each segment in nats, float32 [B, 2P]: the sum over its tokens, by their weights.

    There is no dropout, so that policy and reference differ only by training.
    """
    logp_BxT = base.token_logp(model, variables, batch, tile) * batch["weights"]
    return base.by_segment(logp_BxT, batch["segment_ids"], 2 * batch["pair"].shape[1])


def make(model: Transformer, config: Config) -> base.Objective:
    """Returns the objective of `dpo.loss`, the mean over pairs, with `nll_weight` times the chosen answers' cross-entropy.

    The metrics are means over pairs: "margin", the chosen answer's reward less the rejected one's; "accuracy", the share
    of margins above 0 (0 counts half); "predicted", the probability that the model gives to the preference as it is labelled,
    to be compared with that share; "chosen_reward" and "rejected_reward", beta times the log-ratio to the reference
    (by token for ipo, orpo and simpo, whose losses take means); "chosen_logp" and "rejected_logp", nats an
    answer; "length_margin", how many tokens the chosen answer is longer; "nll", nats a token of the chosen answers.

    Raises:
      ConfigError: the loss was removed (`older.check_trains`).
    """
    older.check_trains(config)
    c, tile = config.dpo, config.loss.tile_tokens
    from_batch, nll_weight = judged(config), c.nll_weight + (c.loss == "orpo")

    def sums(variables: base.Variables, batch: base.Batch, key: jax.Array | None) -> base.Sums:
        del key
        logp = answer_logp(model, variables, batch, tile)
        reference = jnp.zeros_like(logp)
        if from_batch:
            reference = batch["reference"]
        elif has_reference(c):
            frozen = {name: part for name, part in variables.items() if name not in adapters.COLLECTIONS}
            reference = jax.lax.stop_gradient(answer_logp(model, frozen, batch, tile))
        chosen, rejected = _sides(logp, reference, batch)
        nll = -chosen.logp * batch["nll_scale"][:, None]
        loss = _LOSSES[c.loss](c, chosen, rejected) + nll_weight * nll
        metrics = _metrics(c, chosen, rejected) | {"nll": nll}
        return pair_sums(loss, metrics, batch["pair"])

    return base.Objective(sums, shapes, prepare=prepare)


def prepare(batch: base.Batch) -> base.Batch:
    """Returns the batch with `nll_scale` [B], pairs / tokens of chosen answers: it makes a mean over pairs one over tokens."""
    pair = batch["pair"]
    tokens = base.by_segment(batch["weights"], batch["segment_ids"], 2 * pair.shape[1])[:, ::2]
    scale = jnp.sum(pair) / jnp.maximum(_total(tokens, pair), 1)
    return batch | {"nll_scale": jnp.broadcast_to(scale, pair.shape[:1])}


def _sides(logp: jax.Array, reference: jax.Array, batch: base.Batch) -> tuple[Answers, Answers]:
    """Returns (chosen answers, rejected answers), from the log-probabilities by segment, [B, 2P]."""
    tokens = base.by_segment(batch["weights"], batch["segment_ids"], logp.shape[1])
    ratio = logp - reference
    by_segment = Answers(logp, ratio, tokens, ratio / jnp.maximum(tokens, 1))
    return Answers(*(x[:, ::2] for x in by_segment)), Answers(*(x[:, 1::2] for x in by_segment))


def _metrics(c: DpoConfig, chosen: Answers, rejected: Answers) -> dict[str, jax.Array]:
    for_chosen, for_rejected = (c.beta * (side.mean if by_token(c) else side.ratio) for side in (chosen, rejected))
    margin = for_chosen - for_rejected
    return {
        "margin": margin,
        "accuracy": accuracy(margin),
        "predicted": jax.nn.sigmoid(margin),
        "chosen_reward": for_chosen,
        "rejected_reward": for_rejected,
        "chosen_logp": chosen.logp,
        "rejected_logp": rejected.logp,
        "length_margin": chosen.tokens - rejected.tokens,
    }


def _sigmoid(c: DpoConfig, chosen: Answers, rejected: Answers) -> jax.Array:
    """DPO (arXiv:2305.18290); with label smoothing cDPO (https://ericmitchell.ai/cdpo.pdf)."""
    logits, flipped = c.beta * (chosen.ratio - rejected.ratio), c.label_smoothing
    return -(1 - flipped) * jax.nn.log_sigmoid(logits) - flipped * jax.nn.log_sigmoid(-logits)


def _robust(c: DpoConfig, chosen: Answers, rejected: Answers) -> jax.Array:
    """Robust DPO: unbiased if a share of `label_smoothing` of the labels is swapped (arXiv:2403.00409)."""
    logits, flipped = c.beta * (chosen.ratio - rejected.ratio), c.label_smoothing
    kept = -(1 - flipped) * jax.nn.log_sigmoid(logits) + flipped * jax.nn.log_sigmoid(-logits)
    return kept / (1 - 2 * flipped)


def _ipo(c: DpoConfig, chosen: Answers, rejected: Answers) -> jax.Array:
    """IPO (arXiv:2310.12036), with means over tokens, as in its authors' code and TRL."""
    return jnp.square(chosen.mean - rejected.mean - 1 / (2 * c.beta))


def _orpo(c: DpoConfig, chosen: Answers, rejected: Answers) -> jax.Array:
    """The odds ratio of ORPO (arXiv:2403.07691), without its cross-entropy."""

    def log_odds(side: Answers) -> jax.Array:
        logp = jnp.minimum(side.mean, -1e-7)  # the odds of probability 1 are infinite
        return logp - _log1mexp(logp)

    return -c.beta * jax.nn.log_sigmoid(log_odds(chosen) - log_odds(rejected))


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - e^x) for x < 0, exact for small and large -x (Maechler 2012); the branch not taken gets a harmless value."""
    near = x > -math.log(2)
    small, large = jnp.where(near, x, -math.log(2)), jnp.where(near, -math.log(2), x)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


def _simpo(c: DpoConfig, chosen: Answers, rejected: Answers) -> jax.Array:
    """SimPO (arXiv:2405.14734)."""
    return -jax.nn.log_sigmoid(c.beta * (chosen.mean - rejected.mean) - c.margin)


_LOSSES: dict[str, Callable[[DpoConfig, Answers, Answers], jax.Array]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "robust": _robust,
    "orpo": _orpo,
    "simpo": _simpo,
}
