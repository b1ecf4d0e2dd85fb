"""Reading back: what the host computes is what the device computed, a chunk at a time; checksums tell files apart."""

import dataclasses
import json
import random
import shutil
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.run.checkpoints import digest, store, verify
from jaxlm.run.checkpoints.saving import Saving
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states

KEYS = ["data.path=x", "checkpoint.reserve_mb=0", "checkpoint.keep_best=0"]
KEEP = config.resolve(config_files.load("base", KEYS)).checkpoint
META = {"config": {"a": 1, "b": [1, 2.5, "x"]}, "fingerprint": {"sha256": "ab" * 32}}


def make(step):
    kernel = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    params = {"a": jnp.asarray(kernel), "b": {"c": jnp.asarray(kernel, jnp.bfloat16)}}
    return dataclasses.replace(states.init({"params": params}, optax.adam(1e-3)), step=jnp.int32(step))


def shapes():
    like = make(0)
    return like, jax.tree.map(lambda x: x.sharding, like)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpointer = Checkpointer(folder, KEEP)
    for step in (1, 2):
        checkpointer.save(make(step), META)
    checkpointer.close()
    return folder


@pytest.fixture
def saved(whole, tmp_path):
    """The checkpoints of a run at steps 1 and 2."""
    return shutil.copytree(whole, tmp_path / "checkpoints")


def test_the_digest_does_not_depend_on_the_mesh_and_sees_every_bit():
    x = jax.random.normal(jax.random.key(0), (64, 32))
    mesh = sharding.make_mesh(config.MeshConfig(1, 4, 2, 1))
    whole = int(digest.digest(x))
    assert int(digest.digest(jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", "tensor"))))) == whole
    swapped = x.at[0, 0].set(x[1, 1]).at[1, 1].set(x[0, 0])
    assert int(digest.digest(swapped)) != whole
    for bit in range(32):
        flipped = np.asarray(x).copy()
        flipped.view(np.uint32)[5, 7] ^= np.uint32(1 << bit)
        assert int(digest.digest(flipped)) != whole


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (3, 4, 5)), ("bfloat16", (5, 6)), ("int32", ()), ("int8", (7,)), ("float8_e4m3fn", (0, 3))],
)
def test_the_host_computes_the_device_s_digest(dtype, shape):
    bits = np.random.default_rng(0).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    x = bits.view(jnp.dtype(dtype))[..., 0]
    assert digest.of_array(x) == int(digest.digest(jnp.asarray(x)))


def test_large_ones_are_split_and_threads_hash_the_same():
    x = np.random.default_rng(0).normal(size=(3, 1030, 1100)).astype(np.float32)
    whole = int(digest.digest(jnp.asarray(x)))
    assert digest.of_array(x) == whole
    with futures.ThreadPoolExecutor(3) as pool:
        assert digest.of_array(x, pool) == whole
        assert digest.of_array(x[::-1], pool) == digest.of_array(x[::-1]) != whole


@pytest.mark.parametrize("ahead", [0, 300])
def test_any_chunk_of_any_array_counts_however_many_are_read_at_a_time(tmp_path, monkeypatch, ahead):
    """Eight devices write eight chunks of 128 bytes."""
    monkeypatch.setattr(verify, "_AHEAD", ahead)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(jnp.arange(256.0).reshape(16, 16), jax.NamedSharding(mesh, jax.P("x")))
    items = {"params": {"a": spread, "b": {"c": spread + 1}, "d": jnp.zeros(())}}
    digests = digest.table(items)
    saving = Saving(tmp_path / "7", items, {"digests": digests})
    assert saving.done.wait(60)
    assert saving.verified
    assert verify.read_back(tmp_path / "7", digests) == ""
    for name in digests:
        assert verify.read_back(tmp_path / "7", digests | {name: digests[name] ^ 1}) == f"{name} is not what was saved"
    assert verify.read_back(tmp_path / "7", {"params/none": 1} | digests) == "params/none can't be read"
    assert verify.read_back(tmp_path / "7", digests | {"params/none": 1}) == "params/none can't be read"
    asked = iter([True, False])
    assert verify.read_back(tmp_path / "7", digests | {"params/d": 1}, lambda: next(asked)) == ""


