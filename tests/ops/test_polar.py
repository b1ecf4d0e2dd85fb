"""The Polar Express: the polynomials of the singular values, in batches, in parts of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.sharding import NamedSharding, PartitionSpec
from tiny_steps import make_mesh

from jaxlm.ops import polar
from jaxlm.plan import lower


def draw(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def expected(x_NxPxQ, iterations=5) -> np.ndarray:
    """By the singular values themselves, in float64."""
    u, s, v = np.linalg.svd(np.asarray(x_NxPxQ, np.float64), full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True) / 1.02
    for a, b, c in polar.COEFFICIENTS[iterations]:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v


def singular_values(x) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


@pytest.mark.parametrize(
    ("shape", "iterations"), [((3, 24, 24), 5), ((2, 24, 30), 3), ((2, 24, 66), 5), ((2, 66, 24), 3), ((2, 30, 24), 5)]
)
def test_it_is_the_composed_polynomial_of_the_singular_values(shape, iterations):
    """Square, wide (by Gram matrices) and tall; the same of a matrix times anything."""
    x, (least, off) = draw(*shape), {3: (1e-2, 0.29), 5: (1e-3, 0.16)}[iterations]
    run = tiny.jit(functools.partial(polar.orthogonalise, iterations=iterations))
    found = run(x)
    np.testing.assert_allclose(found, expected(x, iterations), atol=2e-5)
    np.testing.assert_allclose(run(x * 1e-6), found, atol=1e-2)
    before = singular_values(x)
    shares = before / np.linalg.norm(before, axis=1, keepdims=True)
    assert np.abs(singular_values(found) - 1)[shares > least].max() < off
    for other in (expected(draw(*shape, seed=1), iterations), expected(x, 8 - iterations)):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(found, other, atol=0.1)


@pytest.mark.parametrize(("shape", "iterations", "off"), [((2, 24, 24), 3, 0.35), ((2, 24, 66), 5, 0.25)])
def test_in_bfloat16_singular_values_stay_near_one(shape, iterations, off):
    x = draw(*shape, dtype=jnp.bfloat16)
    found = tiny.jit(functools.partial(polar.orthogonalise, iterations=iterations))(x)
    assert found.dtype == jnp.bfloat16
    before, after = (singular_values(a.astype(jnp.float32)) for a in (x, found))
    shares = before / np.linalg.norm(before, axis=1, keepdims=True)
    assert np.abs(after - 1)[shares > 1e-2].max() < off
    assert after.max() < 1 + off


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_singular_values_and_zeros_give_numbers(dtype):
    """Values from 1 to 1e-6, rank one, nothing at all: none above 1.2, where products of noise would grow."""
    u, s, v = np.linalg.svd(np.asarray(draw(4, 32, 64)), full_matrices=False)
    scales = [np.geomspace(1, 1e-6, 32), np.eye(32)[0], np.zeros(32), s[0]]
    x = jnp.asarray((u * np.array(scales)[:, None, :]) @ v, dtype)
    found = singular_values(tiny.jit(polar.orthogonalise)(x).astype(jnp.float32))
    assert np.isfinite(found).all()
    assert found.max() < 1.2
    assert found[2].max() == 0


SHAPES = [((16, 4, 4), 1), ((4, 4, 16), 2), ((16, 2, 4), 1), ((16, 40), 1), ((16, 40), 1), ((40, 16), 1)]
SPECS = [("fsdp", "tensor"), ("tensor", None, "fsdp"), ("fsdp",), *2 * [("fsdp", "tensor")], ("tensor", "fsdp")]


def arrays():
    return [draw(*shape, seed=seed) for seed, (shape, _) in enumerate(SHAPES)]


def specs(axes):
    return [PartitionSpec(*(a if a in axes else None for a in spec)) for spec in SPECS]


def run(xs):
    return tiny.jit(lambda xs: polar.each(xs, [n for _, n in SHAPES], specs(())))(xs)


def by_hand():
    matrices = [
        (x, np.asarray(x).reshape(np.prod(x.shape[:n]), -1)) for x, (_, n) in zip(arrays(), SHAPES, strict=True)
    ]
    return [expected(matrix[None])[0].reshape(x.shape) for x, matrix in matrices]


def assert_all_close(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(f, w, atol=2e-5)


def test_arrays_of_all_shapes_each_as_a_matrix(monkeypatch):
    """Also in batches of one: the limit is a memory's, not the result's."""
    assert_all_close(run(arrays()), by_hand())
    monkeypatch.setattr(polar, "BATCH_BYTES", 1)
    assert_all_close(run(arrays()), by_hand())
    with pytest.raises(ValueError, match="splits more than the first axis"):
        polar.each([draw(4, 4, 4)], [1], [PartitionSpec(None, None, "tensor")])


def dots(limit: int, monkeypatch) -> list[int]:
    """How many matrices each batched product of the program has."""
    monkeypatch.setattr(polar, "BATCH_BYTES", limit)
    text = jax.jit(lambda xs: polar.each(xs, [1] * 6, [PartitionSpec()] * 6)).lower([draw(8, 8)] * 6).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    return [int(line.rpartition("-> tensor<")[2].split("x")[0]) for line in lines]


def test_matrices_of_one_shape_go_through_together_up_to_the_limit(monkeypatch):
    assert dots(6 * 8 * 8 * 4, monkeypatch) == [6] * 15
    assert dots(4 * 8 * 8 * 4, monkeypatch) == [4] * 15 + [2] * 15


@functools.cache
def compiled(**sizes):
    mesh = make_mesh(**sizes)
    axes = [axis for axis in sizes if axis in ("fsdp", "tensor")]
    inputs, split = [n for _, n in SHAPES], [NamedSharding(mesh, spec) for spec in specs(axes)]
    fn = jax.jit(lambda xs: polar.each(xs, inputs, specs(axes)), in_shardings=(split,), out_shardings=split)
    with jax.set_mesh(mesh):
        return fn.lower(jax.eval_shape(arrays)).compile(compiler_options=tiny.FAST_COMPILE), split


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "context": 2}])
def test_each_device_takes_its_share_and_the_result_is_the_same(sizes):
    program, split = compiled(**sizes)
    assert_all_close(program(jax.device_put(arrays(), split)), by_hand())


def traded(sizes) -> dict[str, int]:
    """Kind of collective -> bytes on a device."""
    sent: dict[str, int] = {}
    for one in lower.collectives(compiled(**sizes)[0].as_text()):
        sent[one.kind] = sent.get(one.kind, 0) + one.bytes
    return sent


def test_devices_trade_parts_for_whole_matrices_and_back_and_send_nothing_else():
    """Groups of 2 (16 x 16), 1 (8 x 16) and 3 (16 x 40) matrices, each filled up to the number of devices."""
    numbers = 8 * (16 * 16 + 8 * 16 + 16 * 40)
    # There and back, what one device holds of it each time.
    assert traded({"fsdp": 8}) == {"all-to-all": 4 * 2 * numbers // 8}
    # Copies take a share of the whole ones, and gather the results.
    assert traded({"data": 4, "context": 2}) == {"all-gather": 4 * numbers}
