"""Pieces that both model families share: projections, norms, embeddings, attention with an optional KV cache.

Linen modules here declare parameters; the mathematics is in `jaxlm.ops`. Parameters are float32 and cast to the compute
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
from jaxlm.ops import fp8
from jaxlm.ops.attention import attention
from jaxlm.ops.by_device import lookup
from jaxlm.ops.decode import cached_attention, row_product, write_cache
from jaxlm.ops.linear import dense
from jaxlm.ops.norms import layer_norm, rms_norm
from jaxlm.ops.rope import rope_frequencies, rotate
from jaxlm.sharding import axis_size, constrain

# Tags of the activations that the remat policy `names` keeps (see transformer.REMAT_POLICIES).
SAVED_NAMES = ("qkv_proj", "attn_out", "residual", "mlp_proj")


class LayerCache(typing.NamedTuple):
    """Keys and values of one layer for decoding, laid out for `ops.decode.cached_attention`."""

    k_BxKxHxS: jax.Array
    v_BxKxSxH: jax.Array

    @property
    def slots(self) -> int:
        """S."""
        return self.v_BxKxSxH.shape[2]

    def grown(self, slots: int) -> "LayerCache":
        """With empty slots added at the end, up to `slots` of them in all."""
        more = slots - self.slots
        return LayerCache(
            jnp.pad(self.k_BxKxHxS, ((0, 0), (0, 0), (0, 0), (0, more))),
            jnp.pad(self.v_BxKxSxH, ((0, 0), (0, 0), (0, more), (0, 0))),
        )


class Cache(typing.NamedTuple):
    """The KV cache of a model. New tokens go to the slots from `slot` on, the same in all rows: one update in place.

    `slot` is the Python int 0 for the prefill and a traced scalar for decoding. A query sees the slots whose position
    is not after its own: a slot of padding has a position after all.
    """

    layers: tuple[LayerCache, ...]
    slot: int | jax.Array
    positions_BxS: jax.Array


class Where(typing.NamedTuple):
    """What every layer knows of its tokens: positions and segment ids (B, T), cos and sin of RoPE if it has any."""

    positions_BxT: jax.Array
    segment_ids_BxT: jax.Array | None
    rope: tuple[jax.Array, jax.Array] | None


class Linear(nn.Module):
    """Holds `kernel` (and `bias`), float32, and returns both in the compute dtype; callers do the product."""

    shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None
    std: float
    dtype: typing.Any

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", nn.initializers.normal(self.std), self.shape)
        bias = None
        if self.bias_shape is not None:
            bias = self.param("bias", nn.initializers.zeros, self.bias_shape).astype(self.dtype)
        return kernel.astype(self.dtype), bias


class RMSNorm(nn.Module):
    """RMSNorm over the last axis (arXiv:1910.07467); statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)), self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with bias over the last axis; statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x, scale, bias, self.eps)


class Embedding(nn.Module):
    """Holds `embedding` (rows, D), looks ids up and casts the rows found."""

    rows: int
    config: ModelConfig

    @nn.compact
    def __call__(self, ids_BxT: jax.Array) -> jax.Array:
        c = self.config
        table_VxD = self.param("embedding", nn.initializers.normal(c.init_std), (self.rows, c.d_model))
        return constrain(lookup(table_VxD, ids_BxT, c.dtype), "batch", "seq", "act_embed")


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; `key=None` turns it off."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def output_std(config: ModelConfig) -> float:
    """Initial standard deviation of projections into the residual stream (GPT-2: shrunk by the number of branches)."""
    return config.init_std / np.sqrt(2 * config.n_layers)


def project(
    module: nn.Module,
    name: str,
    x: jax.Array,
    kernels: typing.Sequence[jax.Array],
    axes: int = 1,
    product: typing.Callable = dense,
) -> list[jax.Array]:
    """x (B, T, *in) times each kernel (*in, *out), `axes` of them inputs; one product if the config fuses projections.

    `product` is `ops.linear.dense` or `ops.fp8.dense`. Where `module` has a kernel packed beforehand under `name` (see
    `pack_params`), that one is used and `kernels` only say the shapes. Over the `tensor` axis each device fuses its own
    columns of all kernels, so that the gradient of x is added up over devices once; kernels that it does not split evenly
    stay apart.
    """
    lead, outs, ways = x.shape[: x.ndim - axes], [kernel.shape[axes:] for kernel in kernels], axis_size("tensor")
    if module.has_variable("packed", name):
        y, ways = row_product(x.reshape(math.prod(lead), -1), module.get_variable("packed", name)), 1
    elif len(kernels) == 1 or not module.config.fuse_projections or any(out[0] % ways for out in outs):
        return [product(x, kernel, axes) for kernel in kernels]
    else:
        columns = [kernel.reshape(*kernel.shape[:axes], ways, -1) for kernel in kernels]
        y = product(x, jnp.concatenate(columns, axis=-1), axes)
    ends = np.cumsum([math.prod(out) // ways for out in outs])
    parts = jnp.split(y, ends[:-1], axis=-1)
    return [part.reshape(*lead, *out) for part, out in zip(parts, outs, strict=True)]


def mlp_product(config: ModelConfig) -> typing.Callable:
    """How the products of the MLP are computed: `product` of `project`."""
    return fp8.dense if config.fp8 else dense


def _matrix(kernel: jax.Array, axes: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:axes]), -1)


