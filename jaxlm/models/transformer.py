"""The decoder-only transformer that all families share: embed, layers (unrolled or scanned, with remat), final norm.

Parameters are always kept per layer (`layers_0`, `layers_1`, ...), so the checkpoint layout does not depend on how the
layers run. Legend: B batch, T tokens, D model, V vocabulary, Vp
vocabulary padded to a multiple of 128, L layers.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.config import AdapterConfig, ModelConfig
from jaxlm.devices.sharding import constrain
from jaxlm.devices.tree import layer_name, map_named
from jaxlm.models.init import parameter
from jaxlm.models.layers import SAVED_NAMES, Block, Cache, Embedding, LayerCache, TokenInfo, dropout
from jaxlm.ops import int8

# What the forward pass may save of each layer for the backward pass: everything (none), the tagged activations (names), the
# outputs of products with weights (dots), or only the layer's input (full).
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES),
}
# The policy `names`, with the saved activations in the host's memory.
OFFLOAD_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(SAVED_NAMES),
    offload_src="device",
    offload_dst="pinned_host",
)


class Transformer(nn.Module):
    """Turns tokens (B, T) into hidden states after the final norm, (B, T, D) in the compute dtype.

    `model.apply({"params": params}, tokens_BxT, positions_BxT, segment_ids_BxT, train=True, rngs={"dropout": key})`.
    The variables may have collections besides `params`: adapters (see `models.adapters`), packed kernels. Layer i gets their
    entries under `tree.layer_name(i)`; if layers are scanned, all layers must have the same leaves.

    Args of `apply`, after the variables:
      positions_BxT: the position of each token in its document; None counts from 0 in each row.
      segment_ids_BxT: the id of each token's document (tokens attend only within equal ids); None if a row is one
        document.
      train: True for dropout, with the key `dropout` of `rngs`.
      cache: the KV cache. If it is given, the result is (hidden, the cache with these tokens written).
      until_BxT: in place of segment ids: tokens at indices s to until[s] - 1 attend to the token at index s.

    Attributes:
      backend: the attention backend, one of `ops.attention.BACKENDS`.
      adapter: the section `adapter` of the config, if the variables may hold an adapter.
      row_ids: the tokens that have a row in the collection `rows`.
    """

    config: ModelConfig
    backend: str
    adapter: AdapterConfig | None = None
    row_ids: tuple[int, ...] = ()

    # What a family sets.
    norm: typing.ClassVar[type[nn.Module]]
    mlp: typing.ClassVar[type[nn.Module]]
    always_bias: typing.ClassVar[bool] = False  # True: attention has biases, whatever `model.bias` says

    def embed(self, tokens_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        """Returns the input embeddings (B, T, D) in the compute dtype.

        The embeddings of `row_ids` have their row of the collection `rows` added. Ids from `vocab_size` on are the virtual
        tokens of the collection `prompt`.
        """
        del positions_BxT
        x_BxTxD = Embedding(self.config.padded_vocab_size, self.config, name="embed")(tokens_BxT)
        if "rows" in self.variables:
            hit_BxTxN = (tokens_BxT[:, :, None] == np.asarray(self.row_ids)).astype(jnp.float32)
            x_BxTxD += (hit_BxTxN @ self.variables["rows"]["embed"]["rows"]).astype(x_BxTxD.dtype)
        if "prompt" in self.variables:
            prompt_PxD = self.variables["prompt"]["embed"]["prompt"].astype(x_BxTxD.dtype)
            place_BxT = tokens_BxT - self.config.vocab_size
            x_BxTxD = jnp.where(place_BxT[:, :, None] < 0, x_BxTxD, prompt_PxD[jnp.maximum(place_BxT, 0)])
        return x_BxTxD

    def rope(self, positions_BxT: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Returns cos and sin of the rotary embeddings, computed once for all layers; None in a family without them."""
        del positions_BxT
        return None

    def block(self, backend: str, name: str | None = None) -> Block:
        """Returns one layer of this family: a submodule if `name` is given, else a separate module for `block.apply`."""
        c, parent = self.config, self if name else None
        dropped = self.adapter.dropout if self.adapter else 0.0
        return Block(c, backend, self.norm, self.mlp, self.always_bias or c.bias, dropped, name=name, parent=parent)

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        positions_BxT: jax.Array | None = None,
        segment_ids_BxT: jax.Array | None = None,
        train: bool = False,
        cache: Cache | None = None,
        until_BxT: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        c = self.config
        if positions_BxT is None:
            positions_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        dropped = c.dropout or (self.adapter and self.adapter.dropout)
        key = self.make_rng("dropout") if train and dropped else None
        x_BxTxD = self.embed(tokens_BxT, positions_BxT)
        x_BxTxD = dropout(x_BxTxD, c.dropout, None if key is None else jax.random.fold_in(key, c.n_layers))
        info = TokenInfo(positions_BxT, segment_ids_BxT, self.rope(positions_BxT), until_BxT)
        layers = []
        if self.is_initializing():
            for i in range(c.n_layers):
                x_BxTxD, _ = self.block("xla", layer_name(i))(x_BxTxD, info)
            if not c.tie_embeddings:
                parameter(self, "head", _init_head, c)
        elif cache is not None:
            block = self.block(self.backend)
            for i, layer_cache in enumerate(cache.layers):
                x_BxTxD, layer_cache = block.apply(self.layer_variables(i), x_BxTxD, info, cache=(layer_cache, cache))
                layers.append(layer_cache)
        else:
            x_BxTxD = self.run_layers(x_BxTxD, info, key)
        hidden_BxTxD = self.norm(c.norm_eps, name="final_norm")(x_BxTxD)
        if cache is None and in_int8(self.variables):
            # Decoding multiplies by the head in integers: with these values, so does a product in floats.
            rounded = int8.decode(int8.quantize(hidden_BxTxD.reshape(-1, c.d_model)), c.dtype)
            hidden_BxTxD = rounded.reshape(hidden_BxTxD.shape)
        return hidden_BxTxD if cache is None else (hidden_BxTxD, cache._replace(layers=tuple(layers)))

    def layer_variables(self, i: int) -> dict:
        """Returns collection -> layer i's variables, without empty collections; the adapter's scale is multiplied in."""
        name = layer_name(i)
        of_layer = {collection: tree[name] for collection, tree in self.variables.items() if name in tree}
        if self.adapter and "lora" in of_layer:
            of_layer["lora"] = scaled(of_layer["lora"], self.adapter)
        return of_layer

    def run_layers(self, x_BxTxD: jax.Array, info: TokenInfo, key: jax.Array | None) -> jax.Array:
        """Runs all layers, unrolled or as a scan over stacked variables, with the same result: (B, T, D) -> (B, T, D)."""
        c = self.config
        fn = functools.partial(apply_layer, self.block(self.backend))
        if c.remat != "none":
            policy = OFFLOAD_POLICY if c.offload else REMAT_POLICIES[c.remat]
            # In a scan XLA can't merge recomputation with the forward pass, so `prevent_cse` would only cost time.
            fn = jax.checkpoint(fn, policy=policy, prevent_cse=not c.scan_layers)
        variables = [self.layer_variables(i) for i in range(c.n_layers)]
        if not c.scan_layers:
            for i, variables_l in enumerate(variables):
                x_BxTxD = fn(variables_l, x_BxTxD, info, key, i)
            return x_BxTxD

        def body(x_BxTxD: jax.Array, layer: tuple) -> tuple[jax.Array, None]:
            variables_l, i = layer
            return fn(variables_l, x_BxTxD, info, key, i), None

        # Stacks a copy inside the program: parameters stay per layer, so that checkpoints do not depend on `scan_layers`.
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)
        return jax.lax.scan(body, x_BxTxD, (stacked, jnp.arange(c.n_layers)))[0]


