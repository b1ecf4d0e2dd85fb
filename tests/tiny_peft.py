"""Random adapters for tests, and the parameters that they make of a base's, by plain numpy."""

import re

import jax
import numpy as np

from jaxlm.devices import tree
from jaxlm.interop import peft
from jaxlm.models.adapters import Adapter
from jaxlm.models.params import input_axes

EVERY = (r"attn/[qkvo]", r"mlp/(gate|up|down)")


def settings(**changed):
    """The section `adapter`; LoRA of rank 3 unless told otherwise."""
    given = {"kind": "lora", "rank": 3, "alpha": 8.0, "targets": EVERY} | changed
    return peft.settings(**given)


def adapted(params: dict, row_ids: tuple[int, ...] = (), seed: int = 0, **changed) -> peft.Adapted:
    """A low-rank product for each kernel that `targets` match, and differences of rows where there are ids."""
    rng, chosen = np.random.default_rng(seed), settings(**changed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    lora = []
    for name, kernel in tree.named_leaves(params):
        path = name.removesuffix("/kernel")
        inside = path.partition("/")[2]
        if tree.layer_of(name) is None or path == name or not any(re.fullmatch(p, inside) for p in chosen.targets):
            continue
        inputs = input_axes(name)
        lora += [(f"{path}/lora_a", draw(*kernel.shape[:inputs], chosen.rank))]
        lora += [(f"{path}/lora_b", draw(chosen.rank, *kernel.shape[inputs:]))]
    variables = {"lora": tree.nested(lora)}
    if row_ids:
        width = params["embed"]["embedding"].shape[1]
        tables = [place for place in ("embed", "head") if place in params]
        variables["rows"] = {place: {"rows": draw(len(row_ids), width)} for place in tables}
    return peft.Adapted(Adapter(chosen, row_ids), variables)


def merged(params: dict, given: peft.Adapted) -> dict:
    """The parameters with products and rows added."""
    values = {name: np.array(leaf) for name, leaf in tree.named_leaves(params)}
    factors = dict(tree.named_leaves(given.variables.get("lora", {})))
    for name in [name for name in factors if name.endswith("/lora_a")]:
        path = name.removesuffix("/lora_a")
        values[f"{path}/kernel"] += given.adapter.settings.scale * np.tensordot(
            factors[name], factors[f"{path}/lora_b"], 1
        )
    ids = list(given.adapter.row_ids)
    for place, part in given.variables.get("rows", {}).items():
        if place == "embed":
            values["embed/embedding"][ids] += part["rows"]
        else:
            values["head/kernel"][:, ids] += part["rows"].T
    return jax.tree.map(np.asarray, tree.nested(values.items()))
