"""Held-out pairs and the judgement of a reference: those of each pair alone, whatever the rows and the mesh."""

import dataclasses

import numpy as np
import pytest
import tiny_chats
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.eval import held_out
from jaxlm.step.objectives import dpo, reward

KEYS = ["data.path=x", "train.seq_len=192", "eval.batch_size=4", "eval.max_examples=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tiny_chats.pairs(tmp_path_factory.mktemp("pairs") / "p.jsonl", 30)
    return tiny_chats.make(path, tiny_chats.tokenizer(), pairs=True)


@pytest.fixture(scope="module")
def model(data):
    return models.build(tiny.model_config(vocab_size=data.data.vocab_size, max_seq_len=192, n_layers=1), "xla")


@pytest.fixture(scope="module")
def judged(data, model):
    return held_out.judge(model, {"params": tiny.random_params(model)}, data, make_mesh(), 4, 0)


def test_a_reference_judges_each_pair(data, model, judged):
    params = tiny.random_params(model)
    logits_of = tiny.jit(lambda tokens: tiny.logits(model, params, tokens))
    for said, source in zip(judged, (data.train, data.val), strict=True):
        assert said.shape == (len(source), 2)
        for number in (0, len(source) - 1):
            for ids, kinds, got in zip(*zip(*source.segments(number), strict=True), said[number], strict=True):
                row = np.pad(ids, (0, 192 - len(ids)))[None]  # alone in it; what comes behind is not seen
                logits = np.asarray(logits_of(row)[0, : len(ids) - 1], np.float64)
                logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                want = logp[np.arange(len(ids) - 1), ids[1:]][kinds[1:] > 0].sum()
                assert got == pytest.approx(want, rel=1e-4)


def test_on_a_mesh_it_says_the_same(data, model, judged):
    on = held_out.judge(model, {"params": tiny.random_params(model)}, data, make_mesh(data=2, context=2), 4, 7)
    for got, want in zip(on, judged, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def settings(model, *keys) -> config.Config:
    return dataclasses.replace(config.resolve(config_files.load("base", [*KEYS, *keys])), model=model.config)


def test_held_out_figures_are_means_over_pairs(data, model, judged):
    params = {"params": tiny.random_params(model, seed=1)}
    c = settings(model, "dpo.beta=0.5")
    given, (_, reference) = data.with_reference(*judged), judged
    _, policy = held_out.judge(model, params, data, make_mesh(), 4, 0)
    margins = 0.5 * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    evaluate = held_out.of_pairs(dpo.make(model, c), given, make_mesh(), c.eval, "float32")
    assert evaluate(params) == {
        "val/loss": pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-4),
        "val/accuracy": pytest.approx((margins > 0).mean()),
        "val/predicted": pytest.approx((1 / (1 + np.exp(-margins))).mean(), rel=1e-4),
        "val/margin": pytest.approx(margins.mean(), rel=1e-4),
    }
    fewer = dataclasses.replace(c.eval, max_examples=2)
    assert held_out.of_pairs(dpo.make(model, c), given, make_mesh(), fewer, "float32")(params)[
        "val/margin"
    ] != pytest.approx(margins.mean(), rel=1e-4)


def test_a_reward_models_head_is_held_to_the_same_pairs(data, model):
    c = settings(model)
    new = {"params": tiny.random_params(model), "score": {"score_head": {"kernel": np.zeros(model.config.d_model)}}}
    evaluate = held_out.of_pairs(reward.make(model, c), data, make_mesh(), c.eval, "float32")
    found = evaluate(new)
    margin = float(data.val.margins_E.mean())
    assert found["val/accuracy"] == 0.5
    assert found["val/loss"] > np.log(2) + margin / 4  # the pairs' margins count


def test_without_held_out_pairs_nothing_is_measured(data, model):
    c = settings(model)
    none = dataclasses.replace(data, val=data.val.take(np.zeros(len(data.val), bool)))
    assert held_out.of_pairs(dpo.make(model, c), none, make_mesh(), c.eval, "float32") is None
