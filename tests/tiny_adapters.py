"""Low-rank adapters for tests, a stand-in for the real ones: a collection `lora` that changes the layers' kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm import tree
from jaxlm.models import layers
from jaxlm.models.params import input_axes


def added():
    """A context in which every Linear that has `lora` variables adds their product to its kernel."""
    return nn.intercept_methods(_add)


def _add(call, args, kwargs, context):
    out, module = call(*args, **kwargs), context.module
    if not isinstance(module, layers.Linear) or not module.has_variable("lora", "lora_a"):
        return out
    a, b = (module.get_variable("lora", name) for name in ("lora_a", "lora_b"))
    return out[0] + jnp.tensordot(a, b, 1), out[1]


def random_adapters(params: dict, names: tuple[str, ...] = ("attn/q", "attn/o", "mlp/down")) -> dict:
    """Of rank 2, for the kernels of every layer that have these names."""
    rng, adapters = np.random.default_rng(5), {}
    for layer_name in filter(lambda name: tree.layer_of(name) is not None, params):
        layer = adapters[layer_name] = {}
        for name in names:
            part, projection = name.split("/")
            shape = params[layer_name][part][projection]["kernel"].shape
            inputs = input_axes(f"{name}/kernel")
            a, b = (jnp.asarray(rng.normal(0, 0.3, s)) for s in ((*shape[:inputs], 2), (2, *shape[inputs:])))
            layer.setdefault(part, {})[projection] = {"lora_a": a, "lora_b": b}
    return adapters


def merged(params: dict, adapters: dict) -> dict:
    """Parameters with the adapters' products added to their kernels."""
    params = jax.tree.map(lambda x: x, params)
    for layer, parts in adapters.items():
        for part, projections in parts.items():
            for name, adapter in projections.items():
                params[layer][part][name]["kernel"] += jnp.tensordot(adapter["lora_a"], adapter["lora_b"], 1)
    return params
