"""Chunked log-probabilities equal the plain way, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs

B, T, D, V = 3, 37, 8, 50


class TinyModel:
    """A running mean of embeddings and a head; enough to have a gradient everywhere."""

    def __init__(self, params):
        self.params = params

    def __call__(self, tokens, *, positions, segment_ids=None):
        x = self.params["embedding"][tokens]
        return jnp.tanh(jnp.cumsum(x, axis=1) / (1 + jnp.arange(tokens.shape[1])[:, None]))

    def unembed(self, hidden):
        return hidden @ self.params["head"]


def plain(model, batch, temperature=1.0):
    hidden = model(batch.tokens, positions=batch.positions)
    logits = model.unembed(hidden[:, :-1]) / temperature
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    mask = batch.loss[:, 1:]
    pad = lambda x: jnp.pad(jnp.where(mask, x, 0), ((0, 0), (1, 0)))  # noqa: E731
    return (
        pad(picked),
        pad(entropy),
        jnp.pad(mask & (logits.argmax(-1) == batch.tokens[:, 1:]), ((0, 0), (1, 0))),
    )


@pytest.fixture
def model_and_batch():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"embedding": jax.random.normal(keys[0], (V, D)), "head": jax.random.normal(keys[1], (D, V))}
    tokens = jax.random.randint(keys[2], (B, T), 0, V)
    loss = jax.random.bernoulli(keys[3], 0.4, (B, T)).at[2].set(False)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    return params, Batch(tokens, positions, jnp.ones_like(tokens), loss)


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("chunk", [1, 12, 30, 10_000])
def test_chunked_equals_plain(model_and_batch, chunk, remat):
    params, batch = model_and_batch
    scores = jax.jit(
        lambda p: token_logprobs(
            TinyModel(p), batch, chunk=chunk, entropy=True, greedy=True, temperature=0.7, remat=remat
        )
    )(params)
    logp, entropy, greedy = plain(TinyModel(params), batch, 0.7)
    np.testing.assert_allclose(scores.logp, logp, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=1e-5)
    np.testing.assert_array_equal(scores.greedy, greedy)


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("chunk", [12, 10_000])
def test_gradient_of_chunked_equals_gradient_of_plain(model_and_batch, chunk, remat):
    params, batch = model_and_batch
    weights = jax.random.normal(jax.random.key(5), (2, B, T))

    def ours(p):
        scores = token_logprobs(TinyModel(p), batch, chunk=chunk, entropy=True, remat=remat)
        return (scores.logp * weights[0] + scores.entropy * weights[1]).sum()

    def reference(p):
        logp, entropy, _ = plain(TinyModel(p), batch)
        return (logp * weights[0] + entropy * weights[1]).sum()

    got, want = jax.jit(jax.grad(ours))(params), jax.grad(reference)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_a_batch_without_targets_has_zero_scores_and_gradient(model_and_batch):
    params, batch = model_and_batch
    empty = Batch(batch.tokens, batch.positions, batch.segment_ids, jnp.zeros_like(batch.loss))
    value, grad = jax.value_and_grad(lambda p: token_logprobs(TinyModel(p), empty, chunk=12).logp.sum())(
        params
    )
    assert value == 0 and not any(g.any() for g in jax.tree.leaves(grad))


def test_logits_of_the_whole_batch_never_exist():
    rows, length, vocabulary = 4, 256, 20_000
    params = {"embedding": jnp.zeros((vocabulary, D)), "head": jnp.zeros((D, vocabulary))}
    tokens = jnp.zeros((rows, length), jnp.int32)
    batch = Batch(tokens, tokens, tokens + 1, tokens == 0)

    def loss(p, remat):
        return token_logprobs(TinyModel(p), batch, chunk=64, remat=remat).logp.sum()

    def memory(remat):
        compiled = jax.jit(jax.grad(loss), static_argnums=1).lower(params, remat).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(True) < 4 * rows * length * vocabulary / 4 < memory(False)
