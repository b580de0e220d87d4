"""Small models with random norms and biases, jitted calls of them, and textbook attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rrl.models.config import DecoderConfig, EncoderConfig
from rrl.models.decoder import Decoder
from rrl.models.encoder import Encoder

SMALL = DecoderConfig(vocab_size=53, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24)


@functools.cache
def make(config: DecoderConfig | EncoderConfig, **kwargs):
    """Makes a model; the same arguments give the same model."""
    model = Decoder if isinstance(config, DecoderConfig) else Encoder
    return _make(model, config, tuple(kwargs.items()))


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def _make(model, config, kwargs):
    made = model(config, rngs=nnx.Rngs(0), **dict(kwargs))
    leaves, tree = jax.tree.flatten(nnx.state(made))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys)]
    nnx.update(made, jax.tree.unflatten(tree, noisy))
    return made


@nnx.jit
def run(decoder, tokens, positions, segment_ids=None):
    return decoder(tokens, positions=positions, segment_ids=segment_ids)


@functools.partial(nnx.jit, static_argnames="attention_batches")
def extend(decoder, tokens, positions, cache, rows=None, attention_batches=()):
    return decoder.extend(
        tokens, positions=positions, cache=cache, rows=rows, attention_batches=attention_batches
    )


@nnx.jit
def encode(encoder, tokens, mask):
    return encoder(tokens, mask)


@nnx.jit
def embed(encoder, tokens, mask):
    return encoder.embed(tokens, mask)


def draw(config, rows, length, seed=0):
    """Random tokens [rows, length]."""
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, config.vocab_size)


def places(rows, length):
    """Positions 0, 1, 2, ... [rows, length]."""
    return jnp.broadcast_to(jnp.arange(length), (rows, length))


def filled(config, seed=0, dtype=jnp.float32):
    """A model with random parameters, drawn without compiling anything."""
    model = Decoder if isinstance(config, DecoderConfig) else Encoder
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(seed)
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jnp.asarray(draws.normal(0, 0.3, leaf.shape), dtype), state)
    )


def textbook_attention(q, k, v, segment_ids):
    """softmax(q kᵀ) v with each kv head repeated for its group, and a full [T, S] mask."""
    time, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    seen = jnp.tril(jnp.ones((time, time), bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(seen[:, None], jnp.einsum("BTNH,BSNH->BNTS", q, k), -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1), v)
