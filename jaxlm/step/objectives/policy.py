"""Learns from rewards of the policy's own answers: PPO (arXiv:1707.06347) and GRPO (arXiv:2402.03300) and its relatives.

A step is a whole iteration. Its batch holds answers that the policy has just generated, their log-probabilities by the
policy and the reference, and their advantages: how much better than expected they were. The step's updates make good answers
likelier, each at most by the clipped ratio. PPO's expectation is a learned scalar head, GRPO's the mean of a prompt's answers.

Each row holds `in_row` answers, its segments 1 to n, each after its prompt; padding is segment n + 1.

Legend: B rows, T tokens, S segments of a row (answers), F figures.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxlm.config import Config
from jaxlm.devices import sharding
from jaxlm.models.transformer import Transformer
from jaxlm.ops import returns
from jaxlm.step.objectives import base

VALUE = "value"  # the scalar head of PPO
FIGURES = ("reward", "reward_std", "flat_groups", "truncated", "unique", "answer_tokens", "top_word")
_OF_VALUES = ("explained_variance", "beta")
_LARGEST_ERROR = 0.2  # of the KL that counts, as a share of its target (arXiv:1909.08593)

Judge = typing.Callable[[base.Variables, base.Variables | None, base.Batch], dict[str, jax.Array]]


def figures(config: Config) -> tuple[str, ...]:
    """Returns the names of the rollout's figures of a whole step, in the order of the batch's `figures` [B, F].

    FIGURES are for both programs: mean and standard deviation of rewards; shares of prompts whose answers all got the same
    reward, of truncated answers and of different answers; mean tokens of an answer; the most frequent word's share of all
    words. PPO has two more: `returns.explained_variance`, and the weight of the KL penalty.
    """
    return FIGURES + _OF_VALUES if _has_values(config) else FIGURES


def in_row(config: Config) -> int:
    return config.rollout.prompts * config.rollout.answers // config.train.batch_size


def shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch: those of `base.token_shapes`, more arrays float32 [B, T], and `figures` [B, F].

    `weights` is 1 on the tokens of answers that count, as targets, else 0. By token there are `advantages`; log p(target) in
    nats by the policy before the step (`old`), by the decode engine (`sampler`) and, if `policy.reference`, by the reference
    (`reference`); for PPO `values`, before the step, and `returns`. All are ignored where the weight is 0. `figures` is the
    same in each row.
    """
    batch = base.token_shapes(config, mesh)
    names = ["advantages", "old", "sampler"]
    names += ["reference"] if config.policy.reference else []
    names += ["values", "returns"] if _has_values(config) else []
    by_row = (config.train.batch_size, len(figures(config)))
    told = jax.ShapeDtypeStruct(by_row, jnp.float32, sharding=sharding.row_sharding(mesh))
    return batch | {name: batch["weights"] for name in names} | {"figures": told}


def make(model: Transformer, config: Config) -> base.Objective:
    """Returns the objective of ppo or grpo: the mean of `token_loss` by `policy.average`, in epochs x minibatches updates.

    All metrics but the `figures` are means over the tokens of answers that count, NaN if none do. "entropy", "kl" and
    "sampler_gap" are of the old policy, which drew the answers before the step. "entropy": -log p, an unbiased estimate
    of the old policy's entropy, nats a token. "kl": the KL divergence from the old policy to the reference, nats a token, by
    the estimator k3 (http://joschu.net/blog/kl-approx.html). "sampler_gap": how far the decode engine's log p is from the
    trainer's. "ratio_kl": k3 of the KL divergence from the old policy to the present one. "clip_share": the share of tokens
    whose gradient is clipped away. "value_loss": of PPO's head, before its weight.

    PPO's `running` has "beta", the weight of the KL penalty, which begins at `policy.beta`; see `adapted`.
    """
    values, tile = _has_values(config), config.loss.tile_tokens

    def sums(variables: base.Variables, batch: base.Batch, key: jax.Array | None) -> base.Sums:
        hidden_BxTxD = base.hidden(model, variables, batch, key)
        logp_BxT = base.hidden_logp(model, variables, hidden_BxTxD, batch["targets"], tile)
        values_BxT = base.scalar(variables, VALUE, hidden_BxTxD) if values else None
        loss_BxT, told = token_loss(config, batch, logp_BxT, values_BxT)
        metrics = {name: jnp.sum(x_BxT * batch["token_scale"]) for name, x_BxT in told.items()}
        figures_F = jnp.sum(batch["figures"], axis=0)
        metrics |= {name: figures_F[i] for i, name in enumerate(figures(config))}
        rows = jnp.float32(logp_BxT.shape[0])
        return base.Sums(jnp.sum(loss_BxT * batch["loss_scale"]), rows, metrics)

    return base.Objective(
        sums,
        shapes,
        heads=(VALUE,) if values else (),
        passes=config.policy.epochs,
        minibatches=config.policy.minibatches,
        running={"beta": config.policy.beta} if values else {},
        prepare=functools.partial(prepare, config),
        adapt=functools.partial(adapted, config) if values and config.policy.kl_target else base.unchanged,
    )


