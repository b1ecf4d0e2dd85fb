"""Models behind one interface: `build` a config's model, then use these functions on its plain dict of parameters.

Legend: B batch, T tokens, D model, V vocabulary, Vp vocabulary padded to a multiple of 128.
"""

import functools
import re

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm import tree
from jaxlm.config import ConfigError, ModelConfig
from jaxlm.models.gpt2 import GPT2
from jaxlm.models.llama import Llama
from jaxlm.models.transformer import Transformer
from jaxlm.sharding import constrain

__all__ = ["abstract_params", "build", "head_kernel", "init_params", "logical_axes", "logits"]

FAMILIES = {"llama": Llama, "gpt2": GPT2}

# The one table from a parameter's name (full match) to its logical axes (see sharding.RULES).
LOGICAL_AXES = {
    r"embed/embedding": ("vocab", "embed"),
    r"pos_embed/embedding": ("position", "embed"),
    r"head/kernel": ("embed", "vocab"),
    r"(.*/)?[a-z]*_norm/(scale|bias)": ("norm",),
    r".*/attn/q/kernel": ("embed", "heads", "head_dim"),
    r".*/attn/[kv]/kernel": ("embed", "kv_heads", "head_dim"),
    r".*/attn/o/kernel": ("heads", "head_dim", "embed"),
    r".*/attn/q/bias": ("heads", "head_dim"),
    r".*/attn/[kv]/bias": ("kv_heads", "head_dim"),
    r".*/mlp/(gate|up)/kernel": ("embed", "mlp"),
    r".*/mlp/(gate|up)/bias": ("mlp",),
    r".*/mlp/down/kernel": ("mlp", "embed"),
    r".*/(attn/o|mlp/down)/bias": ("norm",),
}


def build(model_config: ModelConfig, attention_backend: str) -> Transformer:
    """The model of a config, with an attention backend as `ops.attention.resolve_backend` names it.

    Raises:
      ConfigError: an unknown family.
    """
    if model_config.family not in FAMILIES:
        raise ConfigError(f"config.model.family={model_config.family!r}: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[model_config.family](model_config, attention_backend)


def init_params(model: nn.Module, key: jax.Array) -> dict:
    """New parameters, a plain nested dict of float32 arrays: the same values on any mesh."""
    tokens_BxT = jnp.zeros((1, 2), jnp.int32)
    return model.init(key, tokens_BxT)["params"]


def abstract_params(model: nn.Module) -> dict:
    """The parameters as ShapeDtypeStructs; takes no memory, and traces a model once however often it is asked."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(model))  # a dict of the caller's own


@functools.lru_cache(maxsize=8)
def _abstract_params(model: nn.Module) -> dict:
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def logical_axes(model: nn.Module) -> dict:
    """Logical axis names of every parameter: a tree like the parameters with tuples as leaves.

    Raises:
      KeyError: a parameter that the table does not name.
    """

    def axes(name: str, leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        for pattern, names in LOGICAL_AXES.items():
            if re.fullmatch(pattern, name) and len(names) == len(leaf.shape):
                return names
        raise KeyError(f"no logical axes for parameter {name} {leaf.shape}: add it to models.LOGICAL_AXES")

    return tree.map_named(axes, abstract_params(model))


def head_kernel(params: dict, config: ModelConfig) -> jax.Array:
    """The output head (D, Vp) in the compute dtype; columns from `vocab_size` on are padding, to be masked."""
    head_DxV = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return head_DxV.astype(config.dtype)


def logits(
    model: nn.Module,
    params: dict,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array | None = None,
    segment_ids_BxT: jax.Array | None = None,
) -> jax.Array:
    """Logits (B, T, V) in float32, padded columns cut off. Holds them all: for small batches and tests."""
    c = model.config
    hidden_BxTxD = model.apply({"params": params}, tokens_BxT, positions_BxT, segment_ids_BxT)
    head_DxV = head_kernel(params, c)[:, : c.vocab_size]
    logits_BxTxV = jnp.einsum("btd,dv->btv", hidden_BxTxD, head_DxV, preferred_element_type=jnp.float32)
    return constrain(logits_BxTxV, "batch", "seq", "vocab")
