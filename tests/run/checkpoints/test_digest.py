"""Digests: any bit counts, the mesh does not."""

import jax
import numpy as np

from jaxlm import config
from jaxlm.devices import sharding
from jaxlm.run.checkpoints import digest


def test_digests_do_not_depend_on_the_mesh_and_see_every_bit():
    x = jax.random.normal(jax.random.key(0), (64, 32))
    mesh = sharding.make_mesh(config.MeshConfig(1, 4, 2, 1))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
    a = digest.digest(x)
    assert int(a) == int(digest.digest(spread))
    swapped = x.at[0, 0].set(x[1, 1]).at[1, 1].set(x[0, 0])
    assert int(digest.digest(swapped)) != int(a)
    bits = np.asarray(x).view(np.uint32).copy()
    for bit in range(32):
        flipped = bits.copy()
        flipped[5, 7] ^= np.uint32(1 << bit)
        assert int(digest.digest(flipped)) != int(digest.digest(bits))