def prepare(config: Config, batch: base.Batch) -> base.Batch:
    """Returns the batch of an update, whose weight is the number of rows, with `loss_scale` and `token_scale` [B, T].

    Such a scaled sum, divided by the number of rows, is a mean: with `loss_scale` that of `policy.average`, with
    `token_scale` the mean over the tokens of answers.
    """
    weights_BxT, ids_BxT, n = batch["weights"], batch["segment_ids"], in_row(config)
    rows = weights_BxT.shape[0]
    total = jnp.sum(weights_BxT)
    by_token = rows / jnp.maximum(total, 1)
    if config.policy.average == "token":
        scale = by_token
    elif config.policy.average == "length":
        scale = 1 / (n * config.rollout.max_new_tokens)
    else:  # answers without a counted token are zeros in the mean
        length_BxS = base.by_segment(weights_BxT, ids_BxT, n)
        scale = base.from_segments(1 / (n * jnp.maximum(length_BxS, 1)), ids_BxT)
    # The mean over no tokens is NaN: 0 would look like an entropy.
    token_scale_BxT = jnp.where(total > 0, weights_BxT * by_token, jnp.nan)
    return batch | {"loss_scale": weights_BxT * scale, "token_scale": token_scale_BxT}


def token_loss(
    config: Config, batch: base.Batch, logp_BxT: jax.Array, values_BxT: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the loss, the metrics by name) of each token, float32 [B, T].

    The loss is the clipped surrogate of PPO, -min(ratio * A, clip(ratio) * A). With `policy.ratio` "answer" all tokens of an
    answer share one ratio, the exponential of their mean log-ratio (GSPO, arXiv:2507.18071). With `rollout.importance_cap`
    the loss is multiplied by min(p_old / p_sampler, cap). GRPO adds beta times the KL divergence to
    the reference (k3); PPO adds `value_weight` times the value's loss.
    """
    c, cap, counts_BxT = config.policy, config.rollout.importance_cap, batch["weights"] > 0

    def difference(a_BxT: jax.Array, b_BxT: jax.Array) -> jax.Array:
        return jnp.where(counts_BxT, a_BxT - b_BxT, 0)  # other tokens may hold any value

    old_BxT = batch["old"]
    moved_BxT = difference(logp_BxT, old_BxT)
    off_BxT = difference(old_BxT, batch["sampler"])
    advantages_BxT = jnp.where(counts_BxT, batch["advantages"], 0)
    told = {"entropy": -old_BxT, "ratio_kl": _k3(moved_BxT), "sampler_gap": jnp.abs(off_BxT)}
    ratio_BxT = jnp.exp(moved_BxT if c.ratio == "token" else _mean_of_answer(moved_BxT, batch, in_row(config)))
    clipped_BxT = jnp.clip(ratio_BxT, 1 - c.clip_low, 1 + c.clip_high)
    loss_BxT = -jnp.minimum(ratio_BxT * advantages_BxT, clipped_BxT * advantages_BxT)
    told["clip_share"] = clipped_BxT * advantages_BxT < ratio_BxT * advantages_BxT
    if cap:
        loss_BxT *= jnp.minimum(jnp.exp(off_BxT), cap)
    if c.reference:
        told["kl"] = _k3(difference(batch["reference"], old_BxT))
        if config.program == "grpo" and c.beta:
            loss_BxT += c.beta * _k3(difference(batch["reference"], logp_BxT))
    if values_BxT is not None:
        told["value_loss"] = _value_loss(c.value_clip, batch, values_BxT)
        loss_BxT += c.value_weight * told["value_loss"]
    return loss_BxT, {name: jnp.where(counts_BxT, x_BxT, 0) for name, x_BxT in told.items()}


def _k3(log_ratio: jax.Array) -> jax.Array:
    """r - 1 - log r, whose mean under q is KL(q || p) if r = p / q; never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def _mean_of_answer(x_BxT: jax.Array, batch: base.Batch, n: int) -> jax.Array:
    """Returns, for each token, the mean of `x_BxT` over its answer's tokens that count; elsewhere `x_BxT` must be 0."""
    sum_BxS, length_BxS = (base.by_segment(x, batch["segment_ids"], n) for x in (x_BxT, batch["weights"]))
    return base.from_segments(sum_BxS / jnp.maximum(length_BxS, 1), batch["segment_ids"])