def scaled(lora: dict, adapter: AdapterConfig) -> dict:
    return map_named(lambda name, x: x * adapter.scale if name.endswith("lora_b") else x, lora)


def apply_layer(
    block: Block, variables: dict, x_BxTxD: jax.Array, info: TokenInfo, key: jax.Array | None, layer: int | jax.Array
) -> jax.Array:
    """Runs one layer as a pure function of its variables: (B, T, D) -> (B, T, D). Dropout depends only on (key, layer)."""
    keys, rngs = (None, None), {}
    if key is not None:
        key = jax.random.fold_in(key, layer)
        keys = tuple(jax.random.split(key))
        rngs = {"lora": jax.random.fold_in(key, 2)} if block.lora_dropout else {}
    y_BxTxD, _ = block.apply(variables, x_BxTxD, info, keys, rngs=rngs)
    return constrain(y_BxTxD, "batch", "seq", "act_embed")


def _init_head(key: jax.Array, config: ModelConfig) -> dict:
    return {"kernel": config.init_std * jax.random.normal(key, (config.d_model, config.padded_vocab_size))}


def empty_cache(config: ModelConfig, batch: int, slots: int) -> tuple[LayerCache, ...]:
    """Returns each layer's empty KV cache with `slots` slots in each row."""
    heads = (batch, config.n_kv_heads)
    k_BxKxHxS = jnp.zeros((*heads, config.head_dim, slots), config.dtype)
    v_BxKxSxH = jnp.zeros((*heads, slots, config.head_dim), config.dtype)
    return (LayerCache(k_BxKxHxS, v_BxKxSxH),) * config.n_layers


def in_int8(variables: typing.Mapping[str, typing.Any]) -> bool:
    """True if the variables are those of `quantized.in_int8`."""
    return "embed" in variables.get("packed", {})


def head_matrix(packed: dict) -> int8.Int8:
    """Returns the head by rows of the vocabulary, from the collection `packed` of variables that are `in_int8`."""
    return packed["head"]["kernel"] if "head" in packed else packed["embed"]["embedding"]


def head_kernel(params: dict, config: ModelConfig, packed: dict | None = None) -> jax.Array:
    """Returns the head's kernel (D, Vp) in the compute dtype: the transposed embedding if `tie_embeddings` is set.

    Columns from `vocab_size` on are padding, which the caller masks or cuts off. `packed`: the collection, of variables that
    are `in_int8`.
    """
    if in_int8({"packed": packed or {}}):
        return int8.decode(head_matrix(packed), config.dtype).T
    head_DxVp = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return head_DxVp.astype(config.dtype)


def head_rows(model: Transformer, variables: dict[str, dict]) -> dict:
    """Returns `row_ids` and `rows_NxD` for the functions of `ops.xent`, from the collection `rows`; {} without it."""
    if "rows" not in variables:
        return {}
    part = "embed" if model.config.tie_embeddings else "head"
    return {"row_ids": model.row_ids, "rows_NxD": variables["rows"][part]["rows"]}
