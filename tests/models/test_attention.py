"""Causal attention in blocks equals textbook attention, and its custom gradient equals the automatic one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models.attention import causal_attention
from tests.models.small import textbook_attention


@pytest.mark.parametrize(("time", "kv_heads"), [(1, 1), (33, 4), (77, 2), (600, 1)])
def test_outputs_and_gradients_equal_textbook_attention(time, kv_heads):
    keys = jax.random.split(jax.random.key(time), 4)
    q, k, v = (
        jax.random.normal(key, (2, time, heads, 6)) for key, heads in zip(keys, (4, kv_heads, kv_heads))
    )
    segments = jnp.arange(time) // 25 * jnp.array([[1], [0]])
    weight = jax.random.normal(keys[3], q.shape)

    def both(attention):
        def total(q, k, v):
            out = attention(q, k, v, segments)
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (_, expected), gradients = both(textbook_attention)
    (_, found), ours = both(causal_attention)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for ours_one, theirs in zip(ours, gradients):
        np.testing.assert_allclose(ours_one, theirs, rtol=1e-4, atol=1e-4)