def _value_loss(limit: float, batch: base.Batch, values_BxT: jax.Array) -> jax.Array:
    """Returns half max((v - return)^2, (clipped v - return)^2), [B, T]; v is clipped to the old value +- `limit`."""
    old_BxT, returns_BxT = (jnp.where(batch["weights"] > 0, batch[name], 0) for name in ("values", "returns"))
    near_BxT = jnp.clip(values_BxT, old_BxT - limit, old_BxT + limit)
    squares_BxT = [jnp.square(v_BxT - returns_BxT) for v_BxT in (values_BxT, near_BxT)]
    return 0.5 * jnp.where(batch["weights"] > 0, jnp.maximum(*squares_BxT), 0)


def adapted(config: Config, running: base.Running, metrics: dict[str, jax.Array]) -> base.Running:
    """Returns `running` with beta a little higher if the KL is above `policy.kl_target`, lower if below (arXiv:1909.08593).

    A relative error e, at most 20% either way, changes beta by the share e per `policy.kl_horizon` answers.
    """
    c, answers = config.policy, config.rollout.prompts * config.rollout.answers
    kl = jnp.nan_to_num(metrics["kl"], nan=c.kl_target)  # NaN: over no tokens
    error = jnp.clip(kl / c.kl_target - 1, -_LARGEST_ERROR, _LARGEST_ERROR)
    return running | {"beta": running["beta"] * (1 + error * answers / c.kl_horizon)}


def judge(model: Transformer, config: Config) -> Judge:
    """Returns a function (variables, the reference's variables or None, batch) -> name -> array by token, float32 [B, T].

    "old": the policy's log p(target), in nats. "reference": the reference's, if given. "values": PPO's head's. There is no
    dropout, and a call takes at most as many rows at once as the train step. Both variables are in the compute type.
    """
    rows = config.train.batch_size // config.policy.minibatches
    parts = config.train.batch_size // min(config.train.microbatch_size, rows)
    values, tile = _has_values(config), config.loss.tile_tokens

    def judged(variables: base.Variables, reference: base.Variables | None, batch: base.Batch) -> dict[str, jax.Array]:
        def of_rows(batch: base.Batch) -> dict[str, jax.Array]:
            hidden_BxTxD = base.hidden(model, variables, batch, None)
            scores = {"old": base.hidden_logp(model, variables, hidden_BxTxD, batch["targets"], tile)}
            if values:
                scores["values"] = base.scalar(variables, VALUE, hidden_BxTxD)
            if reference is not None:
                scores["reference"] = base.token_logp(model, reference, batch, tile)
            return scores

        if parts == 1:
            return of_rows(batch)
        split = jax.tree.map(functools.partial(base.split_rows, parts=parts), batch)
        return jax.tree.map(base.join_rows, jax.lax.map(of_rows, split))

    return judged


def advantages(config: Config, batch: base.Batch, scores_BxS: jax.Array, beta: jax.typing.ArrayLike) -> base.Batch:
    """Returns PPO's "advantages" and "returns" by token, float32 [B, T], both 0 where the weight is 0.

    Each token of an answer costs beta * (log p - the reference's log p), the last token also earns the answer's score
    (arXiv:1909.08593). `returns.gae` makes advantages of these rewards; `policy.whiten` whitens them over the whole batch.
    """
    c, weights_BxT, ids_BxT = config.policy, batch["weights"], batch["segment_ids"]
    on_BxT = returns.continues(weights_BxT, ids_BxT)
    rewards_BxT = jnp.where(on_BxT, 0, base.from_segments(scores_BxS, ids_BxT))
    if "reference" in batch:
        rewards_BxT -= beta * (batch["old"] - batch["reference"])
    by_gae = functools.partial(returns.gae, gamma=c.gamma, lam=c.gae_lambda)
    advantages_BxT, returns_BxT = by_gae(rewards_BxT, batch["values"], weights_BxT, on_BxT)
    if c.whiten:
        advantages_BxT = returns.whiten(advantages_BxT, weights_BxT)
    return {"advantages": advantages_BxT, "returns": returns_BxT}


def _has_values(config: Config) -> bool:
    return config.program == "ppo"
