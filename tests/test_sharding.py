"""Meshes, the axis table, and rows of the batch by process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlm import sharding
from jaxlm.config import ConfigError, MeshConfig


def test_mesh_fills_the_rest_and_refuses_what_does_not_fit():
    assert sharding.mesh_shape(MeshConfig(-1, 2, 2, 1), 8) == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ConfigError, match="does not make 8 devices"):
        sharding.mesh_shape(MeshConfig(3, 1, 1, 1), 8)
    with pytest.raises(ConfigError, match="does not make 8 devices"):
        sharding.mesh_shape(MeshConfig(-1, 3, 1, 1), 8)
    with pytest.raises(ConfigError, match="does not make 8 devices"):
        sharding.mesh_shape(MeshConfig(-1, 16, 1, 1), 8)


def test_spec_leaves_out_what_does_not_divide():
    mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))
    assert sharding.spec(("embed", "mlp"), (64, 32), mesh) == P("fsdp", "tensor")
    assert sharding.spec(("embed", "mlp"), (62, 32), mesh) == P(None, "tensor")
    assert sharding.spec(("embed", "embed"), (64, 64), mesh) == P("fsdp", None)
    assert sharding.spec(("batch", "seq"), (8, 16), mesh) == P("fsdp", None)
    assert sharding.spec(("norm",), (64,), mesh) == P(None)


def test_check_batch_names_the_key():
    mesh = sharding.make_mesh(MeshConfig(2, 4, 1, 1))
    sharding.check_batch(mesh, microbatch_size=16)
    with pytest.raises(ConfigError, match="microbatch_size=12 is not divisible by the mesh's data x fsdp = 8"):
        sharding.check_batch(mesh, microbatch_size=12)


def test_local_rows_and_global_arrays():
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2, 1))
    rows = sharding.local_rows(mesh, 8)
    np.testing.assert_array_equal(rows, np.arange(8))
    batch = {"tokens": np.arange(24).reshape(8, 3)}
    on_mesh = sharding.to_global(batch, mesh, 8)["tokens"]
    np.testing.assert_array_equal(on_mesh, batch["tokens"])
    assert on_mesh.addressable_shards[0].data.shape == (2, 3)


def test_constrain_is_a_no_op_without_a_mesh_and_shards_within_one():
    x = jnp.zeros((8, 4))
    assert sharding.constrain(x, "batch", None) is x
    mesh = sharding.make_mesh(MeshConfig(8, 1, 1, 1))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x + 1, "batch", None))(x)
    assert y.sharding.shard_shape(y.shape) == (1, 4)