def test_checksums_name_the_files(saved):
    folder = saved / "2"
    assert verify.differing(folder) == []
    (folder / "params/_METADATA").write_bytes(b"")
    (folder / "train/_sharding").unlink()
    assert verify.differing(folder) == ["params/_METADATA", "train/_sharding"]
    assert verify.differing(folder, {"params"}) == ["params/_METADATA"]
    shares = [verify.differing(folder, None, (i, 3)) for i in range(3)]
    assert {name for share in shares for name in share} == {"params/_METADATA", "train/_sharding"}


def test_damaged_checksums_say_nothing(saved):
    path = saved / "2" / verify.CHECKSUMS
    path.write_text(path.read_text().replace("_METADATA", "_MFTADATA", 1))
    assert verify.differing(saved / "2") is None


def flips(folder, count, seed=0):
    """Yields (file, its bytes, its bytes with one bit flipped), the files in turn."""
    rng = random.Random(seed)
    files = [folder / name for name in [*verify.files(folder), verify.CHECKSUMS]]
    files = [path for path in files if path.stat().st_size]
    for i in range(count):
        path = files[i % len(files)]
        content = path.read_bytes()
        flipped, at = bytearray(content), rng.randrange(8 * len(content))
        flipped[at // 8] ^= 1 << at % 8
        yield path, content, bytes(flipped)


def restore_all(saved, count):
    """How many flips were harmless, and how many went back to step 1; anything else fails."""
    known = {step: (make(step), store.read_meta(saved / str(step))) for step in (1, 2)}
    found = {1: 0, 2: 0}
    for path, content, flipped in flips(saved / "2", count):
        path.write_bytes(flipped)
        state, meta = Checkpointer(saved, KEEP).restore_latest(*shapes())
        step = int(state.step)
        jax.tree.map(np.testing.assert_array_equal, state, known[step][0])
        assert meta == known[step][1]
        moved = saved.parent / "damaged/2.0"
        assert moved.is_dir() == (step == 1)
        if step == 1:
            moved.rename(saved / "2")
        path.write_bytes(content)
        found[step] += 1
    return found


def test_no_flipped_bit_is_believed_and_none_ends_the_run(saved):
    found = restore_all(saved, 24)
    assert min(found.values()) > 3


@pytest.mark.faults
def test_500_flipped_bits(saved):
    assert sum(restore_all(saved, 500).values()) == 500


@pytest.mark.parametrize(
    ("name", "checksums"), [("params/manifest.ocdbt", True), ("train/_METADATA", False), ("meta/metadata", False)]
)
def test_an_empty_file_goes_back_and_is_named(saved, capsys, name, checksums):
    (saved / "2" / name).write_bytes(b"")
    if not checksums:
        (saved / "2" / verify.CHECKSUMS).unlink()
    state, _ = Checkpointer(saved, KEEP).restore_latest(*shapes())
    assert int(state.step) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("checkpoint 2 is damaged")]
    assert len(said) == 1
    if checksums:
        assert name in said[0]


@pytest.mark.parametrize("key", ["digests", "step", None])
def test_a_meta_without_a_key_goes_back(saved, key):
    """Also one of an older version: it has neither a seal nor checksums."""
    path = saved / "2/meta/metadata"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps({name: value for name, value in content.items() if name != key} if key else [1]))
    (saved / "2" / verify.CHECKSUMS).unlink()
    state, _ = Checkpointer(saved, KEEP).restore_latest(*shapes())
    assert int(state.step) == 1


def test_an_older_checkpoint_without_seal_and_checksums_is_whole(saved):
    path = saved / "2/meta/metadata"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    (saved / "2" / verify.CHECKSUMS).unlink()
    checkpointer = Checkpointer(saved, KEEP)
    state, meta = checkpointer.restore_latest(*shapes())
    assert int(state.step) == meta["step"] == 2
    checkpointer.close()
    assert checkpointer.verified(2)  # beside the run, whose end waits for it
    assert not checkpointer.left_behind
