"""Where the state lives: any optimizer's leaves are split as their parameter is, and can wait in the host's memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding, tree
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import optim, state

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "muon")


def setup(name, *overrides):
    keys = ["data.path=x", f"optim.name={name}", "model.n_kv_heads=4", "model.vocab_size=2048", *overrides]
    c = config.resolve(config_files.load("base", keys))
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, dtype="float32"))
    model = models.build(c.model, "xla")
    tx = optim.make(c.optim, models.abstract_params(model))
    abstract = jax.eval_shape(lambda params: state.init(params, tx), {"params": models.abstract_params(model)})
    return c, model, tx, abstract


def shardings(abstract, model, mesh, offload=False):
    return state.shardings(abstract, {"params": models.logical_axes(model)}, mesh, offload)


def nbytes(leaf) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (1, 4, 2, 1)])
def test_nothing_large_is_whole_on_a_device(name, sizes):
    _, model, _, abstract = setup(name)
    mesh = sharding.make_mesh(config.MeshConfig(*sizes))
    where = shardings(abstract, model, mesh)
    leaves = list(zip(tree.named_leaves(abstract.opt_state), jax.tree.leaves(where.opt_state), strict=True))
    large = sum(nbytes(leaf) for (_, leaf), _ in leaves) / 100
    if name == "adafactor":  # its state is a hundredth of the parameters: what counts is what it takes of them
        large = sum(nbytes(p) for p in jax.tree.leaves(abstract.params)) / 1000
    assert not [n for (n, leaf), s in leaves if nbytes(leaf) > large and s.is_fully_replicated]
    for (n, _), s in leaves:
        if "codes" in n or "exponents" in n or "/mu/" in n:
            kernel = n.removesuffix("/codes").removesuffix("/exponents").split("/mu/")[-1].split("/nu/")[-1]
            parameter = dict(tree.named_leaves(where.params["params"]))
            assert s.spec == parameter[kernel].spec, n


def test_axes_of_a_leaf():
    owners = {"l/q/kernel": ((512, 8, 64), ("embed", "heads", "head_dim")), "q/kernel": ((8, 8), ("mlp", "embed"))}

    def axes(name, *shape):
        return state.optimizer_axes(name, shape, owners)

    assert axes("0/nu/l/q/kernel/exponents", 512, 8, 1) == ("embed", "heads", "head_dim")
    assert axes("0/v_row/l/q/kernel", 8, 64) == ("heads", "head_dim")
    assert axes("0/v_col/l/q/kernel", 512, 8) == ("embed", "heads")
    assert axes("0/v/l/q/kernel", 1) == (None,)
    assert axes("0/mu/q/kernel", 8, 8) == ("mlp", "embed")
    assert axes("0/ns_coeffs", 3) == (None,)
    assert axes("0/count") == ()


# Bytes of moments a parameter, over the parameters that are no embedding, head or norm (with them, for adamw8bit).
@pytest.mark.parametrize(("name", "most"), [("adamw", 8.0), ("adamw8bit", 2.04), ("adafactor", 0.2), ("muon", 4.0)])
def test_bytes_a_parameter(name, most):
    _, _, _, abstract = setup(name)

    def in_layers(named):
        return [leaf for n, leaf in named if "layers_" in n and n.count("norm") == 0]

    moments = sum(nbytes(leaf) for leaf in in_layers(tree.named_leaves(abstract.opt_state)))
    params = sum(int(np.prod(leaf.shape)) for leaf in in_layers(tree.named_leaves(abstract.params)))
    assert 0.8 * most < moments / params <= most or (name == "adafactor" and moments / params < most)


SMALL = ("model.n_layers=1", "model.d_model=64", "model.n_heads=1", "model.n_kv_heads=1", "model.d_ff=128")


@pytest.mark.parametrize(("name", "offload"), [("muon", False), ("adamw8bit", True)])
def test_a_checkpoint_restores_bit_for_bit(name, offload, tmp_path):
    c, model, _, abstract = setup(name, *SMALL, "model.vocab_size=128")
    mesh = sharding.make_mesh(config.MeshConfig(1, 4, 2, 1))
    where = shardings(abstract, model, mesh, offload)
    assert offload == any(s.memory_kind == "pinned_host" for s in jax.tree.leaves(where.opt_state))
    rng = np.random.default_rng(0)
    first = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * 50).astype(x.dtype) if x.shape else jnp.zeros((), x.dtype),
        abstract,
    )
    where = dataclasses.replace(where, average=state.average_shardings(where))
    assert offload == any(s.memory_kind == "pinned_host" for s in jax.tree.leaves(where.average))
    first = jax.device_put(dataclasses.replace(first, average=first.params), where)
    saver = Checkpointer(tmp_path, dataclasses.replace(c.checkpoint, keep_best=0))
    saver.save(first, {})
    saver.wait()
    back = saver.restore(0, abstract, dataclasses.replace(where, average={}))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(first))
    assert jax.tree.map(lambda x: x.sharding, back) == where
    saver.close()
