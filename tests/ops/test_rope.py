"""RoPE: rotations, the Hugging Face order, and its scalings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import rope

LLAMA3 = dict(scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)


def apply_rope(x, positions, inv_freq):
    return rope.rotate(x, *rope.rope_tables(positions, inv_freq))


def _rotate_half(x, positions, inv_freq):
    """Hugging Face's code, in numpy: x * cos + rotate_half(x) * sin with the angles repeated for both halves."""
    angles = positions[:, :, None, None] * np.concatenate([inv_freq, inv_freq])
    x1, x2 = np.split(x, 2, axis=-1)
    return x * np.cos(angles) + np.concatenate([-x2, x1], axis=-1) * np.sin(angles)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 7, 3, 16))


def test_is_rotate_half(x):
    positions = np.stack([np.arange(7), np.array([0, 1, 2, 0, 1, 0, 1])])
    inv_freq = rope.rope_frequencies(16, 10000.0)
    got = apply_rope(jnp.asarray(x, jnp.float32), jnp.asarray(positions), inv_freq)
    np.testing.assert_allclose(got, _rotate_half(x, positions, inv_freq), atol=2e-6)


def test_scores_depend_on_distance_only(x):
    q, k = (jnp.asarray(a, jnp.float32) for a in (x[:, :1], x[:, 1:2]))
    inv_freq = rope.rope_frequencies(16, 500000.0)

    def score(i, j):
        at = lambda p: jnp.full((2, 1), p)  # noqa: E731
        return jnp.sum(apply_rope(q, at(i), inv_freq) * apply_rope(k, at(j), inv_freq), -1)

    np.testing.assert_allclose(score(5, 3), score(105, 103), rtol=1e-4, atol=1e-4)
    assert jnp.abs(score(5, 3) - score(5, 4)).max() > 1e-2


def test_angles_are_float32_for_bfloat16(x):
    """At position 4001 a bfloat16 angle would be off by whole radians."""
    x16 = jnp.asarray(x, jnp.bfloat16)
    positions, inv_freq = jnp.full((2, 7), 4001), rope.rope_frequencies(16, 10000.0)
    got = apply_rope(x16, positions, inv_freq)
    assert got.dtype == jnp.bfloat16
    want = _rotate_half(np.asarray(x16, np.float64), np.full((2, 7), 4001), inv_freq)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.03)


def test_linear_scaling_divides():
    plain = rope.rope_frequencies(64, 10000.0)
    np.testing.assert_allclose(rope.rope_frequencies(64, 10000.0, scaling="linear", factor=4.0), plain / 4, rtol=1e-6)


def test_llama3_keeps_fast_and_divides_slow():
    plain, scaled = rope.rope_frequencies(128, 500000.0), rope.rope_frequencies(128, 500000.0, **LLAMA3)
    wavelength = 2 * np.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~(fast | slow)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["none", "linear", "llama3"])
def test_frequencies_are_hugging_faces(kind):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours = {"none": {}, "linear": dict(scaling="linear", factor=4.0), "llama3": LLAMA3}[kind]
    theirs = {"scaling": "rope_type", "original_max_len": "original_max_position_embeddings"}
    scaling = {theirs.get(name, name): value for name, value in ({"scaling": "default"} | ours).items()}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    init = ROPE_INIT_FUNCTIONS.get(scaling["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    want, _ = init(config, device="cpu")
    np.testing.assert_allclose(rope.rope_frequencies(128, 500000.0, **ours), want.numpy(), rtol=2e-6)


def test_gradient_is_the_inverse_rotation(x):
    """A rotation keeps norms, so the gradient of half the squared norm is x itself."""
    x = jnp.asarray(x, jnp.float32)
    positions, inv_freq = jnp.arange(7)[None], rope.rope_frequencies(16, 10000.0)
    grad = jax.grad(lambda x: 0.5 * jnp.sum(apply_rope(x, positions, inv_freq) ** 2))(x)
    np.testing.assert_allclose(grad, x, atol=2e-6)
