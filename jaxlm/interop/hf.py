"""Translates parameters and configs to and from Hugging Face transformers (Llama, Qwen3, GPT-2), with numpy alone.

RoPE is half-split in both, so nothing is permuted. Every returned array is contiguous, because `safetensors.numpy`
silently scrambles arrays that are not. Legend: D model, F feed-forward, N query heads, K key-value heads, H head dim, V
vocabulary, Vp vocabulary padded to a multiple of 128.
"""

import math
import typing

import jax
import numpy as np

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.models.params import input_axes
from jaxlm.tree import layer_name

StateDict = typing.Mapping[str, np.ndarray]


def params_from_hf(state_dict: StateDict, config: ModelConfig) -> dict:
    """Returns jaxlm's parameters (float32 numpy, in a tree like that of `models.init_params`) for a Hugging Face state dict.

    The padding rows of the vocabulary become zero.

    Raises:
      ConfigError: a tensor is missing, has another shape than in the config, or has no place in jaxlm's tree.
    """
    reader = _Reader(state_dict)
    params = _llama_from_hf(reader, config) if config.family == "llama" else _gpt2_from_hf(reader, config)
    reader.check_all_read(config)
    return params


def params_to_hf(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the Hugging Face state dict (float32 numpy) for jaxlm's parameters.

    It has no padding rows of the vocabulary, and no `lm_head` if embeddings are tied.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    state = _llama_to_hf(params, config) if config.family == "llama" else _gpt2_to_hf(params, config)
    return {name: np.ascontiguousarray(value) for name, value in state.items()}


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Returns the content of Hugging Face's config.json for a model, without the ids of special tokens.

    It has the rotary settings twice, for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`): a
    version that does not find its settings silently takes theta 10000.

    Raises:
      ConfigError: Hugging Face has no architecture for this model.
    """
    return _gpt2_config(config) if config.family == "gpt2" else _llama_config(config)


# ---------------------------------------------------------------------------------------------------------------------
# Reading and padding


class _Reader:
    """Reads tensors of a state dict by name and shape, and keeps count of what was read."""

    def __init__(self, state_dict: StateDict):
        self.state, self.read = dict(state_dict), set()

    def __call__(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.state:
            raise ConfigError(f"Hugging Face checkpoint: tensor {name} is missing")
        value = np.asarray(self.state[name], np.float32)
        if value.shape != shape:
            raise ConfigError(f"Hugging Face checkpoint: {name} has shape {value.shape}, the config says {shape}")
        self.read.add(name)
        return value

    def check_all_read(self, config: ModelConfig) -> None:
        # Buffers that old checkpoints carry, and the copy of the embedding that tied models are saved with.
        harmless = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
        tied = ("lm_head.weight",) if config.tie_embeddings else ()
        left = [n for n in self.state if n not in self.read and not n.endswith(harmless) and n not in tied]
        if left:
            raise ConfigError(f"Hugging Face checkpoint: {len(left)} tensors fit nowhere, first {left[0]}")


def _pad_rows(table_VxD: np.ndarray, config: ModelConfig) -> np.ndarray:
    return np.pad(table_VxD, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))


def _head_from_hf(read: _Reader, config: ModelConfig) -> dict:
    if config.tie_embeddings:
        return {}
    table_VxD = read("lm_head.weight", (config.vocab_size, config.d_model))
    return {"head": {"kernel": np.ascontiguousarray(_pad_rows(table_VxD, config).T)}}


# ---------------------------------------------------------------------------------------------------------------------
# LLaMA: torch Linear holds (out, in), with out = heads x head dim


def _llama_projections(config: ModelConfig) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns (our path, their path, our kernel's shape) for each projection of a layer."""
    c = config
    d, n, k, h = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
    return [
        ("attn/q", "self_attn.q_proj", (d, n, h)),
        ("attn/k", "self_attn.k_proj", (d, k, h)),
        ("attn/v", "self_attn.v_proj", (d, k, h)),
        ("attn/o", "self_attn.o_proj", (n, h, d)),
        ("mlp/gate", "mlp.gate_proj", (d, c.d_ff)),
        ("mlp/up", "mlp.up_proj", (d, c.d_ff)),
        ("mlp/down", "mlp.down_proj", (c.d_ff, d)),
    ]


def _llama_norms(config: ModelConfig) -> list[tuple[str, str]]:
    norms = [("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
    qk_norms = [("attn/q_norm", "self_attn.q_norm"), ("attn/k_norm", "self_attn.k_norm")]
    return norms + (qk_norms if config.qk_norm else [])


def _set(tree: dict, path: str, value: np.ndarray) -> None:
    *parents, last = path.split("/")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _get(tree: dict, path: str) -> np.ndarray:
    for part in path.split("/"):
        tree = tree[part]
    return tree


def _split_shape(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (input dimensions, output dimensions) of a kernel's shape."""
    inputs = input_axes(f"{path}/kernel")
    return shape[:inputs], shape[inputs:]


def _llama_from_hf(read: _Reader, config: ModelConfig) -> dict:
    c = config
    params: dict = {"embed": {"embedding": _pad_rows(read("model.embed_tokens.weight", (c.vocab_size, c.d_model)), c)}}
    params["final_norm"] = {"scale": read("model.norm.weight", (c.d_model,))}
    for i in range(c.n_layers):
        layer, theirs = params.setdefault(layer_name(i), {}), f"model.layers.{i}"
        for ours, name in _llama_norms(c):
            size = c.head_dim if ours.startswith("attn/") else c.d_model
            _set(layer, f"{ours}/scale", read(f"{theirs}.{name}.weight", (size,)))
        for ours, name, shape in _llama_projections(c):
            ins, outs = _split_shape(ours, shape)
            kernel = read(f"{theirs}.{name}.weight", (math.prod(outs), math.prod(ins))).T
            _set(layer, f"{ours}/kernel", np.ascontiguousarray(kernel).reshape(shape))
            if c.bias:
                _set(layer, f"{ours}/bias", read(f"{theirs}.{name}.bias", (math.prod(outs),)).reshape(outs))
    return params | _head_from_hf(read, c)


def _llama_to_hf(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    c = config
    state = {
        "model.embed_tokens.weight": params["embed"]["embedding"][: c.vocab_size],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    for i in range(c.n_layers):
        layer, theirs = params[layer_name(i)], f"model.layers.{i}"
        for ours, name in _llama_norms(c):
            state[f"{theirs}.{name}.weight"] = _get(layer, f"{ours}/scale")
        for ours, name, shape in _llama_projections(c):
            ins, _ = _split_shape(ours, shape)
            state[f"{theirs}.{name}.weight"] = _get(layer, f"{ours}/kernel").reshape(math.prod(ins), -1).T
            if c.bias:
                state[f"{theirs}.{name}.bias"] = _get(layer, f"{ours}/bias").reshape(-1)
    if not c.tie_embeddings:
        state["lm_head.weight"] = params["head"]["kernel"][:, : c.vocab_size].T
    return state


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2: Conv1D holds (in, out) as we do, q, k and v side by side


def _gpt2_names(i: int) -> tuple[str, list[tuple[str, str]]]:
    return f"transformer.h.{i}", [("attn_norm", "ln_1"), ("mlp_norm", "ln_2")]


def _gpt2_from_hf(read: _Reader, config: ModelConfig) -> dict:
    c = config
    d, n, h = c.d_model, c.n_heads, c.head_dim
    if n * h != d:
        raise ConfigError(f"GPT-2 of Hugging Face needs n_heads * head_dim = d_model, here {n} * {h} and {d}")

    def norm(name: str) -> dict:
        return {"scale": read(f"{name}.weight", (d,)), "bias": read(f"{name}.bias", (d,))}

    def linear(name: str, n_in: int, n_out: int, shape: tuple[int, ...]) -> dict:
        return {"kernel": read(f"{name}.weight", (n_in, n_out)).reshape(shape), "bias": read(f"{name}.bias", (n_out,))}

    params = {
        "embed": {"embedding": _pad_rows(read("transformer.wte.weight", (c.vocab_size, d)), c)},
        "pos_embed": {"embedding": read("transformer.wpe.weight", (c.max_seq_len, d))},
        "final_norm": norm("transformer.ln_f"),
    }
    for i in range(c.n_layers):
        theirs, norms = _gpt2_names(i)
        layer = {ours: norm(f"{theirs}.{name}") for ours, name in norms}
        kernel = read(f"{theirs}.attn.c_attn.weight", (d, 3 * d)).reshape(d, 3, n, h)
        bias = read(f"{theirs}.attn.c_attn.bias", (3 * d,)).reshape(3, n, h)
        layer["attn"] = {
            name: {"kernel": np.ascontiguousarray(kernel[:, j]), "bias": bias[j]} for j, name in enumerate("qkv")
        }
        layer["attn"]["o"] = linear(f"{theirs}.attn.c_proj", d, d, (n, h, d))
        layer["mlp"] = {
            "up": linear(f"{theirs}.mlp.c_fc", d, c.d_ff, (d, c.d_ff)),
            "down": linear(f"{theirs}.mlp.c_proj", c.d_ff, d, (c.d_ff, d)),
        }
        params[layer_name(i)] = layer
    return params | _head_from_hf(read, c)


def _gpt2_to_hf(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    c = config
    d = c.d_model
    state = {
        "transformer.wte.weight": params["embed"]["embedding"][: c.vocab_size],
        "transformer.wpe.weight": params["pos_embed"]["embedding"],
        "transformer.ln_f.weight": params["final_norm"]["scale"],
        "transformer.ln_f.bias": params["final_norm"]["bias"],
    }
    for i in range(c.n_layers):
        layer = params[layer_name(i)]
        theirs, norms = _gpt2_names(i)
        for ours, name in norms:
            state[f"{theirs}.{name}.weight"] = layer[ours]["scale"]
            state[f"{theirs}.{name}.bias"] = layer[ours]["bias"]
        qkv = [layer["attn"][name] for name in "qkv"]
        state[f"{theirs}.attn.c_attn.weight"] = np.concatenate([p["kernel"].reshape(d, -1) for p in qkv], axis=1)
        state[f"{theirs}.attn.c_attn.bias"] = np.concatenate([p["bias"].reshape(-1) for p in qkv])
        for name, p in (
            ("attn.c_proj", layer["attn"]["o"]),
            ("mlp.c_fc", layer["mlp"]["up"]),
            ("mlp.c_proj", layer["mlp"]["down"]),
        ):
            state[f"{theirs}.{name}.weight"] = p["kernel"].reshape(-1, p["kernel"].shape[-1])
            state[f"{theirs}.{name}.bias"] = p["bias"]
    if not c.tie_embeddings:
        state["lm_head.weight"] = params["head"]["kernel"][:, : c.vocab_size].T
    return state


# ---------------------------------------------------------------------------------------------------------------------
# config.json


def _llama_config(c: ModelConfig) -> dict[str, object]:
    """The config of LlamaForCausalLM; with QK-norm that of Qwen3ForCausalLM, which has no biases in the MLP and on o."""
    if c.qk_norm and c.bias:
        raise ConfigError("no Hugging Face architecture has both QK-norm and all biases: export needs model.bias=False")
    rope: dict[str, object] = {"rope_type": "default" if c.rope.scaling == "none" else c.rope.scaling}
    if c.rope.scaling != "none":
        rope["factor"] = c.rope.factor
    if c.rope.scaling == "llama3":
        rope |= {
            "low_freq_factor": c.rope.low_freq_factor,
            "high_freq_factor": c.rope.high_freq_factor,
            "original_max_position_embeddings": c.rope.original_max_len,
        }
    shared = {
        "architectures": ["Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_seq_len,
        "initializer_range": c.init_std,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.bias,
        "rope_theta": c.rope.theta,
        "rope_scaling": None if c.rope.scaling == "none" else rope,
        "rope_parameters": rope | {"rope_theta": c.rope.theta},
        "attention_dropout": 0.0,
    }
    return shared if c.qk_norm else shared | {"mlp_bias": c.bias}


def _gpt2_config(c: ModelConfig) -> dict[str, object]:
    if c.qk_norm or c.n_heads * c.head_dim != c.d_model:
        raise ConfigError("Hugging Face GPT-2 has no QK-norm and needs model.n_heads * head_dim = d_model")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_embd": c.d_model,
        "n_inner": c.d_ff,
        "n_layer": c.n_layers,
        "n_head": c.n_heads,
        "n_positions": c.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        "initializer_range": c.init_std,
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": c.tie_embeddings,
    }
