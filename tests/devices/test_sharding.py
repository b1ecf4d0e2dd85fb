"""Meshes, the axis table, and rows of the batch by process."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.sharding import PartitionSpec as P

from jaxlm.config import ConfigError, MeshConfig
from jaxlm.devices import sharding


def test_mesh_fills_the_rest_and_refuses_what_does_not_fit():
    assert sharding.mesh_shape(MeshConfig(-1, 2, 2, 1), 8) == {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    for sizes in ((3, 1, 1, 1), (-1, 3, 1, 1), (-1, 16, 1, 1)):
        with pytest.raises(ConfigError, match="does not make 8 devices"):
            sharding.mesh_shape(MeshConfig(*sizes), 8)


def test_spec_leaves_out_what_does_not_divide():
    mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))
    assert sharding.spec(("embed", "mlp"), (64, 32), mesh) == P("fsdp", "tensor")
    assert sharding.spec(("embed", "mlp"), (62, 32), mesh) == P(None, "tensor")
    assert sharding.spec(("embed", "embed"), (64, 64), mesh) == P("fsdp", None)
    assert sharding.spec(("batch", "seq"), (8, 16), mesh) == P("fsdp", None)
    assert sharding.spec(("norm",), (64,), mesh) == P(None)


def test_what_does_not_split_rows_over_context_is_refused_there_alone():
    """Of rows that are not divisible: tests/run/test_workdir.py."""
    mesh, alone = (sharding.make_mesh(MeshConfig(*sizes)) for sizes in ((2, 1, 1, 4), (8, 1, 1, 1)))
    for keys, line in (
        ({"attention": "pallas"}, r"pallas does not split rows over mesh.context=4; .* xla, blocked, cudnn$"),
        ({"attention": "blocked", "fp8": True}, r"model.fp8 does not split rows over mesh.context=4"),
    ):
        model = tiny.model_config(**keys)
        with pytest.raises(ConfigError, match=line):
            sharding.check_context(mesh, 16, model)
        sharding.check_context(alone, 17, model)


@pytest.mark.parametrize(("sizes", "shard"), [((2, 2, 2, 1), (2, 6)), ((1, 2, 1, 4), (4, 1)), ((1, 2, 2, 2), (4, 3))])
def test_local_rows_and_global_arrays(sizes, shard):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    rows = sharding.local_rows(mesh, 8)
    np.testing.assert_array_equal(rows, np.arange(8))
    batch = {"tokens": np.arange(8 * 4 * 6).reshape(8, 24)[:, : shard[1] * sizes[3]]}
    on_mesh = sharding.to_global(batch, mesh, 8)["tokens"]
    np.testing.assert_array_equal(on_mesh, batch["tokens"])
    assert on_mesh.addressable_shards[0].data.shape == shard


class Elsewhere:
    """A mesh as the process that has only `devices` of it sees it."""

    def __init__(self, mesh, devices):
        self.mesh, self.devices = mesh, devices

    def addressable_devices_indices_map(self, shape):
        whole = self.mesh.devices_indices_map(shape)
        return {device: index for device, index in whole.items() if device in self.devices}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((2, 2, 2, 1), [0, 1, 2, 3]), ((2, 2, 1, 2), [0, 1, 2, 3]), ((1, 1, 1, 8), range(8)), ((4, 2, 1, 1), range(4))],
)
def test_a_process_loads_the_rows_that_its_devices_hold(monkeypatch, sizes, expected):
    """The first four devices of eight, as one of two processes has them; a row split over both is read by both."""
    mesh, real = sharding.make_mesh(MeshConfig(*sizes)), sharding.NamedSharding
    first = set(mesh.devices.flat[:4])
    monkeypatch.setattr(sharding, "NamedSharding", lambda mesh, spec: Elsewhere(real(mesh, spec), first))
    np.testing.assert_array_equal(sharding.local_rows(mesh, 8), expected)


def test_constrain_is_a_no_op_without_a_mesh_and_shards_within_one():
    x = jnp.zeros((8, 4))
    assert sharding.constrain(x, "batch", None) is x
    mesh = sharding.make_mesh(MeshConfig(8, 1, 1, 1))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x + 1, "batch", None))(x)
    assert y.sharding.shard_shape(y.shape) == (1, 4)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What of a device decides where it stands in a mesh."""

    id: int
    process_index: int
    platform: str = "gpu"
    slice_index: int | None = None
    device_kind: str = "fake"


def hosts(n: int, each: int, slices: bool = False, platform: str = "gpu") -> list[FakeDevice]:
    """Devices of `n` hosts, in an order that mixes them up."""
    ids = range(n * each)
    devices = [FakeDevice(i, i // each, platform, i // each if slices else None) for i in ids]
    return sorted(devices, key=lambda d: (d.id % each, d.id))


@pytest.mark.parametrize(
    ("sizes", "granules", "inner", "outer"),
    [
        ((2, 4, 1, 1), [4, 4], (1, 4, 1, 1), (2, 1, 1, 1)),
        ((1, 8, 1, 1), [4, 4], (1, 4, 1, 1), (1, 2, 1, 1)),
        ((1, 1, 8, 1), [4, 4], (1, 1, 4, 1), (1, 1, 2, 1)),
        ((2, 2, 1, 8), [8, 8, 8, 8], (1, 1, 1, 8), (2, 2, 1, 1)),
        ((6, 4, 1, 1), [6] * 4, (3, 2, 1, 1), (2, 2, 1, 1)),
        ((3, 2, 2, 1), [2] * 6, (1, 1, 2, 1), (3, 2, 1, 1)),
    ],
)
def test_hosts_are_spread_over_the_outer_axes_first(sizes, granules, inner, outer):
    sizes = dict(zip(sharding.MESH_AXES, sizes, strict=True))
    assert sharding.hybrid_shape(sizes, granules) == (inner, outer)


def test_meshes_that_do_not_fit_the_hosts_are_refused_in_one_line():
    sizes = dict(zip(sharding.MESH_AXES, (1, 1, 1, 8), strict=True))
    with pytest.raises(ConfigError, match=r"would split tensor over 2 hosts .* a multiple of 2$"):
        sharding.hybrid_shape(sizes, [4, 4])
    with pytest.raises(ConfigError, match=r"hosts .or slices. of 3, 5 devices: all must have as many"):
        sharding.hybrid_shape(sizes | {"data": 2, "tensor": 4}, [3, 5])


@pytest.mark.parametrize("slices", [False, True])
def test_the_inner_axes_of_a_mesh_stay_within_a_host(slices):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, context=2), hosts(4, 4, slices))
    of = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert mesh.axis_names == sharding.MESH_AXES
    np.testing.assert_array_equal(of, np.arange(4).reshape(2, 2, 1, 1) * np.ones((1, 1, 2, 2)))


def test_one_slice_of_several_hosts_is_one_network():
    assert sharding.granule_key(hosts(2, 4)) == "process_index"
    assert sharding.granule_key(hosts(2, 4, platform="cpu")) == "process_index"
    assert sharding.granule_key(hosts(2, 4, slices=True)) == "slice_index"
    assert sharding.granule_key(hosts(2, 4, platform="tpu")) is None
    assert sharding.granule_key(hosts(1, 8)) is None
    one_host_of_many_processes = [FakeDevice(i, i, "gpu", 0) for i in range(8)]
    assert sharding.granule_key(one_host_of_many_processes) is None
