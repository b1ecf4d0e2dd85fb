"""Parity with Hugging Face in float32: logits, loss and every gradient, from random weights copied over.

All tolerances are 1e-4 of the largest value of the tensor compared.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.interop import hf_config

if typing.TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.parity


def theirs(cfg: config.ModelConfig, params) -> "torch.nn.Module":
    """The Hugging Face model of our config, through our config.json, with our weights."""
    import torch
    import transformers

    fields = dict(hf_config.content(cfg))
    kind = getattr(transformers, fields.pop("architectures")[0])
    settings = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    settings._attn_implementation = "eager"
    model = kind(settings).eval()
    state = {name: torch.from_numpy(value.copy()) for name, value in tiny_hf.params_to_hf(params, cfg).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if cfg.tie_embeddings else set())
    return model


def relative(ours, reference) -> float:
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert ours.shape == reference.shape
    return np.abs(ours - reference).max() / np.abs(reference).max()


def worst_gap(cfg: config.ModelConfig, params, reference: "torch.nn.Module", tokens) -> dict[str, float]:
    """The relative gap of the logits, of the loss, and of each gradient under its Hugging Face name."""
    import torch

    model = models.build(cfg, "xla")

    @tiny.jit
    def ours(params):
        def loss(params):
            scores = tiny.logits(model, params, tokens)
            logp = jax.nn.log_softmax(scores[:, :-1])
            return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], -1)), scores

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, scores), grads = ours(params)
    ids = torch.from_numpy(np.array(tokens, np.int64))
    out = reference(ids, labels=ids)
    reference.zero_grad()
    out.loss.backward()
    gaps = {"logits": relative(scores, out.logits.detach()), "loss": relative(loss, out.loss.item())}
    named = dict(reference.named_parameters())
    ours_named = tiny_hf.params_to_hf(grads, cfg)
    assert set(ours_named) == set(named)
    return gaps | {name: relative(grad, named[name].grad) for name, grad in ours_named.items()}


@pytest.mark.parametrize("case", ["llama3_scaling", "biases_wide_heads", "qwen3_qk_norm", "gpt2_untied"])
def test_logits_loss_and_every_gradient(case):
    import torch

    cfg = tiny.model_config(**tiny.EXPORTED[case])
    params = tiny.random_params(models.build(cfg, "xla"))
    tokens = tiny.packed_batch(cfg, batch=2)["tokens"]
    reference = theirs(cfg, params)
    gaps = worst_gap(cfg, params, reference, tokens)
    assert max(gaps.values()) < 1e-4, gaps
    # A model that differs in one setting is told apart.
    wrong = dataclasses.replace(cfg, norm_eps=1e-2)
    if cfg.family == "llama":
        wrong = dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, theta=30000.0))
    scores = tiny.jit(lambda p: tiny.logits(models.build(wrong, "xla"), p, tokens))(params)
    assert relative(scores, reference(torch.from_numpy(np.array(tokens, np.int64))).logits.detach()) > 1e-3
