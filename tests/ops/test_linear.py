"""dense is tensordot, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops.products import dense


@pytest.mark.parametrize(("x_shape", "k_shape", "axes"), [((2, 3, 4), (4, 5, 6), 1), ((2, 3, 4, 5), (4, 5, 6), 2)])
def test_dense_is_tensordot(x_shape, k_shape, axes):
    x, kernel = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((x_shape, k_shape)))
    np.testing.assert_allclose(dense(x, kernel, axes), jnp.tensordot(x, kernel, axes), rtol=1e-5, atol=1e-6)
    got, expected = (
        jax.grad(lambda x, k, f=f: jnp.sum(jnp.sin(f(x, k, axes))), argnums=(0, 1))(x, kernel)
        for f in (dense, jnp.tensordot)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
    with pytest.raises(TypeError):
        dense(x, kernel[1:], axes)
