"""Embeddings are unit vectors that padding does not change."""

import jax.numpy as jnp
import numpy as np
import pytest

from rrl.errors import UserError
from tests.models.small import draw, embed, make


def test_embeddings_are_unit_vectors_and_padding_changes_nothing(encoder_config):
    encoder, tokens = make(encoder_config), draw(encoder_config, 3, 12)
    mask = jnp.arange(12) < jnp.array([[12], [7], [3]])
    embeddings = embed(encoder, tokens, mask)
    assert embeddings.dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(embeddings, axis=-1), 1.0, rtol=1e-6)
    alone = embed(encoder, tokens[1:2, :7], jnp.ones((1, 7), bool))
    np.testing.assert_allclose(embeddings[1:2], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(embeddings, embed(encoder, jnp.where(mask, tokens, 5), mask))


def test_an_empty_text_gives_zeros_not_nan(encoder_config):
    assert not embed(make(encoder_config), jnp.zeros((1, 4), int), jnp.zeros((1, 4), bool)).any()


def test_text_longer_than_the_position_table_is_refused(encoder_config):
    with pytest.raises(UserError, match="41 tokens are more than max_positions=40"):
        make(encoder_config).embed(jnp.zeros((1, 41), int), jnp.ones((1, 41), bool))
