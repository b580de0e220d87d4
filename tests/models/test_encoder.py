"""Embeddings: padding does not change them, and pooling follows the config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.config import Pooling
from rrl.models.encoder import pool
from tests.models.small import draw, embed, make


def test_embeddings_are_unit_vectors_and_independent_of_padding(encoder_config):
    encoder, tokens = make(encoder_config), draw(encoder_config, 3, 12)
    mask = jnp.arange(12) < jnp.array([[12], [7], [3]])
    embeddings = embed(encoder, tokens, mask)
    assert embeddings.dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(embeddings, axis=-1), 1.0, rtol=1e-6)
    alone = embed(encoder, tokens[1:2, :7], jnp.ones((1, 7), bool))
    np.testing.assert_allclose(embeddings[1:2], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(embeddings, embed(encoder, jnp.where(mask, tokens, 5), mask))


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_takes_the_mean_or_the_first_token_and_normalises_if_set(mode, normalize):
    hidden = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    mask = np.array(
        [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool
    )  # padded right, padded left, empty
    expected = np.stack(
        [hidden[0, :3].mean(0), hidden[1, 1:].mean(0)] if mode == "mean" else [hidden[0, 0], hidden[1, 1]]
    )
    if normalize:
        expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    pooled = pool(jnp.asarray(hidden), jnp.asarray(mask), Pooling(mode, normalize))
    np.testing.assert_allclose(pooled[:2], expected, rtol=1e-5, atol=1e-6)
    assert not pooled[2].any()


def test_bfloat16_is_within_two_hundredths(encoder_config):
    exact, narrow = make(encoder_config), nnx.clone(make(encoder_config))
    narrow.dtype = jnp.dtype(jnp.bfloat16)
    tokens, mask = draw(encoder_config, 4, 16), jnp.arange(16) < jnp.array([[16], [9], [2], [1]])
    wide, half = (embed(encoder, tokens, mask) for encoder in (exact, narrow))
    assert half.dtype == jnp.float32
    assert (jnp.linalg.norm(half - wide, axis=-1) < 2e-2).all()
    assert not np.array_equal(half, wide)


def test_text_longer_than_the_position_table_is_refused(encoder_config):
    assert encoder_config.max_tokens == 40  # RoBERTa does not use the first pad_token_id + 1 positions
    encoder = make(encoder_config)
    jax.eval_shape(lambda: encoder(jnp.zeros((1, 40), int), jnp.ones((1, 40), bool)))
    with pytest.raises(UserError, match=rf"41 tokens .* 40 \(max_positions={encoder_config.max_positions}\)"):
        encoder(jnp.zeros((1, 41), int), jnp.ones((1, 41), bool))
