"""Kernels in codes: the values of bitsandbytes' blocks, a bounded error, four and a half bits a weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import block_codes
from jaxlm.ops.block_codes import BLOCK, NF4, Coded

encode = jax.jit(block_codes.quantize, static_argnums=(1, 2))
decode = jax.jit(block_codes.decode, static_argnums=(1, 2))


def kernel(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal weights, whose size differs from column to column."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.normal(0, 0.02, shape) * rng.uniform(0.2, 5, shape[-1]), np.float32)


def reference(kernel_IxO: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, largest magnitudes, decoded) by bitsandbytes' algorithm: blocks of a flat matrix (out, in).

    Each weight over the largest magnitude of its block goes past the thresholds half-way between neighbouring values.
    """
    values = np.array(NF4, np.float32)
    thresholds = (values[1:] + values[:-1]) / 2
    flat = kernel_IxO.T.reshape(-1, block)
    largest = np.abs(flat).max(axis=1)
    codes = np.searchsorted(thresholds, flat / largest[:, None], side="left")
    decoded = values[codes] * largest[:, None]
    outputs, inputs = kernel_IxO.T.shape
    return codes.reshape(outputs, inputs).T, largest.reshape(outputs, -1).T, decoded.reshape(outputs, inputs).T


def unpacked(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], axis=1).reshape(-1, *codes.shape[1:])


def test_nf4_equals_the_reference_in_blocks_of_64():
    x = kernel(256, 96)
    coded = encode(x, "nf4", 1)
    codes, largest, decoded = reference(x)
    np.testing.assert_array_equal(unpacked(np.asarray(coded.codes)), codes)
    np.testing.assert_array_equal(coded.scales, largest)
    np.testing.assert_array_equal(decode(coded, x.shape, jnp.float32), decoded)
    assert not np.array_equal(reference(x, block=32)[2], decoded)


@pytest.mark.parametrize(
    ("shape", "inputs", "codes", "scales"),
    [
        (
            (4, 32, 48),
            2,
            (64, 48),
            (2, 48),
        ),  # o: heads, head size, outputs. Blocks go on from one input axis to the next.
        ((128, 4, 32), 1, (64, 4, 32), (2, 4, 32)),  # q: inputs, heads, head size. Each head has blocks of its own.
    ],
)
def test_kernels_of_attention(shape, inputs, codes, scales):
    x = kernel(*shape)
    coded = encode(x, "nf4", inputs)
    assert (coded.codes.shape, coded.scales.shape) == (codes, scales)
    want = reference(x.reshape(128, -1))[2].reshape(x.shape)
    np.testing.assert_array_equal(decode(coded, x.shape, jnp.float32), want)


@pytest.mark.parametrize(("kind", "typical", "bits"), [("nf4", 0.1, 4.5), ("int8", 0.01, 8.5)])
def test_the_error_is_bounded_and_the_bits_are_few(kind, typical, bits):
    x = kernel(512, 64)
    coded = encode(x, kind, 1)
    back = np.asarray(decode(coded, x.shape, jnp.float32))
    largest = np.abs(x.reshape(-1, BLOCK, 64)).max(axis=1)
    widest = max(np.diff(NF4)) / 2 if kind == "nf4" else 1 / 127
    error = np.abs(back - x).reshape(-1, BLOCK, 64).max(axis=1) / largest
    assert error.max() <= widest * 1.001
    relative = np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2))
    assert typical / 2 < relative < typical
    assert 8 * sum(array.nbytes for array in coded) / x.size == bits
    compiled = decode.lower(coded, x.shape, jnp.bfloat16).compile().memory_analysis()
    assert 8 * compiled.argument_size_in_bytes / x.size == pytest.approx(bits, abs=0.01)


def test_nf4_of_what_nf4_gave_changes_nothing():
    once = encode(kernel(128, 32), "nf4", 1)
    again = encode(decode(once, (128, 32), jnp.float32), "nf4", 1)
    jax.tree.map(np.testing.assert_array_equal, again, once)


def test_a_block_of_zeros_stays_zero():
    x = kernel(128, 32)
    x[:64, 3] = 0
    for kind in ("nf4", "int8"):
        back = decode(encode(x, kind, 1), x.shape, jnp.float32)
        np.testing.assert_array_equal(back[:64, 3], 0)
        assert np.all(np.isfinite(back))


def test_sizes_of_blocks():
    assert [block_codes.block_size(n) for n in (2048, 1408, 48, 80, 101, 16)] == [64, 64, 48, 40, 0, 0]


def test_codes_are_what_the_library_decodes():
    qwix = pytest.importorskip("qwix")
    x = kernel(128, 32)
    coded = encode(x, "nf4", 1)
    theirs = qwix.QArray(jnp.asarray(unpacked(np.asarray(coded.codes)), jnp.uint4), coded.scales, None, "nf4")
    np.testing.assert_array_equal(qwix.dequantize(theirs), decode(coded, x.shape, jnp.float32))
    shifted = Coded(coded.codes ^ 1, coded.scales)
    assert not np.array_equal(decode(shifted, x.shape, jnp.float32), decode(coded, x.shape, jnp.float32))
