"""Shipped configs: built from shapes; each program that they shrink to takes a step; the large lower on one and 8 devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import config, models
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import sharding, tree
from jaxlm.plan import flops, lower, rules
from jaxlm.step import parts, step
from jaxlm.step.objectives import lm

LARGE = 1_000_000


def load(name: str, *overrides: str) -> config.Config:
    c = config.resolve(
        config_files.load(name, ["workdir=w", "model.attention=xla", "model.dtype=bfloat16", *overrides])
    )
    return rules.by_rule(c, lambda line: None)


PRETRAINED = [name for name in config_files.shipped_configs() if config_files.load(name).program == "pretrain"]


@pytest.mark.parametrize("name", PRETRAINED)  # the others take the model of their origin
def test_shapes_match_the_count(name):
    c = load(name)
    abstract = models.abstract_params(models.build(c.model, "xla"))
    padding = (c.model.padded_vocab_size - c.model.vocab_size) * c.model.d_model
    heads = 1 if c.model.tie_embeddings else 2
    assert tree.count(abstract) - heads * padding == flops.count_params(c.model)


def shrunk(name: str) -> config.Config:
    """One layer, and heads in the config's proportion: configs of one family, optimizer and policy end as one program."""
    c = load(name)
    kv = c.model.n_kv_heads and (4 if c.model.n_kv_heads == c.model.n_heads else 2)
    sizes = {"n_layers": 1, "n_heads": 4, "n_kv_heads": kv, "d_model": 32, "head_dim": 8, "d_ff": 32, "vocab_size": 100}
    model = dataclasses.replace(c.model, **sizes, max_seq_len=16)
    train = dataclasses.replace(c.train, batch_size=2, microbatch_size=2, seq_len=8)
    return dataclasses.replace(c, model=model, train=train)


def program(name: str) -> tuple:
    c = shrunk(name)
    return dataclasses.replace(c.model, rope=None), c.optim.name, c.optim.offload, c.loss


@pytest.mark.parametrize("name", {program(name): name for name in config_files.shipped_configs()}.values())
def test_shrunk_it_takes_a_step(name):
    c = shrunk(name)
    made = parts.make(c, sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1]), lm.make)
    ones = jnp.ones((2, 8), jnp.int32)
    batch = {"tokens": ones, "targets": ones, "segment_ids": ones, "positions": ones * jnp.arange(8)}
    new, metrics = jax.jit(made.step())(*made.create()[::-1], batch | {"weights": jnp.ones((2, 8))})
    assert np.isfinite(metrics["loss"])
    assert float(metrics["update_norm"]) > 0
    assert int(new.skipped) == 0


@pytest.mark.engines
@pytest.mark.parametrize("name", ["gpuburnout_1b", "gpuburnout_3b", "domain_7b"])
@pytest.mark.parametrize("devices", [1, 8])
def test_large_configs_lower_and_leave_nothing_large_whole(name, devices):
    c = load(name)
    mesh = sharding.make_mesh(MeshConfig(1, devices, 1, 1), jax.devices()[:devices])
    made = lower.parts_of(c, mesh)
    rows = lower.placements(made.abstract.params["params"], made.shardings.params["params"])
    assert made.lower().as_text().count("stablehlo.dot_general") > 10
    large = [row for row in rows if row.leaf.size > LARGE]
    assert len(large) > 6 * c.model.n_layers
    for row in large:
        assert row.elements * devices == row.leaf.size, row


def test_the_step_is_made_before_the_mesh_is_set(monkeypatch):
    """It makes a key, and the mesh's devices may be absent: `plan.lower` only describes H100s to XLA."""
    make, meshes = step.make, []

    def watched(*args):
        meshes.append(jax.sharding.get_abstract_mesh())
        return make(*args)

    monkeypatch.setattr(step, "make", watched)
    c = load("quickstart", "model.n_layers=1", "train.seq_len=32", "train.batch_size=8")
    lower.parts_of(c, sharding.make_mesh(MeshConfig(1, 8, 1, 1))).lower()
    assert [mesh.empty for mesh in meshes] == [True]
