"""Checkpoints: exact, rotated, mesh-independent, and never believed when they are damaged."""

import contextlib
import dataclasses
import errno
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models as tiny

from jaxlm import config, models, sharding
from jaxlm.config import CheckpointConfig, ConfigError, RunError
from jaxlm.train import checkpoint, state

KEEP = CheckpointConfig(every_steps=1, keep_last=2, keep_every=0, keep_best=0)
MODEL = models.build(tiny.model_config(), "xla")
TX = optax.adam(1e-3)


def make_state(step: int = 0, seed: int = 0) -> state.TrainState:
    params = tiny.random_params(MODEL, seed)
    made = state.init(params, TX)
    _, opt_state = TX.update(params, made.opt_state)
    return dataclasses.replace(made, step=jnp.int32(step), opt_state=opt_state)


def shardings(mesh_sizes=(1, 1, 1), n=1):
    mesh = sharding.make_mesh(config.MeshConfig(*mesh_sizes, 1), jax.devices()[:n])
    abstract = state.abstract(MODEL, TX)
    return abstract, state.shardings(abstract, MODEL, mesh)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture
def saved(tmp_path):
    """A run with checkpoints at steps 1 and 2."""
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints", KEEP)
    for step in (1, 2):
        checkpointer.save(make_state(step, seed=step), {"note": "x"}, {})
    checkpointer.close()
    return tmp_path / "checkpoints"


def test_round_trip_on_another_mesh(tmp_path):
    abstract, on_mesh = shardings((1, 4, 2), 8)
    first = jax.device_put(make_state(3), on_mesh)
    checkpointer = checkpoint.Checkpointer(tmp_path, KEEP)
    checkpointer.save(first, {"config": {"a": 1}}, {"val/loss": 2.5})
    checkpointer.wait()
    abstract, elsewhere = shardings((2, 1, 1), 2)
    restored = checkpointer.restore(3, abstract, elsewhere)
    assert_same(restored, first)
    kernel = restored.params["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.mesh.size == 2
    params = checkpointer.restore_params(3, abstract.params, elsewhere.params)
    assert_same(params, first.params)
    assert checkpointer.meta(3)["config"] == {"a": 1}
    assert checkpointer.meta(3)["metrics"] == {"val/loss": 2.5}


def test_saving_does_not_hold_on_to_memory_that_the_next_step_takes(tmp_path):
    """The save is asynchronous and the state's memory donated right after it."""
    checkpointer = checkpoint.Checkpointer(tmp_path, KEEP)
    now = make_state(1)
    expected = jax.device_get(now)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    checkpointer.save(now, {}, {})
    overwrite(now)
    checkpointer.wait()
    assert_same(checkpointer.restore(1, *shardings()), expected)


def test_rotation_keeps_last_every_and_best(tmp_path):
    keep = CheckpointConfig(every_steps=1, keep_last=2, keep_every=4, keep_best=1)
    checkpointer = checkpoint.Checkpointer(tmp_path, keep)
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: None, 6: 2.0, 7: 2.5, 8: 2.0, 9: None, 10: 3.0}
    for step, loss in losses.items():
        checkpointer.save(make_state(step), {}, {} if loss is None else {"val/loss": loss})
        checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 8, 9, 10]
    assert checkpointer.best_step() == 2
    assert (checkpointer.find("best"), checkpointer.find("latest"), checkpointer.find("8")) == (2, 10, 8)
    with pytest.raises(ConfigError, match=r"no checkpoint '7'; there are 2, 4, 8, 9, 10"):
        checkpointer.find("7")
    checkpointer.close()


def test_a_step_already_saved_is_left_alone(saved):
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    assert not checkpointer.save(make_state(2, seed=9), {}, {})
    assert_same(checkpointer.restore(2, *shardings()), make_state(2, seed=2))


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("item", ["params", "train"])
@pytest.mark.parametrize("where", [0.3, 0.6, 0.9])
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(saved, item, where):
    file = largest_file(saved / "2" / item)
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 4
    file.write_bytes(data)
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    restored, _ = checkpointer.restore_latest(*shardings())
    assert_same(restored, make_state(1, seed=1))
    assert (saved.parent / "damaged" / "2.0").is_dir()
    assert checkpointer.steps() == [1]
    checkpointer.save(make_state(2, seed=5), {}, {})
    checkpointer.wait()
    assert_same(checkpointer.restore(2, *shardings()), make_state(2, seed=5))


def test_a_truncated_file_is_found(saved):
    file = largest_file(saved / "2" / "params")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    restored, meta = checkpoint.Checkpointer(saved, KEEP).restore_latest(*shardings())
    assert_same(restored, make_state(1, seed=1))
    assert meta["step"] == 1


