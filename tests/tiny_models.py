"""Small models for tests: a config by overrides, parameters that are nowhere zero, packed batches, a loss."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding, tree
from jaxlm.models import quantized
from jaxlm.models.params import abstract_params
from jaxlm.ops import block_codes

# Tests compile far longer than they compute.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# The compile option by which a program is made as users' are: see conftest. jax 0.11 knows no other way, and not the option.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}

BASE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 101, "max_seq_len": 64}
BASE["dtype"] = "float32"
_LLAMA3 = {"scaling": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 16}
EXPORTED = {  # a name -> the model's keys: each family and option that is exported
    "gqa_tied": {"n_kv_heads": 2, "tie_embeddings": True},
    "untied_theta": {"n_kv_heads": 4, "tie_embeddings": False, "rope_theta": 500000.0},
    "llama3_scaling": {"rope_theta": 500000.0} | {f"rope_{k}": v for k, v in _LLAMA3.items()},
    "linear_scaling": {"rope_scaling": "linear", "rope_factor": 2.0},
    "biases_wide_heads": {"bias": True, "head_dim": 16},
    "qwen3_qk_norm": {"qk_norm": True, "head_dim": 16, "n_kv_heads": 1},
    "qwen2_qkv_bias": {"qkv_bias": True, "tie_embeddings": False},
    "gpt2_tied": {"family": "gpt2", "tie_embeddings": True},
    "gpt2_untied": {"family": "gpt2", "tie_embeddings": False},
}


def model_config(**overrides) -> config.ModelConfig:
    """A resolved tiny config; `family="gpt2"` changes what it must; rope keys as `rope_theta`."""
    keys = BASE | ({"n_kv_heads": 0} if overrides.get("family") == "gpt2" else {}) | overrides
    flat = [f"model.{k.replace('rope_', 'rope.', 1)}={v}" for k, v in keys.items()]
    return config.resolve(config_files.load("base", ["data.path=x", "train.seq_len=32", *flat])).model


def sample_config(**settings) -> config.SampleConfig:
    """Settings of generation: greedy, but for what is given; no prompts."""
    greedy = {"prompts": (), "max_new_tokens": 4, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    sample = config.resolve(config_files.load("base", ["data.path=x"])).sample
    return dataclasses.replace(sample, **(greedy | settings))


def random_params(model, seed: int = 0) -> dict:
    """Random parameters of the model's shapes (numpy: nothing to compile), norms and biases off their neutral values."""
    rng = np.random.default_rng(seed)

    def draw(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(float(name.endswith("scale")), 0.1, leaf.shape), leaf.dtype)

    return tree.map_named(draw, models.abstract_params(model))


def packed_batch(cfg: config.ModelConfig, batch: int = 4, tokens: int = 24, seed: int = 0) -> dict:
    """Rows of three documents each, cut at places that differ by row."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, cfg.vocab_size, (batch, tokens + 1))
    positions, segments = np.zeros((2, batch, tokens), np.int32)
    for row in range(batch):
        cuts = [0, *sorted(rng.choice(np.arange(1, tokens), 2, replace=False)), tokens]
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = number + 1
    arrays = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "positions": positions, "segment_ids": segments}
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def loss(model, params, batch: dict, key=None) -> jax.Array:
    """Mean cross-entropy over all targets, padded columns masked, with dropout when a key is given."""
    cfg = model.config
    rngs = {} if key is None else {"dropout": key}
    inputs = (batch["tokens"], batch.get("positions"), batch.get("segment_ids"))
    hidden = model.apply({"params": params}, *inputs, train=key is not None, rngs=rngs)
    scores = (hidden @ models.head_kernel(params, cfg).astype(hidden.dtype)).astype(jnp.float32)
    scores = jnp.where(jnp.arange(scores.shape[-1]) < cfg.vocab_size, scores, -jnp.inf)
    logp = jax.nn.log_softmax(scores)
    return -jnp.mean(jnp.take_along_axis(logp, batch["targets"][..., None], -1))


def value_and_grads(model, params, batch: dict, key=None):
    return jit(jax.value_and_grad(lambda p, b, k: loss(model, p, b, k)))(params, batch, key)


def value(model, params, batch: dict, key=None):
    return jit(lambda p, b, k: loss(model, p, b, k))(params, batch, key)


def hidden(model, variables, batch: dict, **kwargs) -> jax.Array:
    """Hidden states (B, T, D), jitted; positions and segment ids where the batch has them."""
    names = ("tokens", "positions", "segment_ids")
    return jit(lambda v, b: model.apply(v, *(b.get(n) for n in names), **kwargs))(variables, batch)


def jit(fn):
    return jax.jit(fn, compiler_options=FAST_COMPILE)


def difference(a, b) -> float:
    """The largest over all leaves of max|a - b| / max|b|."""
    # Leaves below 1e-6 in both count as equal: the gradient of a key bias without RoPE is zero but for rounding.
    worst = 0.0
    for (name, x), (_, y) in zip(tree.named_leaves(a), tree.named_leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, name
        gap, size = np.abs(x - y).max(), np.abs(y).max()
        worst = max(worst, gap / max(size, 1e-6) if max(gap, size) > 1e-6 else 0.0)
    return worst


def thaw(frozen: quantized.Frozen, model) -> dict:
    """The model's parameters in float32, given what `quantized.freeze` returned: codes are decoded. A pure function."""
    kept = dict(tree.named_leaves(frozen))

    def leaf(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if f"params/{name}" in kept:
            return kept[f"params/{name}"].astype(jnp.float32)
        stem = f"quantized/{name.removesuffix('/kernel')}"
        coded = block_codes.Coded(kept[f"{stem}/codes"], kept[f"{stem}/scales"])
        return block_codes.decode(coded, shape.shape, jnp.float32)

    return tree.map_named(leaf, abstract_params(model))


def logits(model, params, tokens_BxT, positions_BxT=None, segment_ids_BxT=None):
    """The logits (B, T, V) in float32, without the padding columns, all of them in memory."""
    hidden_BxTxD = model.apply({"params": params}, tokens_BxT, positions_BxT, segment_ids_BxT)
    head_DxV = models.head_kernel(params, model.config)[:, : model.config.vocab_size]
    logits_BxTxV = jnp.einsum("btd,dv->btv", hidden_BxTxD, head_DxV, preferred_element_type=jnp.float32)
    return sharding.constrain(logits_BxTxV, "batch", "seq", "vocab")
