"""The modules that all families share: projections, norms, embeddings, attention with an optional KV cache, the block.

Linen modules here declare parameters; the math is in `jaxlm.ops`. Parameters are float32 and cast to the compute
dtype where they are used. Legend: B batch, T tokens, S cache slots, D model, F feed-forward, N query heads,
K key-value heads, H head dim, V padded vocabulary.
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxlm.config import ModelConfig
from jaxlm.devices.sharding import constrain
from jaxlm.models.init import normal, parameter
from jaxlm.ops import int8
from jaxlm.ops.attention import attention
from jaxlm.ops.block_codes import Coded
from jaxlm.ops.decode import cached_attention, row_product, write_cache
from jaxlm.ops.norms import layer_norm, rms_norm
from jaxlm.ops.products import Product, dense, fp8_dense, lora_down, lora_up, multiply, split_columns
from jaxlm.ops.rope import rope_frequencies, rotate
from jaxlm.ops.spmd import lookup

# Tags of the activations that the remat policy `names` keeps (see transformer.REMAT_POLICIES).
SAVED_NAMES = ("qkv_proj", "attn_out", "residual", "mlp_proj")


class LayerCache(typing.NamedTuple):
    """Keys and values of one layer for decoding, laid out for `ops.decode.cached_attention`."""

    k_BxKxHxS: jax.Array
    v_BxKxSxH: jax.Array

    @property
    def slots(self) -> int:
        return self.v_BxKxSxH.shape[2]

    def grown(self, slots: int) -> "LayerCache":
        """Returns a cache of `slots` slots: the present slots, then empty slots."""
        more = slots - self.slots
        return LayerCache(
            jnp.pad(self.k_BxKxHxS, ((0, 0), (0, 0), (0, 0), (0, more))),
            jnp.pad(self.v_BxKxSxH, ((0, 0), (0, 0), (0, more), (0, 0))),
        )


class Cache(typing.NamedTuple):
    """The KV cache of a model.

    Attributes:
      slot: the first slot to write new tokens to, the same in all rows, so that one update in place serves them all; or
        (T,): each token's slot.
      positions_BxS: the position of the token in each slot. A query attends to the slots whose position is not after its
        own. Padding slots hold a position after all others, so that no query attends to them.
    """

    layers: tuple[LayerCache, ...]
    slot: jax.Array
    positions_BxS: jax.Array


class TokenInfo(typing.NamedTuple):
    """The data about the tokens that every layer gets besides the tokens' vectors.

    Attributes:
      positions_BxT: the position of each token in its document, from 0.
      segment_ids_BxT: the id of each token's document; None if each row is one document.
      rope: the cos and sin from `ops.rope.rope_tables`; None in a family without rotary embeddings.
      until_BxT: in place of segment ids, `until_BxT` of `ops.attention.attention`.
    """

    positions_BxT: jax.Array
    segment_ids_BxT: jax.Array | None
    rope: tuple[jax.Array, jax.Array] | None
    until_BxT: jax.Array | None = None


class Weights(typing.NamedTuple):
    """The weights of one projection, in the compute dtype.

    Attributes:
      kernel: (*in, *out); quantised (`Coded`) if the collection `quantized` has it (see `models.quantized`); only its
        shape if the calling module has it in the collection `packed`.
      bias: (*out); None for no bias.
      lora: the factors (*in, rank) and (rank, *out), whose product is added to the kernel (arXiv:2106.09685); None for none.
        Perhaps a third, (B, rank): the ranks that each row of the batch has, of several adapters side by side.
    """

    kernel: jax.Array | Coded | jax.ShapeDtypeStruct
    bias: jax.Array | None
    lora: tuple[jax.Array, jax.Array] | None


class Linear(nn.Module):
    """Holds a kernel (*in, *out) and a bias (*out); a call returns them as `Weights`, in the compute dtype (see `project`).

    Attributes:
      bias_shape: None for no bias, and then the returned bias is None.
      std: the standard deviation of the kernel's initial values.
    """

    shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None
    std: float
    dtype: str

    @nn.compact
    def __call__(self) -> Weights:
        if self.has_variable("quantized", "codes"):
            kernel = Coded(*(self.get_variable("quantized", name) for name in Coded._fields))
        elif self.is_initializing() or self.has_variable("params", "kernel"):
            kernel = parameter(self, "kernel", normal(self.std), self.shape).astype(self.dtype)
        else:
            kernel = jax.ShapeDtypeStruct(self.shape, self.dtype)
        bias = factors = None
        if self.bias_shape is not None:
            bias = parameter(self, "bias", nn.initializers.zeros, self.bias_shape).astype(self.dtype)
        if self.has_variable("lora", "lora_a"):
            names = ("lora_a", "lora_b", "lora_mask")[: 3 if self.has_variable("lora", "lora_mask") else 2]
            factors = tuple(self.get_variable("lora", name).astype(self.dtype) for name in names)
        return Weights(kernel, bias, factors)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis (arXiv:1910.07467); statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, parameter(self, "scale", nn.initializers.ones, (x.shape[-1],)), self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with bias over the last axis; statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", nn.initializers.ones, (x.shape[-1],))
        bias = parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x, scale, bias, self.eps)


class Embedding(nn.Module):
    """Holds a table (rows, D); returns the rows of ids (B, T), cast to the compute dtype: (B, T, D).

    If the collection `packed` has the table in int8, takes the rows from there.
    """

    rows: int
    config: ModelConfig

    @nn.compact
    def __call__(self, ids_BxT: jax.Array) -> jax.Array:
        c = self.config
        if self.has_variable("packed", "embedding"):
            table = self.get_variable("packed", "embedding")
            rows = int8.Int8(*(part[ids_BxT.reshape(-1)] for part in table))
            return int8.decode(rows, c.dtype).reshape(*ids_BxT.shape, c.d_model)
        table_VxD = parameter(self, "embedding", normal(c.init_std), (self.rows, c.d_model))
        return constrain(lookup(table_VxD, ids_BxT, c.dtype), "batch", "seq", "act_embed")


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Returns x with inverted dropout: a share `rate` is zeroed, the rest scaled to keep the mean. `key=None`: no dropout."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def output_std(config: ModelConfig) -> float:
    """Returns the initial std of projections into the residual stream: `init_std` / sqrt(2 * layers), as in GPT-2."""
    return config.init_std / np.sqrt(2 * config.n_layers)


def project(
    module: nn.Module, name: str, x: jax.Array, weights: typing.Sequence[Weights], product: Product = dense
) -> list[jax.Array]:
    """Multiplies x (B, T, *in) by each kernel (*in, *out), LoRA included. Returns the products plus biases, (B, T, *out).

    If the config fuses projections, all kernels are multiplied in one product. On a mesh with a `tensor` axis each
    device fuses its own columns of all kernels, so that the gradient of x is summed over devices once. Kernels that the
    axis does not split evenly are multiplied one by one.

    Args:
      module: the calling module. If its collection `packed` has a kernel under `name` (see `params.pack_params`), that
        kernel is used, and `weights` only give the shapes. It has `lora_dropout`, and for dropout the random key `lora`.
      name: the name of all the products together, such as "qkv".
      weights: the kernels, either all quantised or none, their biases and their LoRA factors.
      product: `ops.products.dense` or `fp8_dense`, for the kernels.
    """
    ys = _of_kernels(module, name, x, [w.kernel for w in weights], product)
    adapted = [place for place, w in enumerate(weights) if w.lora]
    if adapted:
        axes = x.ndim - 2
        x = dropout(x, module.lora_dropout, module.make_rng("lora") if module.has_rng("lora") else None)
        factors = [weights[place].lora for place in adapted]
        if len(factors[0]) == 3:  # of several adapters: one product with all A would copy them in every step
            lows = [lora_down(x, a, axes) * mask_BxR[:, None] for a, _, mask_BxR in factors]
        else:
            inner = lora_down(x, jnp.concatenate([a for a, _ in factors], axis=-1), axes)
            lows = jnp.split(inner, len(adapted), axis=-1)
        for place, low in zip(adapted, lows, strict=True):
            # Without the barrier XLA stores both terms for the backward pass, instead of their sum.
            ys[place] = jax.lax.optimization_barrier(ys[place] + lora_up(low, weights[place].lora[1]))
    return [y if w.bias is None else y + w.bias for y, w in zip(ys, weights, strict=True)]


def _of_kernels(module: nn.Module, name: str, x: jax.Array, kernels: list, product: Product) -> list[jax.Array]:
    if not module.has_variable("packed", name):
        return multiply(x, kernels, product, module.config.fuse_projections)
    y = row_product(x.reshape(math.prod(x.shape[:2]), -1), module.get_variable("packed", name))
    return split_columns(y, x.shape[:2], [kernel.shape[x.ndim - 2 :] for kernel in kernels])


def mlp_product(config: ModelConfig) -> typing.Callable[[jax.Array, jax.Array, int], jax.Array]:
    return fp8_dense if config.fp8 else dense


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads (arXiv:2305.13245), optional RoPE, QK-norm and KV cache.

    Attributes:
      bias: True if all projections have biases. If False, q, k and v still have biases with `model.qkv_bias`.
      lora_dropout: the share of LoRA's inputs that is zeroed in training.
    """

    config: ModelConfig
    backend: str
    bias: bool
    lora_dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, info: TokenInfo, cache: tuple[LayerCache, Cache] | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        d, n, k, h = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        qkv_bias = self.bias or c.qkv_bias
        weights = [
            Linear((d, heads, h), (heads, h) if qkv_bias else None, c.init_std, c.dtype, name=name)()
            for name, heads in (("q", n), ("k", k), ("v", k))
        ]
        qkv = project(self, "qkv", x_BxTxD, weights)
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = (checkpoint_name(y, "qkv_proj") for y in qkv)
        if c.qk_norm:
            q_BxTxNxH = RMSNorm(c.norm_eps, name="q_norm")(q_BxTxNxH)
            k_BxTxKxH = RMSNorm(c.norm_eps, name="k_norm")(k_BxTxKxH)
        if info.rope is not None:
            q_BxTxNxH, k_BxTxKxH = rotate(q_BxTxNxH, *info.rope), rotate(k_BxTxKxH, *info.rope)
        q_BxTxNxH = constrain(q_BxTxNxH, "batch", "seq", "heads", "head_dim")
        k_BxTxKxH = constrain(k_BxTxKxH, "batch", "seq", "kv_heads", "head_dim")
        v_BxTxKxH = constrain(v_BxTxKxH, "batch", "seq", "kv_heads", "head_dim")
        out_BxTxNxH, layer_cache = attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, info, cache, self.backend)
        out_BxTxNxH = checkpoint_name(constrain(out_BxTxNxH, "batch", "seq", "heads", "head_dim"), "attn_out")
        o = Linear((n, h, d), (d,) if self.bias else None, output_std(c), c.dtype, name="o")()
        (y_BxTxD,) = project(self, "o", out_BxTxNxH, [o])
        return y_BxTxD, layer_cache


