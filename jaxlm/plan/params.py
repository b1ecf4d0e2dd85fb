"""Counts the parameters of a model and of what is trained beside it, from the config, by arithmetic."""

import math
import re

from jaxlm.config import CHAT_TOKENS, AdapterConfig, ModelConfig


def count_params(config: ModelConfig) -> int:
    return sum(params_by_component(config).values())


def params_by_component(config: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters by component: embed, pos_embed, attn, mlp, norm and head (0 if embeddings are tied)."""
    c = config
    gpt2 = c.family == "gpt2"
    d, heads, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    bias = gpt2 or c.bias
    attn, mlp = (sum(math.prod(kernel) for kernel in kernels(c, part).values()) for part in ("attn", "mlp"))
    attn += (heads + 2 * kv) if bias or c.qkv_bias else 0
    attn += d if bias else 0
    mlp += ((1 if gpt2 else 2) * c.d_ff + d) if bias else 0
    norm = (2 * d if gpt2 else d) * (2 * c.n_layers + 1)
    norm += 2 * c.head_dim * c.n_layers if c.qk_norm else 0
    return {
        "embed": c.vocab_size * d,
        "pos_embed": c.max_seq_len * d if gpt2 else 0,
        "attn": c.n_layers * attn,
        "mlp": c.n_layers * mlp,
        "norm": norm,
        "head": 0 if c.tie_embeddings else d * c.vocab_size,
    }


def multiplied_params(config: ModelConfig, head: bool = True) -> int:
    """Returns by how many parameters each token is multiplied, without tables that are only looked up (and the head)."""
    parts = params_by_component(config)
    tied = parts["embed"] if config.tie_embeddings else 0
    return parts["attn"] + parts["mlp"] + parts["norm"] + head * (tied + parts["head"])


def kernels(config: ModelConfig, part: str = "") -> dict[str, tuple[int, int]]:
    """Returns name -> (inputs, outputs) of each kernel of one layer: `attn/q`. `part`: "attn" or "mlp"; "" for both."""
    c = config
    d, heads, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = {"attn/q": (d, heads), "attn/k": (d, kv), "attn/v": (d, kv), "attn/o": (heads, d)}
    shapes |= {} if c.family == "gpt2" else {"mlp/gate": (d, c.d_ff)}
    shapes |= {"mlp/up": (d, c.d_ff), "mlp/down": (c.d_ff, d)}
    return {name: sizes for name, sizes in shapes.items() if name.startswith(part)}


def targets(config: ModelConfig, adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Returns the kernels of one layer that get a LoRA, as `kernels` does; {} for another kind of adapter."""
    if adapter.kind != "lora":
        return {}
    return {
        name: sizes for name, sizes in kernels(config).items() if any(re.fullmatch(t, name) for t in adapter.targets)
    }


def trained_rows(adapter: AdapterConfig) -> int:
    """Returns the number of tokens whose rows of embedding and head are trained beside an adapter, or at their own rate."""
    if adapter.without_rows:
        return 0
    return len(CHAT_TOKENS) if adapter.rows == ("auto",) else len(adapter.rows)


def adapter_params(config: ModelConfig, adapter: AdapterConfig) -> int:
    """Returns the number of parameters of an adapter, with the rows of ChatML's tokens; 0 if there is none."""
    if adapter.kind == "none":
        return 0
    looked_up = adapter.prompt_tokens if adapter.kind == "prompt" else 0
    looked_up += 0 if config.tie_embeddings else trained_rows(adapter)
    return multiplied_adapter_params(config, adapter) + looked_up * config.d_model


def multiplied_adapter_params(config: ModelConfig, adapter: AdapterConfig) -> int:
    """Returns how many of an adapter's parameters each token is multiplied by: its kernels, the head's rows."""
    if adapter.kind == "none":
        return 0
    each = sum(adapter.rank * (inputs + outputs) for inputs, outputs in targets(config, adapter).values())
    return config.n_layers * each + trained_rows(adapter) * config.d_model