def test_without_digests_a_flipped_bit_would_pass(saved, monkeypatch):
    """The mutation: had we believed Orbax alone, a damaged array would have been restored."""
    file = largest_file(saved / "2" / "params")
    data = bytearray(file.read_bytes())
    clean = checkpoint.Checkpointer(saved, KEEP).restore(2, *shardings())
    monkeypatch.setattr(checkpoint, "_digest_table", lambda items: {})
    passed = 0
    for at in range(len(data) // 4, len(data) - 8, len(data) // 6):
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        try:
            restored = checkpoint.Checkpointer(saved, KEEP).restore(2, *shardings())
        except RunError:
            continue
        differs = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), restored.params, clean.params)
        passed += any(jax.tree.leaves(differs))
    assert passed


def test_nothing_left_to_restore_is_said(saved):
    for step in (1, 2):
        largest_file(saved / str(step) / "params").write_bytes(b"")
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    with pytest.raises(RunError, match="none of the checkpoints"):
        checkpointer.restore_latest(*shardings())
    assert checkpointer.steps() == [1, 2]  # nothing moved: the next start must not begin anew


def test_damaged_meta_is_found(saved):
    for file in (saved / "2" / "meta").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    restored, _ = checkpointer.restore_latest(*shardings())
    assert_same(restored, make_state(1, seed=1))


@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), OSError(5, "Input/output error")])
def test_what_is_not_damage_moves_nothing(saved, monkeypatch, error):
    """A busy GPU or a network hiccup must not cost a checkpoint."""
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    restore = checkpointer._manager.restore

    def fail(step, args):
        if "params" in dict(args.items()):
            raise error
        return restore(step, args=args)

    monkeypatch.setattr(checkpointer._manager, "restore", fail)
    with pytest.raises(RunError, match=r"can't be restored: .*nothing was changed"):
        checkpointer.restore_latest(*shardings())
    assert checkpointer.steps() == [1, 2]
    assert not (saved.parent / "damaged").exists()


def test_another_shape_is_not_damage(saved):
    model = models.build(dataclasses.replace(tiny.model_config(), d_ff=64), "xla")
    abstract = state.abstract(model, TX)
    mesh = sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    checkpointer = checkpoint.Checkpointer(saved, KEEP)
    with pytest.raises(RunError, match="can't be restored"):
        checkpointer.restore_latest(abstract, state.shardings(abstract, model, mesh))
    assert checkpointer.steps() == [1, 2]


def test_digests_do_not_depend_on_the_mesh_and_see_every_bit():
    x = jax.random.normal(jax.random.key(0), (64, 32))
    mesh = sharding.make_mesh(config.MeshConfig(1, 4, 2, 1))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
    a = checkpoint.digest(x)
    assert int(a) == int(checkpoint.digest(spread))
    swapped = x.at[0, 0].set(x[1, 1]).at[1, 1].set(x[0, 0])
    assert int(checkpoint.digest(swapped)) != int(a)
    bits = np.asarray(x).view(np.uint32).copy()
    for bit in range(32):
        flipped = bits.copy()
        flipped[5, 7] ^= np.uint32(1 << bit)
        assert int(checkpoint.digest(flipped)) != int(checkpoint.digest(bits))


def test_a_save_that_failed_is_told_at_the_next_check(tmp_path, monkeypatch):
    now = make_state(3)
    with contextlib.closing(checkpoint.Checkpointer(tmp_path / "c", KEEP)) as saver:
        saver.save(now, {}, {})
        saver.wait()
        (first,) = saver.steps()

        def full(self):
            raise OSError(errno.ENOSPC, "No space left on device")

        saver.save(dataclasses.replace(now, step=now.step + 1), {}, {})
        monkeypatch.setattr(type(saver._manager), "wait_until_finished", full)
        monkeypatch.setattr(type(saver._manager), "is_saving_in_progress", lambda self: True)
        saver.check()
        monkeypatch.setattr(type(saver._manager), "is_saving_in_progress", lambda self: False)
        with pytest.raises(
            RunError, match=rf"disk full while writing checkpoint {first + 1} .* free some room .* goes on from step"
        ):
            saver.check()

        def fail(self):
            raise ValueError("something else")

        monkeypatch.setattr(type(saver._manager), "wait_until_finished", fail)
        with pytest.raises(ValueError, match="else"):
            saver.check()
        monkeypatch.undo()


def test_a_folder_without_checkpoints_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoints in"):
        checkpoint.Checkpointer(tmp_path / "none", read_only=True)
