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
from jaxlm.models.families import SwiGLU
from jaxlm.models.layers import Attention, RMSNorm, TokenInfo, rope_of
from jaxlm.ops.rope import rope_tables

if typing.TYPE_CHECKING:
    import torch

LLAMA3 = {"scaling": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 16}
CASES = {
    "llama_gqa_tied": {"n_kv_heads": 2, "tie_embeddings": True},
    "llama_untied_theta": {"n_kv_heads": 4, "tie_embeddings": False, "rope_theta": 500000.0},
    "llama_llama3_scaling": {"rope_theta": 500000.0} | {f"rope_{k}": v for k, v in LLAMA3.items()},
    "llama_linear_scaling": {"rope_scaling": "linear", "rope_factor": 2.0},
    "llama_biases_wide_heads": {"bias": True, "head_dim": 16},
    "qwen3_qk_norm": {"qk_norm": True, "head_dim": 16},
    "gpt2_tied": {"family": "gpt2", "tie_embeddings": True},
    "gpt2_untied": {"family": "gpt2", "tie_embeddings": False},
}


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


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient(case):
    import torch

    cfg = tiny.model_config(**CASES[case])
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


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
    cfg = tiny.model_config(**CASES[case])
    params = tiny.random_params(models.build(cfg, "xla"))
    state = tiny_hf.params_to_hf(params, cfg)
    assert all(value.flags.c_contiguous and value.dtype == np.float32 for value in state.values())
    back = tiny_hf.params_of(state, cfg)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    again = tiny_hf.params_to_hf(back, cfg)
    assert all((again[name] == value).all() for name, value in state.items())
    assert back["embed"]["embedding"].shape[0] == cfg.padded_vocab_size
    assert not back["embed"]["embedding"][cfg.vocab_size :].any()
    if cfg.tie_embeddings:
        tiny_hf.params_of(state | {"lm_head.weight": next(iter(state.values()))}, cfg)


@pytest.mark.parity
def test_norm_attention_and_layer_alone():
    """Stage by stage, so that a failure of the whole says where it begins."""
    import torch

    cfg = tiny.model_config(rope_theta=500000.0, n_layers=1)
    model = models.build(cfg, "xla")
    params = tiny.random_params(model)
    reference = theirs(cfg, params).model
    layer, theirs_layer = params["layers_0"], reference.layers[0]
    x = np.random.default_rng(0).normal(size=(2, 16, cfg.d_model)).astype(np.float32)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    x_torch = torch.from_numpy(x)
    rotary = reference.rotary_emb(x_torch, torch.from_numpy(np.array(positions, np.int64)))
    mask = torch.full((1, 1, 16, 16), -torch.inf).triu(1)
    with torch.no_grad():
        norm = theirs_layer.input_layernorm(x_torch)
        attn = theirs_layer.self_attn(x_torch, position_embeddings=rotary, attention_mask=mask)[0]
        mlp = theirs_layer.mlp(x_torch)
        whole = theirs_layer(x_torch, position_embeddings=rotary, attention_mask=mask, position_ids=None)

    def apply(module, part, *args):
        return tiny.jit(lambda p, x: module.apply({"params": p}, x, *args))(part, x)

    assert relative(apply(RMSNorm(cfg.norm_eps), layer["attn_norm"]), norm) < 1e-4
    info, twice = (TokenInfo(p, None, rope_tables(p, rope_of(cfg))) for p in (positions, positions * 2))
    ours = apply(Attention(cfg, "xla", bias=False), layer["attn"], info)[0]
    assert relative(ours, attn) < 1e-4
    block = model.block("xla")
    assert relative(apply(SwiGLU(cfg), layer["mlp"]), mlp) < 1e-4
    assert relative(apply(block, layer, info)[0], whole) < 1e-4
    assert relative(apply(block, layer, twice)[0], whole) > 1e-3


def test_wrong_checkpoints_are_refused_in_one_line():
    cfg = tiny.model_config()
    state = tiny_hf.params_to_hf(tiny.random_params(models.build(cfg, "xla")), cfg)
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in (
        ({k: v for k, v in state.items() if k != name}, "is missing"),
        (state | {name: state[name].T}, "has shape"),
        (state | {"model.layers.2.mlp.up_proj.weight": state[name]}, "fit nowhere"),
    ):
        with pytest.raises(config.ConfigError, match=message) as error:
            tiny_hf.params_of(wrong, cfg)
        assert "\n" not in str(error.value)
    with pytest.raises(config.ConfigError, match="QK-norm"):
        hf_config.content(dataclasses.replace(cfg, qk_norm=True, bias=True))


def test_theta_is_written_twice():
    written = hf_config.content(tiny.model_config(rope_theta=500000.0))
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0
    assert written["vocab_size"] == 101
