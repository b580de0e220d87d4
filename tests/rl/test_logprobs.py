"""Chunked log-probabilities and their gradients equal those of whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.batch import Batch
from rrl.rl.logprobs import chunk_positions, token_logprobs

B, T, D, V = 3, 37, 8, 50


class TinyModel:
    """A running mean of embeddings and a head, so that every parameter has a gradient."""

    def __init__(self, params):
        self.params = params

    def __call__(self, tokens, *, positions, segment_ids=None, branches=None):
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
    mask = batch.loss_mask[:, 1:]
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
def test_chunked_scores_equal_those_of_whole_logits(model_and_batch, chunk, remat):
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
def test_chunked_gradients_equal_those_of_whole_logits(model_and_batch, chunk, remat):
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
    empty = Batch(batch.tokens, batch.positions, batch.segment_ids, jnp.zeros_like(batch.loss_mask))
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


def test_chunk_size_follows_from_the_memory_of_its_logits():
    assert [chunk_positions(size) for size in (500, 128_256, 151_936, 10**7)] == [2048, 640, 512, 128]
    assert chunk_positions(151_936, devices=4) == 2048


def gradient(params, graph, batch, remat):
    def loss(params):
        model = nnx.merge(graph, params)
        scores = token_logprobs(model, batch, chunk=24, entropy=True, remat=remat)
        return (scores.logp - 0.3 * scores.entropy).sum()

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_gradient_with_remat_is_the_same_on_a_mesh(tied):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    sizes |= {"model_type": "llama", "tie_word_embeddings": tied, "max_position_embeddings": 64}
    graph, params = nnx.split(Decoder(DecoderConfig.from_hf(sizes), rngs=nnx.Rngs(0)))
    rows, length = 4, 32
    tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, 64)
    wanted = jax.random.bernoulli(jax.random.key(1), 0.4, (rows, length))
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    batch = Batch(tokens, positions, jnp.ones_like(tokens), wanted)
    plain, alone = (gradient(params, graph, batch, remat) for remat in (False, True))
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        spread = gradient(shard(params, mesh), graph, batch, True)
    for found in (
        alone,
        spread,
    ):  # sums of large terms may cancel, so the tolerance depends on an array's magnitude
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * abs(b).max()), found, plain
        )


def choices(program):
    """The (false, true) branches of each `cond` in a program."""
    for step in program.eqns:
        if step.primitive.name == "cond":
            yield step.params["branches"]
        for value in step.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                if hasattr(part, "eqns"):
                    yield from choices(part)


def makes(branch, shape):
    return any(out.aval.shape == shape for step in branch.eqns for out in step.outvars)


def test_a_chunk_without_a_target_does_not_touch_the_heads_gradient(model_and_batch):
    """The gradient is summed in place: a chunk without a target makes no array of its size."""
    params, batch = model_and_batch

    def loss(p):
        return token_logprobs(TinyModel(p), batch, chunk=12, remat=True).logp.sum()

    found = [
        (nothing, learn)
        for nothing, learn in choices(jax.make_jaxpr(jax.grad(loss))(params))
        if makes(learn, (D, V))
    ]
    assert found and not any(makes(nothing, (D, V)) for nothing, _ in found)
