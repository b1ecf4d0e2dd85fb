"""The model families, by their name in a config.

Legend: B batch, T tokens, D model, F feed-forward.
"""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxlm.config import ModelConfig
from jaxlm.devices.sharding import constrain
from jaxlm.models.layers import Embedding, LayerNorm, Linear, RMSNorm, mlp_product, output_std, project, rope_of
from jaxlm.models.transformer import Transformer
from jaxlm.ops.rope import rope_tables


def _down(mlp: nn.Module, hidden_BxTxF: jax.Array, bias: bool) -> jax.Array:
    c = mlp.config
    down = Linear((c.d_ff, c.d_model), (c.d_model,) if bias else None, output_std(c), c.dtype, name="down")()
    (y_BxTxD,) = project(mlp, "down", hidden_BxTxF, [down], product=mlp_product(c))
    return y_BxTxD


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
        gate_up = project(self, "gate_up", x_BxTxD, (gate, up), product=mlp_product(c))
        gate_BxTxF, up_BxTxF = (checkpoint_name(y, "mlp_proj") for y in gate_up)
        hidden_BxTxF = constrain(nn.silu(gate_BxTxF) * up_BxTxF, "batch", "seq", "mlp")
        return _down(self, hidden_BxTxF, c.bias)


class Llama(Transformer):
    """LLaMA (arXiv:2302.13971, arXiv:2407.21783): pre-RMSNorm, RoPE, grouped key-value heads, SwiGLU."""

    norm, mlp = RMSNorm, SwiGLU

    def rope(self, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions_BxT, rope_of(self.config))


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh approximation (`gelu_new` of Hugging Face)."""

    config: ModelConfig
    lora_dropout: float = 0.0

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        c = self.config
        up = Linear((c.d_model, c.d_ff), (c.d_ff,), c.init_std, c.dtype, name="up")()
        (up_BxTxF,) = project(self, "up", x_BxTxD, [up], product=mlp_product(c))
        up_BxTxF = checkpoint_name(up_BxTxF, "mlp_proj")
        hidden_BxTxF = constrain(nn.gelu(up_BxTxF, approximate=True), "batch", "seq", "mlp")
        return _down(self, hidden_BxTxF, True)


class GPT2(Transformer):
    """GPT-2 (Radford et al. 2019): learned positions below `model.max_seq_len`, pre-LayerNorm, GELU (tanh form), biases."""

    norm, mlp, always_bias = LayerNorm, GeluMLP, True

    def embed(self, tokens_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        c = self.config
        return super().embed(tokens_BxT, positions_BxT) + Embedding(c.max_seq_len, c, name="pos_embed")(positions_BxT)


FAMILIES = {"llama": Llama, "gpt2": GPT2}


def build(model_config: ModelConfig, attention_backend: str) -> Transformer:
    """Returns the model of a config. The model holds no parameters: see `params.init_params`.

    `attention_backend` is one of `ops.attention.BACKENDS`, as `ops.attention.resolve_backend` returns it.
    """
    return FAMILIES[model_config.family](model_config, attention_backend)
