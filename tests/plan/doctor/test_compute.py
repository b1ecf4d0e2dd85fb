"""Equal forward passes, and the speed of the step against what is known of the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_keys import keys

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.plan.doctor import machine
from jaxlm.plan.doctor.findings import OK, WARN
from jaxlm.plan.tune import machines

TINY = keys("""
    n_layers=1 d_model=32 n_heads=2 d_ff=64 vocab_size=128 attention=xla dtype=float32
""")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def resolve(*overrides: str) -> config.Config:
    tiny = [f"model.{key}={value}" for key, value in TINY.items()]
    return config.resolve(
        config_files.load("base", ["data.path=x", "train.batch_size=8", "train.seq_len=16", *tiny, *overrides])
    )


def mesh(c: config.Config):
    return sharding.make_mesh(c.mesh, jax.devices()[:2])


def test_equal_forward_passes():
    c = resolve()
    found = machine.Machine(c, c, mesh(c)).forward()
    assert found.verdict == OK
    assert found.text == "the whole model, 2 x 16 tokens: equal to the last bit, three times"


def test_one_bit_or_one_nan_is_seen():
    one = np.linspace(-1, 1, 999, dtype=np.float32)
    flipped = one.copy()
    flipped.view(np.uint32)[500] ^= 1
    assert [int(n) for n in machine.differences(jnp.array(one), jnp.array(one))] == [0, 0]
    assert [int(n) for n in machine.differences(jnp.array(one), jnp.array(flipped))] == [1, 0]
    assert [int(n) for n in machine.differences(jnp.array([jnp.nan, 0.0]), jnp.array([jnp.nan, -0.0]))] == [1, 1]
    assert int(machine.differences(jnp.ones(3, jnp.bfloat16), jnp.zeros(3, jnp.bfloat16))[0]) == 3


def test_a_large_model_is_shrunk_on_a_cpu():
    c = config.resolve(config_files.load("gpuburnout_1b"))
    small, what = machine.shrunk(c, mesh(c), 10**12)
    assert (small.model.n_layers, small.model.d_model, small.model.vocab_size) == (2, 2048, 4096)
    assert (small.train.batch_size, small.train.seq_len) == (2, 256)
    assert what == "2 of its 16 layers, vocabulary 4,096, 2 x 256 tokens"


def test_the_speed_is_measured_and_remembered():
    c = resolve()
    one = sharding.make_mesh(c.mesh, jax.devices()[:1])
    found = machine.Machine(c, c, one, c).speed()
    assert found.verdict == OK
    assert "no earlier measurement of such a run on this device" in found.text
    known = machines.known(jax.devices()[0].device_kind, 1, machines.key(c, one.shape))
    assert (known["tokens_per_second"], known["by"]) == (found.figures["tokens_per_second"], "doctor")


@pytest.mark.parametrize(("now", "verdict"), [(1000.0, OK), (900.0, OK), (800.0, WARN)])
def test_the_speed_is_compared(now, verdict):
    before = {"tokens_per_second": 1000.0, "measurements": 4, "by": "train", "time": 1_795_000_000.0}
    found = machine.compared({"tokens_per_second": now, "product_flops": 7e14}, before, peak_tflops=989)
    assert found.verdict == verdict
    assert "a matrix product makes 700 of 989 TFLOP/s; before: 1k (4 times, last by train on 2026-11-" in found.text