def pack_params(params: dict, config: ModelConfig, every_product: bool) -> dict:
    """The `packed` collection: each layer's products as a decoding loop wants them, in the compute dtype.

    q, k, v in one matrix and gate, up too, laid out for `ops.decode.row_product`; with `every_product` the others as
    well, which pays where that layout is faster (CPUs). {} over the `tensor` axis, where products stay apart.
    """
    if axis_size("tensor") > 1:
        return {}

    def pack(*kernels: jax.Array, axes: int = 1) -> jax.Array:
        return jnp.concatenate([_matrix(kernel, axes).T for kernel in kernels]).astype(config.dtype)

    packed = {}
    for i in range(config.n_layers):
        parts = params[f"layers_{i}"]
        attn, mlp = ({n: p["kernel"] for n, p in parts[part].items() if "kernel" in p} for part in ("attn", "mlp"))
        packed[f"layers_{i}"] = layer = {"attn": {"qkv": pack(*(attn[name] for name in "qkv"))}, "mlp": {}}
        if "gate" in mlp:
            layer["mlp"]["gate_up"] = pack(mlp.pop("gate"), mlp.pop("up"))
        if every_product:
            layer["attn"]["o"] = pack(attn["o"], axes=2)
            layer["mlp"] |= {name: pack(kernel) for name, kernel in mlp.items()}
    return packed


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads (arXiv:2305.13245), optional RoPE, QK-norm and KV cache."""

    config: ModelConfig
    backend: str
    bias: bool

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        where: Where,
        cache: tuple[LayerCache, Cache] | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        c = self.config
        d, n, k, h = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        kernels, biases = zip(
            *(
                Linear((d, heads, h), (heads, h) if self.bias else None, c.init_std, c.dtype, name=name)()
                for name, heads in (("q", n), ("k", k), ("v", k))
            ),
            strict=True,
        )
        qkv = project(self, "qkv", x_BxTxD, kernels)
        qkv = [y if b is None else y + b for y, b in zip(qkv, biases, strict=True)]
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = (checkpoint_name(y, "qkv_proj") for y in qkv)
        if c.qk_norm:
            q_BxTxNxH = RMSNorm(c.norm_eps, name="q_norm")(q_BxTxNxH)
            k_BxTxKxH = RMSNorm(c.norm_eps, name="k_norm")(k_BxTxKxH)
        if where.rope is not None:
            q_BxTxNxH, k_BxTxKxH = rotate(q_BxTxNxH, *where.rope), rotate(k_BxTxKxH, *where.rope)
        q_BxTxNxH = constrain(q_BxTxNxH, "batch", "seq", "heads", "head_dim")
        k_BxTxKxH = constrain(k_BxTxKxH, "batch", "seq", "kv_heads", "head_dim")
        v_BxTxKxH = constrain(v_BxTxKxH, "batch", "seq", "kv_heads", "head_dim")
        out_BxTxNxH, layer_cache = attend(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, where, cache, self.backend)
        out_BxTxNxH = checkpoint_name(constrain(out_BxTxNxH, "batch", "seq", "heads", "head_dim"), "attn_out")
        o_NxHxD, o_bias = Linear((n, h, d), (d,) if self.bias else None, output_std(c), c.dtype, name="o")()
        (y_BxTxD,) = project(self, "o", out_BxTxNxH, [o_NxHxD], axes=2)
        return (y_BxTxD if o_bias is None else y_BxTxD + o_bias), layer_cache


def rope_of(config: ModelConfig) -> np.ndarray:
    """The rotary frequencies (H/2,) of a config."""
    r = config.rope
    return rope_frequencies(
        config.head_dim,
        r.theta,
        kind=r.scaling,
        factor=r.factor,
        low_freq_factor=r.low_freq_factor,
        high_freq_factor=r.high_freq_factor,
        original_max_len=r.original_max_len,
    )


def attend(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    where: Where,
    cache: tuple[LayerCache, Cache] | None,
    backend: str,
) -> tuple[jax.Array, LayerCache | None]:
    """Attention among the tokens given, or over the cache once it is filled; returns the cache with them written in.

    The prefill (`slot` is the int 0) sees its own tokens only, so it attends to them and not to the empty slots.
    """
    layer = None
    if cache is not None:
        layer, shared = cache
        layer = LayerCache(*write_cache(*layer, k_BxTxKxH, v_BxTxKxH, shared.slot))
        if not isinstance(shared.slot, int):
            mask_BxTxS = shared.positions_BxS[:, None, :] <= where.positions_BxT[:, :, None]
            return cached_attention(q_BxTxNxH, *layer, mask_BxTxS), layer
    out_BxTxNxH = attention(
        q_BxTxNxH,
        k_BxTxKxH,
        v_BxTxKxH,
        backend=backend,
        q_positions_BxT=where.positions_BxT,
        kv_positions_BxS=where.positions_BxT,
        q_segment_ids_BxT=where.segment_ids_BxT,
        kv_segment_ids_BxS=where.segment_ids_BxT,
    )
    return out_BxTxNxH, layer
