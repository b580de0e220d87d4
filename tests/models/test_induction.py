"""Initial induction heads attend to the right positions before any training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.induction import init_induction_heads
from rrl.models.rope import rotation

LENGTH = 48


def model(**changes):
    shape = {
        "vocab_size": 256,
        "hidden": 128,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "mlp": 64,
        "rope_theta": 1e6,
        "model_type": "qwen2",
    }
    return Decoder(DecoderConfig(**{**shape, **changes}), rngs=nnx.Rngs(0))


def attention_of(decoder, tokens):
    """Attention weights [layers, heads, T, T]."""
    graph, stacked = nnx.split(decoder.layers)
    positions = jnp.arange(tokens.shape[1])[None]
    x, found = decoder._embed(tokens), []

    def attend(q, k, v):
        repeated = [jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v)]
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, repeated[0])
        weights = jax.nn.softmax(jnp.where(np.tri(scores.shape[-1], dtype=bool), scores, -1e9), -1)
        found.append(np.asarray(weights[0]))
        return jnp.einsum("BNTS,BSNH->BTNH", weights, repeated[1])

    for index in range(decoder.config.layers):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=index: leaf[i], stacked))
        x = layer(x, rotation(decoder.config, positions), attend)
    return found


@pytest.mark.parametrize(("family", "hidden"), [("qwen2", 128), ("llama", 160)])
def test_heads_attend_to_their_offset_and_to_what_followed_the_same_token(family, hidden):
    decoder = model(model_type=family, hidden=hidden)
    decoder.embedding[...] = decoder.embedding[...] * 5
    decoder.layers.down[...] = jnp.zeros_like(decoder.layers.down[...])
    decoder.layers.o[...] = jnp.zeros_like(decoder.layers.o[...])
    init_induction_heads(decoder)
    once = np.random.default_rng(0).permutation(256)[:LENGTH]
    first, second, _ = attention_of(decoder, jnp.asarray(np.tile(once, 2)[None]))
    at = np.arange(8, 2 * LENGTH)
    for head, offset in enumerate((1, 2, 3)):
        assert first[head, at, at - offset].mean() > 0.7
    # Each token of the second half also occurs LENGTH earlier; the tokens one or two places after that follow it.
    at = np.arange(LENGTH, 2 * LENGTH - 2)
    for head, offset in ((0, 1), (2, 2)):
        assert second[head, at, at - LENGTH + offset].mean() > 0.5


def test_other_parameters_stay_and_the_seed_decides():
    plain, wired, again, other = model(), model(), model(), model()
    for decoder, seed in ((wired, 0), (again, 0), (other, 1)):
        init_induction_heads(decoder, seed=seed)
    for name in ("q", "k", "v", "o"):
        assert (getattr(wired.layers, name)[...][2] == getattr(plain.layers, name)[...][2]).all()
        assert (getattr(wired.layers, name)[...] == getattr(again.layers, name)[...]).all()
    assert (wired.layers.q[...][0, :, 3] == plain.layers.q[...][0, :, 3]).all()
    assert (wired.layers.q[...][1] != other.layers.q[...][1]).any()


@pytest.mark.parametrize(
    ("changes", "offsets"),
    [
        ({"model_type": "qwen3"}, (1,)),
        ({"model_type": "llama"}, (1, 2, 3)),
        ({"layers": 1}, (1,)),
        ({}, (1, 2, 3, 4, 5)),
        ({}, ()),
        ({"hidden": 64}, (1, 2, 3)),
    ],
)
def test_models_that_cannot_have_induction_heads_are_refused(changes, offsets):
    with pytest.raises(UserError, match="induction heads need"):
        init_induction_heads(model(**changes), offsets=offsets)
