"""A config, packed batches and meshes for tests of the train step, and how close two states must be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding

B, T = 8, 16


def make_config(**train) -> config.Config:
    c = config.resolve(config_files.load("base", ["data.path=x", f"train.batch_size={B}", f"train.seq_len={T}"]))
    c = dataclasses.replace(c, model=tiny.model_config(), optim=dataclasses.replace(c.optim, warmup_steps=2))
    return dataclasses.replace(c, train=dataclasses.replace(c.train, **train))


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
