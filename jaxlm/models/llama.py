"""The LLaMA family (arXiv:2302.13971, arXiv:2407.21783): pre-RMSNorm, RoPE, grouped key-value heads, SwiGLU.

Legend: B batch, T tokens, D model, F feed-forward.
"""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxlm.config import ModelConfig
from jaxlm.models.layers import (
    Attention,
    Cache,
    LayerCache,
    Linear,
    RMSNorm,
    Where,
    dropout,
    mlp_product,
    output_std,
    project,
    rope_of,
)
from jaxlm.models.transformer import Transformer
from jaxlm.ops.rope import rope_tables
from jaxlm.sharding import constrain


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        c = self.config
        bias = (c.d_ff,) if c.bias else None
        gate, gate_bias = Linear((c.d_model, c.d_ff), bias, c.init_std, c.dtype, name="gate")()
        up, up_bias = Linear((c.d_model, c.d_ff), bias, c.init_std, c.dtype, name="up")()
        gate_BxTxF, up_BxTxF = project(self, "gate_up", x_BxTxD, (gate, up), product=mlp_product(c))
        if c.bias:
            gate_BxTxF, up_BxTxF = gate_BxTxF + gate_bias, up_BxTxF + up_bias
        gate_BxTxF, up_BxTxF = checkpoint_name(gate_BxTxF, "mlp_proj"), checkpoint_name(up_BxTxF, "mlp_proj")
        hidden_BxTxF = constrain(nn.silu(gate_BxTxF) * up_BxTxF, "batch", "seq", "mlp")
        down, down_bias = Linear(
            (c.d_ff, c.d_model), (c.d_model,) if c.bias else None, output_std(c), c.dtype, name="down"
        )()
        (y_BxTxD,) = project(self, "down", hidden_BxTxF, [down], product=mlp_product(c))
        return y_BxTxD + down_bias if c.bias else y_BxTxD


class LlamaBlock(nn.Module):
    """One layer: (B, T, D) -> (B, T, D), and its part of the cache where one is given."""

    config: ModelConfig
    backend: str

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        where: Where,
        dropout_keys: tuple[jax.Array, jax.Array] | tuple[None, None] = (None, None),
        cache: tuple[LayerCache, Cache] | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        y_BxTxD = RMSNorm(c.norm_eps, name="attn_norm")(x_BxTxD)
        y_BxTxD, layer_cache = Attention(c, self.backend, bias=c.bias, name="attn")(y_BxTxD, where, cache)
        x_BxTxD = checkpoint_name(x_BxTxD + dropout(y_BxTxD, c.dropout, dropout_keys[0]), "residual")
        y_BxTxD = SwiGLU(c, name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x_BxTxD))
        return x_BxTxD + dropout(y_BxTxD, c.dropout, dropout_keys[1]), layer_cache


class Llama(Transformer):
    """The LLaMA family; see `Transformer` for how to call it."""

    block_class = LlamaBlock

    def rope(self, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions_BxT, rope_of(self.config))

    def final_norm(self) -> nn.Module:
        return RMSNorm(self.config.norm_eps, name="final_norm")
