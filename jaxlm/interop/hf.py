"""Translates parameters and configs to and from Hugging Face transformers (Llama, Qwen2, Qwen3, GPT-2), with numpy alone.

Which tensor holds which leaf stands in `interop.leaves`, for whoever reads or writes one at a time.
"""

import typing

import numpy as np

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.interop import leaves
from jaxlm.tree import named_leaves

# What a state dict may hold besides: buffers that old checkpoints carry.
HARMLESS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def check_tensors(shapes: typing.Mapping[str, tuple[int, ...]], config: ModelConfig, scores: bool = False) -> None:
    """Raises ConfigError if tensors of these names and shapes are not those of a model of this config.

    `scores`: of a reward model.
    """
    wanted = {tensor.name: tensor.shape for tensor in leaves.tensors(config, scores)}
    for name, shape in wanted.items():
        if name not in shapes:
            raise ConfigError(f"Hugging Face checkpoint: tensor {name} is missing")
        if shapes[name] != shape:
            raise ConfigError(f"Hugging Face checkpoint: {name} has shape {shapes[name]}, the config says {shape}")
    # Tied models are saved with a copy of the embedding by some.
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    left = [n for n in shapes if n not in wanted and not n.endswith(HARMLESS) and n not in tied]
    if left:
        raise ConfigError(f"Hugging Face checkpoint: {len(left)} tensors fit nowhere, first {left[0]}")


def params_to_hf(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the Hugging Face state dict (float32 numpy) for jaxlm's parameters.

    It has no padding rows of the vocabulary, and no `lm_head` if embeddings are tied.
    """
    values = {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(params)}
    return {t.name: t.from_leaves([values[leaf] for leaf in t.leaves]) for t in leaves.tensors(config)}


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Returns the content of Hugging Face's config.json for a model, without the ids of special tokens.

    It has the rotary settings twice, for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`): a
    version that does not find its settings silently takes theta 10000.

    Raises:
      ConfigError: Hugging Face has no architecture for this model.
    """
    return _gpt2_config(config) if config.family == "gpt2" else _llama_config(config)


def scoring(config: typing.Mapping[str, object]) -> dict[str, object]:
    """Returns what the config.json of a reward model has in place of a language model's, without the id of padding."""
    (name,) = config["architectures"]
    family = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    label = "LABEL_0"
    return {"architectures": [f"{family}ForSequenceClassification"], "id2label": {"0": label}, "label2id": {label: 0}}


def _llama_config(c: ModelConfig) -> dict[str, object]:
    """The config of LlamaForCausalLM; with QK-norm of Qwen3ForCausalLM, with biases on q, k, v alone of Qwen2ForCausalLM."""
    if c.qk_norm and (c.bias or c.qkv_bias):
        raise ConfigError(
            "no Hugging Face architecture has both QK-norm and these biases: export needs model.bias=False and "
            "model.qkv_bias=False"
        )
    kind, prefix = _architecture(c)
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
        "architectures": [f"{prefix}ForCausalLM"],
        "model_type": kind,
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
    return shared | {"mlp_bias": c.bias} if kind == "llama" else shared


def _architecture(c: ModelConfig) -> tuple[str, str]:
    """Returns (model_type, the beginning of the class's name) of the Llama family."""
    if c.qk_norm:
        return "qwen3", "Qwen3"
    return ("qwen2", "Qwen2") if c.qkv_bias and not c.bias else ("llama", "Llama")


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
