"""The output head, which turns hidden states into logits over the vocabulary.

Legend: B batch, T tokens, D model, V vocabulary, Vp vocabulary padded to a multiple of 128.
"""

import jax
import jax.numpy as jnp

from jaxlm.config import ModelConfig
from jaxlm.devices.sharding import constrain
from jaxlm.models.transformer import Transformer


def head_kernel(params: dict, config: ModelConfig) -> jax.Array:
    """Returns the head's kernel (D, Vp) in the compute dtype: the transposed embedding if `tie_embeddings` is set.

    Columns from `vocab_size` on are padding, which the caller masks or cuts off.
    """
    head_DxVp = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return head_DxVp.astype(config.dtype)


def head_rows(model: Transformer, variables: dict[str, dict]) -> dict:
    """Returns what the functions of `ops.xent` take of the collection `rows`: `row_ids` and `rows_NxD`; {} without one."""
    if "rows" not in variables:
        return {}
    part = "embed" if model.config.tie_embeddings else "head"
    return {"row_ids": model.row_ids, "rows_NxD": variables["rows"][part]["rows"]}


def logits(
    model: Transformer,
    params: dict,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array | None = None,
    segment_ids_BxT: jax.Array | None = None,
) -> jax.Array:
    """Returns the logits (B, T, V) in float32, without the padding columns.

    All of them are in memory at once: for small batches and tests. The loss works on tiles (`ops.xent`).

    Args:
      model: the model, from `families.build`.
      params: the model's parameters.
      tokens_BxT, positions_BxT, segment_ids_BxT: as `Transformer` takes them.
    """
    c = model.config
    hidden_BxTxD = model.apply({"params": params}, tokens_BxT, positions_BxT, segment_ids_BxT)
    head_DxV = head_kernel(params, c)[:, : c.vocab_size]
    logits_BxTxV = jnp.einsum("btd,dv->btv", hidden_BxTxD, head_DxV, preferred_element_type=jnp.float32)
    return constrain(logits_BxTxV, "batch", "seq", "vocab")
