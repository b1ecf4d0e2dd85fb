"""The LLaMA family (arXiv:2302.13971, arXiv:2407.21783): pre-RMSNorm, RoPE, grouped key-value heads, SwiGLU.

Legend: B batch, T tokens, D model, F feed-forward.
"""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxlm.config import ModelConfig
from jaxlm.models.layers import Linear, RMSNorm, mlp_product, output_std, project, rope_of
from jaxlm.models.transformer import Transformer
from jaxlm.ops.rope import rope_tables
from jaxlm.sharding import constrain


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    config: ModelConfig
    lora_dropout: float = 0.0

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        c = self.config
        bias = (c.d_ff,) if c.bias else None
        gate = Linear((c.d_model, c.d_ff), bias, c.init_std, c.dtype, name="gate")()
        up = Linear((c.d_model, c.d_ff), bias, c.init_std, c.dtype, name="up")()
        gate_BxTxF, up_BxTxF = project(self, "gate_up", x_BxTxD, (gate, up), product=mlp_product(c))
        gate_BxTxF = checkpoint_name(gate.biased(gate_BxTxF), "mlp_proj")
        up_BxTxF = checkpoint_name(up.biased(up_BxTxF), "mlp_proj")
        hidden_BxTxF = constrain(nn.silu(gate_BxTxF) * up_BxTxF, "batch", "seq", "mlp")
        down = Linear((c.d_ff, c.d_model), (c.d_model,) if c.bias else None, output_std(c), c.dtype, name="down")()
        (y_BxTxD,) = project(self, "down", hidden_BxTxF, [down], product=mlp_product(c))
        return down.biased(y_BxTxD)


class Llama(Transformer):
    """The LLaMA family; see `Transformer` for how to call it."""

    norm, mlp = RMSNorm, SwiGLU

    def rope(self, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions_BxT, rope_of(self.config))
