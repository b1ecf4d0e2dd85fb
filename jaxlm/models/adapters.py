"""FAKE of H1's module, until it lands."""

import dataclasses
import jax, jax.numpy as jnp
from jaxlm import tree
from jaxlm.models.params import input_axes

COLLECTIONS = ("lora", "rows", "prompt")
MERGED = ("lora", "rows")


@dataclasses.dataclass(frozen=True)
class Adapter:
    settings: object
    row_ids: tuple = ()

    @property
    def unmerged(self):
        return None

    @property
    def scale(self):
        return self.settings.alpha / self.settings.rank


def of(settings, row_ids):
    return None if settings.kind == "none" else Adapter(settings, tuple(row_ids))


def merge(params, variables, adapter):
    found = dict(tree.named_leaves(params))
    for name, a in tree.named_leaves(variables.get("lora", {})):
        if name.endswith("lora_a"):
            kernel = name.removesuffix("lora_a") + "kernel"
            if kernel in found:
                b = dict(tree.named_leaves(variables["lora"]))[name.removesuffix("a") + "b"]
                found[kernel] = found[kernel] + adapter.scale * jnp.tensordot(a, b, 1)
    for name, d in tree.named_leaves(variables.get("rows", {})):
        ids = jnp.asarray(adapter.row_ids)
        if name.startswith("embed") and "embed/embedding" in found:
            found["embed/embedding"] = jnp.asarray(found["embed/embedding"]).at[ids].add(d)
        if name.startswith("head") and "head/kernel" in found:
            found["head/kernel"] = jnp.asarray(found["head/kernel"]).at[:, ids].add(d.T)
    return tree.nested(found.items())
