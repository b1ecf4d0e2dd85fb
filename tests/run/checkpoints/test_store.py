"""Checkpoints: exact, rotated, mesh-independent, and never believed when they are damaged."""

import dataclasses
import functools
import pathlib
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.devices import sharding
from jaxlm.run.checkpoints import digest, keep, store, verify
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state

CONFIG = config.resolve(config_files.load("base", ["data.path=x", "checkpoint.reserve_mb=0"])).checkpoint
KEEP = dataclasses.replace(CONFIG, every_steps=1, keep_last=2, keep_every=0, keep_best=0)
MODEL = models.build(tiny.model_config(n_layers=1), "xla")
TX = optax.adam(1e-3)


@functools.cache
def drawn(seed: int) -> state.TrainState:
    params = tiny.random_params(MODEL, seed)
    made = state.init({"params": params}, TX)
    return dataclasses.replace(made, opt_state=jax.jit(TX.update)(params, made.opt_state)[1])


def make_state(step: int = 0, seed: int = 0) -> state.TrainState:
    return dataclasses.replace(drawn(seed), step=jnp.int32(step))


def shardings(mesh_sizes=(1, 1, 1), n=1):
    mesh = sharding.make_mesh(config.MeshConfig(*mesh_sizes, 1), jax.devices()[:n])
    return layout(MODEL, mesh)


def layout(model, mesh):
    abstract = jax.eval_shape(lambda params: state.init(params, TX), {"params": models.abstract_params(model)})
    return abstract, state.shardings(abstract, {"params": models.logical_axes(model)}, mesh)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpointer = Checkpointer(folder, KEEP)
    for step in (1, 2):
        checkpointer.save(make_state(step, seed=step), {"note": "x"})
    checkpointer.close()
    return folder


@pytest.fixture
def saved(whole, tmp_path):
    """A run with checkpoints at steps 1 and 2."""
    return shutil.copytree(whole, tmp_path / "checkpoints")


