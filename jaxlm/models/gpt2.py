"""The GPT-2 family (Radford et al. 2019): learned positions, pre-LayerNorm, GELU (tanh form), biases everywhere.

Legend: B batch, T tokens, D model, F feed-forward.
"""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxlm.config import ModelConfig
from jaxlm.models.layers import Embedding, LayerNorm, Linear, mlp_product, output_std, project
from jaxlm.models.transformer import Transformer
from jaxlm.sharding import constrain


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh approximation (`gelu_new` of Hugging Face)."""

    config: ModelConfig
    lora_dropout: float = 0.0

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        c = self.config
        up = Linear((c.d_model, c.d_ff), (c.d_ff,), c.init_std, c.dtype, name="up")()
        (up_BxTxF,) = project(self, "up", x_BxTxD, [up], product=mlp_product(c))
        up_BxTxF = checkpoint_name(up.biased(up_BxTxF), "mlp_proj")
        hidden_BxTxF = constrain(nn.gelu(up_BxTxF, approximate=True), "batch", "seq", "mlp")
        down = Linear((c.d_ff, c.d_model), (c.d_model,), output_std(c), c.dtype, name="down")()
        (y_BxTxD,) = project(self, "down", hidden_BxTxF, [down], product=mlp_product(c))
        return down.biased(y_BxTxD)


class GPT2(Transformer):
    """The GPT-2 family; see `Transformer` for how to call it. Positions must be below `model.max_seq_len`."""

    norm, mlp, always_bias = LayerNorm, GeluMLP, True

    def embed(self, tokens_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        c = self.config
        return super().embed(tokens_BxT, positions_BxT) + Embedding(c.max_seq_len, c, name="pos_embed")(positions_BxT)
