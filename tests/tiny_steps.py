"""A config, packed batches and meshes for tests of the train step, and how close two states must be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.step import parts

B, T = 8, 16


def make_config(**train) -> config.Config:
    c = config.resolve(config_files.load("base", ["data.path=x", f"train.batch_size={B}", f"train.seq_len={T}"]))
    c = dataclasses.replace(c, model=tiny.model_config(), optim=dataclasses.replace(c.optim, warmup_steps=2))
    return dataclasses.replace(c, train=dataclasses.replace(c.train, **train))


def changed(c: config.Config, **changes) -> config.Config:
    """`c` with changes by section: model__scan_layers=True."""
    for name, value in changes.items():
        section, key = name.split("__")
        c = dataclasses.replace(c, **{section: dataclasses.replace(getattr(c, section), **{key: value})})
    return c


def one_layer(**changes) -> config.Config:
    """`make_config` with a model of one layer, which traces and compiles in half the time, and `changes` by section."""
    return changed(make_config(), **({"model__n_layers": 1, "model__attention": "xla"} | changes))


def run_steps(made: parts.Parts, batches=None, origin=None, program=None) -> tuple:
    """(state, metrics of each step, frozen variables) after a step on each batch; `program`: `made.jit()`, if it is there."""
    now, frozen = made.create(origin)
    history = []
    with jax.set_mesh(made.mesh):
        fn = program or made.jit()
        for batch in BATCHES if batches is None else batches:
            now, metrics = fn(frozen, now, sharding.to_global(jax.tree.map(np.asarray, batch), made.mesh, B))
            history.append(metrics)
    return now, history, frozen


def make_batch(seed: int = 0) -> dict:
    """Packed rows whose number of counted tokens differs from row to row."""
    batch = tiny.packed_batch(tiny.model_config(), batch=B, tokens=T, seed=seed)
    counted = np.random.default_rng(seed).integers(1, T, B)
    return batch | {"weights": jnp.asarray(np.arange(T)[None] < counted[:, None], jnp.float32)}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1):
    c = config.MeshConfig(data, fsdp, tensor, context)
    return sharding.make_mesh(c, jax.devices()[: data * fsdp * tensor * context])


def assert_close(a, b, rtol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


BATCHES = [make_batch(0), make_batch(1)]
