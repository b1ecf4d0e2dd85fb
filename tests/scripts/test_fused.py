"""The train step as NVIDIA's compiler gets it: attention in cuDNN's kernels, once a layer, and no scores kept."""

import functools
import json
import re

import fused
import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxlm import config
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices.sharding import make_mesh
from jaxlm.ops import attention_kernels
from jaxlm.ops.attention import attention
from jaxlm.step import parts
from jaxlm.step.objectives import lm

LAYERS, T = 2, 256


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch):
    """jax asks the device for these at tracing; there is none here."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92_000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda wanted: False)


@functools.cache
def lowered_step(backend: str) -> str:
    """The real step of a small grouped-query Llama in bfloat16, lowered for CUDA."""
    keys = {"n_layers": LAYERS, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 192, "vocab_size": 500}
    keys |= {"dtype": "bfloat16", "attention": backend}
    overrides = ["workdir=w", "data.dir=d", "train.batch_size=2", f"train.seq_len={T}", "loss.tile_tokens=128"]
    c = config.resolve(config_files.load("base", overrides + [f"model.{k}={v}" for k, v in keys.items()]))
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    made = parts.make(c, mesh, lm.make)
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in made.batch().items()}
    return jax.jit(made.step()).trace({}, made.abstract, batch).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("backend", ["cudnn", "cudnn_packed"])
def test_every_layer_is_fused_on_nvidia(backend):
    assert fused.check_attention(lowered_step(backend), backend, LAYERS, T) == fused.Attention(LAYERS, LAYERS, 0)


@pytest.mark.parametrize(("backend", "layers", "kernels"), [("xla", 2, 0), ("blocked", 2, 0), ("cudnn", 3, 2)])
def test_an_unfused_step_and_a_layer_too_few_are_seen(backend, layers, kernels):
    text = lowered_step(backend)
    line = f"is not fused: {kernels} forward and {kernels} backward kernels for {layers} layers"
    with pytest.raises(RuntimeError, match=line):
        fused.check_attention(text, "cudnn", layers, T)
    assert (fused.attention_calls(text, "cudnn", T).score_products > 0) == (backend == "xla")


@pytest.mark.parametrize("backend", ["tokamax", "pallas"])
def test_kernels_of_one_name_must_be_two_to_a_layer(backend):
    """Else a backward pass without any would pass."""
    target = {"tokamax": "mosaic_gpu_v2", "pallas": "__gpu$xla.gpu.triton"}[backend]
    call = f'%c = (bf16[2]{{0}}) custom-call(%q), custom_call_target="{target}"\n'
    fused.check_attention(call * 4, backend, LAYERS, T)
    with pytest.raises(RuntimeError, match="is not fused"):
        fused.check_attention(call * 3, backend, LAYERS, T)


def test_scores_are_seen_in_compiled_programs():
    q = jnp.ones((1, 32, 2, 16))
    run = jax.jit(jax.grad(lambda q: attention(q, q, q, backend="xla").sum()))
    text = run.lower(q).compile().as_text()
    assert fused.attention_calls(text, "cudnn", 32).score_products > 0
    assert fused.attention_calls(text, "cudnn", 31).score_products == 0


SHAPES = {"q": (2, T, 4, 64), "k": (2, T, 2, 64), "v": (2, T, 2, 64)}


def calls(function, *arrays) -> dict[str, tuple[dict, str]]:
    """Name -> (config, types) of the packed custom calls of a gradient, lowered for CUDA."""
    qkv = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES.values()]

    def loss(q, k, v, *rest):
        return function(q, k, v, *rest).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*qkv, *arrays).lower(lowering_platforms=("cuda",)).as_text()
    pattern = r'custom_call @(__cudnn\$fmhaSoftmax\w*)\(.*?backend_config = "(.*?)", (operand_layouts.*)'
    return {
        name: (json.loads(raw.replace("\\22", '"'))["cudnn_fmha_backend_config"], types)
        for name, raw, types in re.findall(pattern, text)
    }


def test_packed_calls_are_those_of_jax():
    """The same configuration, operand and result types and layouts that jax's own packed call has."""
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    ours = calls(
        lambda q, k, v, ids: attention_kernels.packed_attention(q, k, v, ids, 0.125, 4, lambda q, k, v, ids: q), ids
    )
    lengths, offsets = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (4, 5))

    def theirs(q, k, v, lengths, offsets):
        packed = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
        return cudnn.dot_product_attention(q, k, v, **packed, scale=0.125, mask_type=cudnn.MaskType.PADDING_CAUSAL)

    want = calls(theirs, lengths, offsets)
    assert list(ours) == list(want) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for name, (settings, types) in ours.items():
        wanted, wanted_types = want[name]
        wanted["intermediate_tensor_shape"]["layout"] = {"minor_to_major": ["3", "2", "1", "0"]}
        assert settings == wanted
        assert types == wanted_types


def test_the_packed_step_chooses_on_the_device_twice_a_layer():
    """Forward and backward: the masked kernel is there for batches with too many documents."""
    pattern = rf"tensor<2x1x{T}x{T}xbf16>"
    assert re.search(pattern, lowered_step("cudnn"))
    assert not re.findall(r"stablehlo\.case|stablehlo\.if", lowered_step("cudnn"))
    packed = lowered_step("cudnn_packed")
    assert len(re.findall(r"stablehlo\.case|stablehlo\.if", packed)) == 2 * LAYERS
    fmha = [line for line in packed.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert fmha
    assert not any(re.search(pattern, line) for line in fmha)