class Block(nn.Module):
    """One layer: attention and an MLP. Each is applied after a norm and added to the residual stream (pre-norm).

    Attributes:
      norm, mlp: the classes of the family's modules, called as `norm(eps, name=...)` and `mlp(config, lora_dropout, name=...)`.
    """

    config: ModelConfig
    backend: str
    norm: type[nn.Module]
    mlp: type[nn.Module]
    attention_bias: bool
    lora_dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        info: TokenInfo,
        dropout_keys: tuple[jax.Array, jax.Array] | tuple[None, None] = (None, None),
        cache: tuple[LayerCache, Cache] | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        y_BxTxD = self.norm(c.norm_eps, name="attn_norm")(x_BxTxD)
        attn = Attention(c, self.backend, self.attention_bias, self.lora_dropout, name="attn")
        y_BxTxD, layer_cache = attn(y_BxTxD, info, cache)
        x_BxTxD = checkpoint_name(x_BxTxD + dropout(y_BxTxD, c.dropout, dropout_keys[0]), "residual")
        y_BxTxD = self.mlp(c, self.lora_dropout, name="mlp")(self.norm(c.norm_eps, name="mlp_norm")(x_BxTxD))
        return x_BxTxD + dropout(y_BxTxD, c.dropout, dropout_keys[1]), layer_cache


def rope_of(config: ModelConfig) -> np.ndarray:
    return rope_frequencies(config.head_dim, **vars(config.rope))


def attend(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    info: TokenInfo,
    cache: tuple[LayerCache, Cache] | None,
    backend: str,
) -> tuple[jax.Array, LayerCache | None]:
    """Returns the attention's output (B, T, N, H), and the layer's cache with the new keys and values (None without a cache).

    Without a cache the tokens attend to each other, with one to the cache.

    Args:
      cache: (this layer's cache, the whole model's cache, which says where to write), or None.
      backend: of `ops.attention.attention`, used without a cache.
    """
    if cache is not None:
        layer, shared = cache
        layer = LayerCache(*write_cache(*layer, k_BxTxKxH, v_BxTxKxH, shared.slot))
        mask_BxTxS = shared.positions_BxS[:, None, :] <= info.positions_BxT[:, :, None]
        first = (x[: len(q_BxTxNxH)] for x in layer)  # the cache may have more rows
        return cached_attention(q_BxTxNxH, *first, mask_BxTxS), layer
    ids = {"segment_ids_BxT": info.segment_ids_BxT, "until_BxT": info.until_BxT}
    return attention(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, backend=backend, **ids), None
