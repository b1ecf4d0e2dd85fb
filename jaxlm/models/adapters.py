"""Adapters: variables that are trained for a model whose own parameters are frozen. As in PEFT, except `rows`.

    lora    layers_3/attn/q/lora_a (*in, rank), lora_b (rank, *out): y += scale (dropout(x) A) B (arXiv:2106.09685)
    rows    embed/rows (N, D), and head/rows unless embeddings are tied: added to N tokens' rows of embedding and head
    prompt  embed/prompt (P, D): virtual tokens before each text (arXiv:2104.08691), with ids from `vocab_size` on

`rows` are differences, which start at 0, so that creating them needs no model parameters. PEFT's
`trainable_token_indices` stores whole rows instead.
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import AdapterConfig, ConfigError
from jaxlm.devices import tree
from jaxlm.models.params import abstract_params, axes_of, input_axes
from jaxlm.models.transformer import Transformer

Variables = dict[str, dict]  # collection -> tree
MERGED = ("lora", "rows")  # the collections that can be added to the parameters
COLLECTIONS = (*MERGED, "prompt")  # all; virtual tokens can't be merged


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter of a model with frozen parameters.

    Attributes:
      settings: the section `adapter` of the config; its kind is not "none".
      row_ids: the tokens whose rows of the embedding and the head are trained too.
    """

    settings: AdapterConfig
    row_ids: tuple[int, ...] = ()

    def attach(self, model: Transformer) -> Transformer:
        return model.clone(adapter=self.settings, row_ids=self.row_ids)

    def init(self, model: Transformer, key: jax.Array) -> Variables:
        """Returns new variables. Except for a prompt, they leave the model's outputs unchanged at first.

        Raises ConfigError if `adapter.targets` match no kernel of a layer.
        """
        c, s = model.config, self.settings
        made: Variables = {}
        if s.kind == "lora":
            made["lora"] = self._init_lora(model, key)
        if s.kind == "prompt":
            made["prompt"] = {"embed": {"prompt": c.init_std * jax.random.normal(key, (s.prompt_tokens, c.d_model))}}
        if self.row_ids:
            rows = {"rows": jnp.zeros((len(self.row_ids), c.d_model))}
            made["rows"] = {part: dict(rows) for part in (("embed",) if c.tie_embeddings else ("embed", "head"))}
        return made

    def _init_lora(self, model: Transformer, key: jax.Array) -> dict:
        """Returns new LoRA factors: A uniform within 1 / sqrt(inputs), as in PEFT, and B zero."""
        made = []
        for name, kernel in self._kernels(model):
            axes, rank = input_axes(name), self.settings.rank
            inputs, outputs = kernel.shape[:axes], kernel.shape[axes:]
            bound = math.prod(inputs) ** -0.5
            drawn = jax.random.fold_in(key, zlib.crc32(name.encode()))
            place = name.removesuffix("kernel")
            made.append((f"{place}lora_a", jax.random.uniform(drawn, (*inputs, rank), minval=-bound, maxval=bound)))
            made.append((f"{place}lora_b", jnp.zeros((rank, *outputs))))
        return tree.nested(made)

    def _kernels(self, model: Transformer) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        named = [
            (name, leaf)
            for name, leaf in tree.named_leaves(abstract_params(model))
            if tree.layer_of(name) is not None and name.endswith("/kernel") and self._is_target(name)
        ]
        if not named:
            raise ConfigError(
                f"adapter.targets={self.settings.targets} match no kernel of a layer: attn/q, k, v, o and mlp/gate, up, down do"
            )
        return named

    def _is_target(self, name: str) -> bool:
        short = name.partition("/")[2].removesuffix("/kernel")
        return any(re.fullmatch(pattern, short) for pattern in self.settings.targets)

    def logical_axes(self, model: Transformer) -> Variables:
        """Returns the logical axes of each variable. LoRA factors have those of their kernel, and None for the rank."""
        kernels = (
            {name: axes_of(name, leaf) for name, leaf in self._kernels(model)} if self.settings.kind == "lora" else {}
        )

        def of(name: str, leaf: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
            place, _, which = name.rpartition("/")
            kernel = f"{place}/kernel"
            if kernel not in kernels:
                return (None, "embed")  # of rows and prompt
            inputs = input_axes(kernel)
            return (*kernels[kernel][:inputs], None) if which == "lora_a" else (None, *kernels[kernel][inputs:])

        shapes = jax.eval_shape(lambda: self.init(model, jax.random.key(0)))
        return {collection: tree.map_named(of, part) for collection, part in shapes.items()}


def of(settings: AdapterConfig, row_ids: tuple[int, ...]) -> Adapter | None:
    """Returns the adapter of a config; None if all parameters are trained. `row_ids` may be in any order."""
    return Adapter(settings, tuple(sorted(set(row_ids)))) if settings.kind != "none" else None


def stacked(parts: Sequence[tuple[Adapter, Variables]]) -> dict:
    """Returns the collection `lora` of several adapters in one, on the host: their ranks side by side, the scale in B.

    With a table `lora_mask` beside each pair of factors, float32 (N + 1, all ranks): row n has ones in the ranks of adapter n,
    from 1, and row 0 none. A step replaces it by the batch rows' own.
    """
    each = [dict(tree.named_leaves(variables["lora"])) for _, variables in parts]
    rank = max(factor.shape[-1] for leaves in each for name, factor in leaves.items() if name.endswith("lora_a"))
    mask = np.kron(np.eye(len(parts) + 1, len(parts), -1), np.ones(rank)).astype(np.float32)
    factors = {}
    for name, like in {name: leaf for leaves in each for name, leaf in leaves.items()}.items():
        axis = like.ndim - 1 if name.endswith("lora_a") else 0
        factors[name] = np.zeros((*like.shape[:axis], len(parts) * rank, *like.shape[axis + 1 :]), np.float32)
        factors[f"{name[:-1]}mask"] = mask
        ranks = np.moveaxis(factors[name], axis, 0)
        for place, ((adapter, _), leaves) in enumerate(zip(parts, each, strict=True)):
            if name in leaves:
                own = np.moveaxis(leaves[name], axis, 0) * (1 if axis else adapter.settings.scale)
                ranks[place * rank : place * rank + len(own)] = own
    return tree.nested(factors.items())


def merge(params: dict, variables: Variables, adapter: Adapter) -> dict:
    """Returns the parameters with `lora` and `rows` added to them, in their dtype; ignores a prompt.

    `params` may be a part of the tree: changes to absent parameters are skipped.
    """
    factors = dict(tree.named_leaves(variables.get("lora", {})))
    rows = dict(tree.named_leaves(variables.get("rows", {})))
    ids = jnp.asarray(adapter.row_ids, jnp.int32)

    def added(name: str, leaf: jax.Array) -> jax.Array:
        place = name.removesuffix("kernel")
        if f"{place}lora_a" in factors:
            product = jnp.tensordot(factors[f"{place}lora_a"], factors[f"{place}lora_b"], 1)
            return (leaf + adapter.settings.scale * product).astype(leaf.dtype)
        if name == "embed/embedding" and "embed/rows" in rows:
            return jnp.asarray(leaf).at[ids].add(rows["embed/rows"])
        if name == "head/kernel" and "head/rows" in rows:
            return jnp.asarray(leaf).at[:, ids].add(rows["head/rows"].T)
        return leaf

    return tree.map_named(added, params)
