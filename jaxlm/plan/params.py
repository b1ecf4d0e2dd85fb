"""Counts a model's parameters from its config, by arithmetic."""

from jaxlm.config import ModelConfig


def count_params(config: ModelConfig) -> int:
    """Returns the number of parameters of a resolved model config, without the vocabulary's padding rows."""
    return sum(params_by_component(config).values())


def params_by_component(config: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters by component: embed, pos_embed, attn, mlp, norm and head (0 if embeddings are tied)."""
    c = config
    gpt2 = c.family == "gpt2"
    d, heads, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    bias = gpt2 or c.bias
    attn = d * (heads + 2 * kv) + heads * d
    attn += (heads + 2 * kv) if bias or c.qkv_bias else 0
    attn += d if bias else 0
    up = 1 if gpt2 else 2
    mlp = (up + 1) * d * c.d_ff
    mlp += (up * c.d_ff + d) if bias else 0
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