def test_round_trip_on_another_mesh(tmp_path):
    abstract, on_mesh = shardings((1, 4, 2), 8)
    first = jax.device_put(make_state(3), on_mesh)
    checkpointer = Checkpointer(tmp_path, KEEP)
    checkpointer.save(first, {"config": {"a": 1}})
    checkpointer.wait()
    abstract, elsewhere = shardings((2, 1, 1), 2)
    restored = checkpointer.restore(3, abstract, elsewhere)
    assert_same(restored, first)
    kernel = restored.params["params"]["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.mesh.size == 2
    params = checkpointer.restore_params(3, abstract.params["params"], elsewhere.params["params"])
    assert_same(params, first.params["params"])
    meta = store.read_meta(checkpointer.directory / "3")
    assert (meta["config"], meta["step"]) == ({"a": 1}, 3)


def test_saving_does_not_hold_on_to_memory_that_the_next_step_takes(tmp_path):
    """The save is asynchronous and the state's memory donated right after it."""
    checkpointer = Checkpointer(tmp_path, KEEP)
    now = jax.tree.map(jnp.copy, make_state(1))
    expected = jax.device_get(now)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    checkpointer.save(now, {})
    overwrite(now)
    checkpointer.wait()
    assert_same(checkpointer.restore(1, *shardings()), expected)


def test_rotation_keeps_last_every_best_milestones_and_what_another_run_needs(tmp_path):
    """By the losses that evaluations after each save found, as in a run."""
    config = dataclasses.replace(KEEP, keep_every=4, keep_best=1)
    losses = {}
    checkpointer = Checkpointer(tmp_path, config, scores=losses, pinned={3})
    for step, loss in {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: None, 6: 2.0, 7: 2.5}.items():
        checkpointer.save(make_state(step), {})
        if loss is not None:
            losses[step] = loss
        checkpointer.wait()
        if step == 2:
            keep.need(tmp_path, 1, tmp_path / "lora")
    assert checkpointer.steps() == [1, 2, 3, 4, 6, 7]
    assert (checkpointer.find("best"), checkpointer.find("latest"), checkpointer.find("4")) == (2, 7, 4)
    with pytest.raises(ConfigError, match=r"no checkpoint '5'; there are 1, 2, 3, 4, 6, 7"):
        checkpointer.find("5")
    checkpointer.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["1", "2", "3", "4", "6", "7"]


def test_nothing_is_deleted_before_the_new_one_is_whole(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, KEEP)
    for step in (1, 2):
        checkpointer.save(make_state(step), {})
        checkpointer.wait()
    go_on = threading.Event()
    read_back = verify.read_back
    monkeypatch.setattr(verify, "read_back", lambda *args: go_on.wait(60) and read_back(*args))
    checkpointer.save(make_state(3), {})
    while not (tmp_path / "3").is_dir():
        time.sleep(0.01)
    checkpointer.check()  # written, and not yet verified
    assert checkpointer.steps() == [1, 2]
    assert not checkpointer.verified(3)
    assert checkpointer.skips(4)
    go_on.set()
    checkpointer.close()
    assert checkpointer.verified(3)
    assert checkpointer.steps() == [2, 3]


def test_a_deletion_that_a_crash_cut_short_is_finished(saved):
    (saved / "1").rename(saved / "1.deleting")
    reader = Checkpointer(saved, read_only=True)
    assert reader.steps() == [2]
    reader.close()
    assert (saved / "1.deleting").exists()
    Checkpointer(saved, KEEP).close()
    assert not (saved / "1.deleting").exists()


def test_a_checkpoint_that_cannot_be_deleted_ends_nothing(saved, capsys):
    checkpointer = Checkpointer(saved, KEEP)
    (saved / "1.deleting" / "x").mkdir(parents=True)  # the rename meets a folder that is not empty
    checkpointer.save(make_state(3), {})
    checkpointer.close()
    assert checkpointer.steps() == [2, 3]
    assert "can't be deleted: Directory not empty" in capsys.readouterr().err
    assert (saved / "1").is_dir()


def test_a_checkpoint_without_parameters_of_its_own_says_so(tmp_path):
    checkpointer = Checkpointer(tmp_path, KEEP)
    lora = state.init({"lora": {"layers_0": {"lora_a": jnp.ones(3)}}}, TX)
    checkpointer.save(lora, {})
    checkpointer.wait()
    with pytest.raises(RunError, match="has no parameters of its own"):
        checkpointer.restore_params(0, {}, {})
    checkpointer.close()


def test_a_step_already_saved_is_left_alone(saved):
    checkpointer = Checkpointer(saved, KEEP)
    assert not checkpointer.save(make_state(2, seed=9), {})
    assert_same(checkpointer.restore(2, *shardings()), make_state(2, seed=2))


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(("item", "where"), [("params", 0.3), ("train", 0.6)])
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(saved, item, where):
    file = largest_file(saved / "2" / item)
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 4
    file.write_bytes(data)
    checkpointer = Checkpointer(saved, KEEP)
    restored, _ = checkpointer.restore_latest(*shardings())
    assert_same(restored, make_state(1, seed=1))
    assert (saved.parent / "damaged" / "2.0").is_dir()
    assert checkpointer.steps() == [1]
    checkpointer.save(make_state(2, seed=5), {})
    checkpointer.wait()
    assert_same(checkpointer.restore(2, *shardings()), make_state(2, seed=5))


def test_without_digests_a_flipped_bit_would_pass(saved, monkeypatch):
    """The mutation: had we believed Orbax alone, a damaged array would have been restored."""
    file = largest_file(saved / "2" / "params")
    data = bytearray(file.read_bytes())
    clean = Checkpointer(saved, KEEP).restore(2, *shardings())
    monkeypatch.setattr(digest, "table", lambda items: {})
    (saved / "2" / verify.CHECKSUMS).unlink()
    passed = 0
    for at in range(len(data) // 4, len(data) - 8, len(data) // 6):
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        try:
            restored = Checkpointer(saved, KEEP).restore(2, *shardings())
        except RunError:
            continue
        differs = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), restored.params, clean.params)
        passed += any(jax.tree.leaves(differs))
    assert passed


def test_a_meta_without_what_a_run_needs_is_damage(saved):
    """Such as that of an imported model, from whose weights alone no run goes on."""
    checkpointer = Checkpointer(saved, KEEP)
    with pytest.raises(ConfigError, match=r"none of the checkpoints \[1, 2\]"):
        checkpointer.restore_latest(*shardings(), needs=("fingerprint",))
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), OSError(5, "Input/output error")])
def test_what_is_not_damage_moves_nothing(saved, monkeypatch, error):
    """A busy GPU or a network hiccup must not cost a checkpoint."""
    checkpointer = Checkpointer(saved, KEEP)

    def fail(self, folder, args):
        raise error

    monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
    with pytest.raises(RunError, match=r"can't be restored: .*nothing was changed"):
        checkpointer.restore_latest(*shardings())
    assert checkpointer.steps() == [1, 2]
    assert not (saved.parent / "damaged").exists()


def test_another_shape_is_not_damage(saved):
    model = models.build(dataclasses.replace(tiny.model_config(), d_ff=64), "xla")
    mesh = sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    checkpointer = Checkpointer(saved, KEEP)
    with pytest.raises(RunError, match="can't be restored"):
        checkpointer.restore_latest(*layout(model, mesh))
    assert checkpointer.steps() == [1, 2]


def test_a_folder_without_checkpoints_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoints in"):
        Checkpointer(tmp_path / "none", read_only=True)
