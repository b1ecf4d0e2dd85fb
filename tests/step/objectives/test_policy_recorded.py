"""PPO as TRL 1.12 has it, from the recording that scripts/record_trl_ppo.py made: advantages, losses, gradients, to 1e-5."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.ops import returns
from jaxlm.step.objectives import policy

TRL = np.load(pathlib.Path(__file__).with_name("trl_ppo.npz"))
PER_ROW = 3


def packed_as_ours(x: np.ndarray) -> jnp.ndarray:
    """The recorded tokens [answers, longest], three answers to a row, each behind two tokens of a prompt."""
    made = np.full((len(x) // PER_ROW, PER_ROW * (2 + x.shape[1])), 7, x.dtype)
    for row, _, first, length, i in places():
        made[row, first : first + length] = x[i, :length]
    return jnp.asarray(made)


def places():
    """(row, number in the row, first token, tokens, answer) of each answer."""
    for i, length in enumerate(TRL["lengths"].tolist()):
        row, column = divmod(i, PER_ROW)
        before = TRL["lengths"][row * PER_ROW : i].sum() + 2 * column
        yield row, column, int(before) + 2, length, i


def recorded() -> tuple[config.Config, dict, jnp.ndarray]:
    """(config, the batch as it is judged, the scores by segment)."""
    names = ("gamma", "gae_lambda", "beta", "value_clip", "value_weight")
    keys = [f"policy.{name}={float(TRL[name])}" for name in names]
    keys += [f"policy.{name}={float(TRL['clip'])}" for name in ("clip_low", "clip_high")]
    keys += ["rollout.prompts=12", "rollout.answers=1", "train.batch_size=4", "train.seq_len=1024"]
    c = config.resolve(config_files.load("base", ["data.path=x", "program=ppo", "reward.function=a:b", *keys]))
    batch = {name: packed_as_ours(TRL[name]) for name in ("old", "reference", "values")}
    weights, ids = np.zeros(batch["old"].shape, np.float32), np.full(batch["old"].shape, PER_ROW + 1)
    for row, column, first, length, _ in places():
        weights[row, first : first + length], ids[row, first - 2 : first + length] = 1, column + 1
    batch |= {"weights": jnp.asarray(weights), "segment_ids": jnp.asarray(ids)}
    return c, batch, jnp.asarray(TRL["scores"].reshape(-1, PER_ROW))


def assert_recorded(got, name: str, weights) -> None:
    want = np.where(weights > 0, packed_as_ours(TRL[name]), 0)
    assert np.abs(np.where(weights > 0, got, 0) - want).max() <= 1e-5 * np.abs(want).max(), name


def test_advantages_and_returns_are_trls():
    c, batch, scores = recorded()
    raw = dataclasses.replace(c, policy=dataclasses.replace(c.policy, whiten=False))
    found = policy.advantages(raw, batch, scores, float(TRL["beta"]))
    for name in ("advantages", "returns"):
        assert_recorded(found[name], name, batch["weights"])
    assert_recorded(policy.advantages(c, batch, scores, float(TRL["beta"]))["advantages"], "whitened", batch["weights"])
    without = {name: x for name, x in batch.items() if name != "reference"}
    for other in (policy.advantages(raw, batch, scores, 0.0), policy.advantages(raw, without, scores, 0.07)):
        assert np.abs(other["advantages"] - found["advantages"]).max() > 0.01


def test_gae_is_trls_where_the_score_is_paid_behind_the_answer():
    inside = np.arange(TRL["old"].shape[1])[None] <= TRL["lengths"][:, None]
    on = returns.continues(inside, np.ones_like(inside, int))
    over = {"gamma": float(TRL["gamma"]), "lam": float(TRL["gae_lambda"])}
    found = returns.gae(TRL["padded_rewards"], TRL["values"], inside, on, **over)
    for got, name in zip(found, ("padded_advantages", "padded_returns"), strict=True):
        np.testing.assert_allclose(got, TRL[name], atol=1e-5 * np.abs(TRL[name]).max(), rtol=0)


def test_losses_and_gradients_of_ppo_are_trls():
    c, batch, _ = recorded()
    batch |= {"advantages": packed_as_ours(TRL["whitened"]), "returns": packed_as_ours(TRL["returns"])}
    batch |= {"sampler": batch["old"]}
    batch = policy.prepare(c, batch)

    def mean(logp, values):
        loss, told = policy.token_loss(c, batch, logp, values)
        rows = loss.shape[0]
        return jnp.sum(loss * batch["loss_scale"]) / rows, {
            name: jnp.sum(x * batch["token_scale"]) / rows for name, x in told.items()
        }

    new = packed_as_ours(TRL["new"]), packed_as_ours(TRL["new_values"])
    (loss, told), slopes = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)(*new)
    assert float(loss) == pytest.approx(float(TRL["loss"]), rel=1e-5)
    assert float(told["value_loss"]) == pytest.approx(float(TRL["value_loss"]), rel=1e-5)
    assert float(told["clip_share"]) == pytest.approx(float(TRL["clip_share"]), rel=1e-5)
    assert min(TRL["clip_share"], TRL["value_clip_share"]) > 0.05  # or clipping is not compared
    for got, name in zip(slopes, ("d_new", "d_new_values"), strict=True):
        assert_recorded(got, name, batch["weights"])
        assert not np.asarray(got)[batch["weights"] == 0].any()
