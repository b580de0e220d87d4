"""Every parameter has a rule, sharded and unsharded models agree, and dimensions that do not divide are replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rrl.errors import UserError
from rrl.models.config import DecoderConfig, EncoderConfig
from rrl.models.decoder import Decoder
from rrl.models.encoder import Encoder
from rrl.parallel.mesh import ROW_AXES, make_mesh
from rrl.parallel.rules import RULES, constrain, fit, optimizer_shardings, shard, shardings, spec_of

P = PartitionSpec


def small(**changes):
    shape = {"vocab_size": 48, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 32}
    return DecoderConfig(**(shape | changes))


GEMMA3 = {
    "model_type": "gemma3_text", "local_rope_theta": 100.0, "query_pre_attn_scalar": 8, "sliding_window": 5,
    "sliding_layers": (True, False),
}  # fmt: skip


@pytest.mark.parametrize("family", [{"model_type": name} for name in ("qwen2", "qwen3", "llama")] + [GEMMA3])
def test_every_parameter_of_every_model_has_a_rule(family):
    mesh = make_mesh(2, 2, 2)
    decoder = Decoder(small(**family, tie_embeddings=False), rngs=nnx.Rngs(0))
    encoder = Encoder(EncoderConfig(40, 16, 2, 4, 32, model_type="xlm-roberta"), rngs=nnx.Rngs(0))
    for model in (decoder, encoder):
        assert len(shardings(nnx.state(model), mesh)) == len(jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize(
    ("sizes", "family"),
    [(sizes, {}) for sizes in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4))]
    + [((2, 2, 2), GEMMA3)],
)
def test_sharded_loss_and_gradients_equal_those_of_one_device(sizes, family):
    mesh = make_mesh(*sizes)
    graph, state = nnx.split(Decoder(small(vocab_size=50, **family), rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (8, 12), 0, 50)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

    @jax.jit
    def step(state, tokens, positions):
        def loss(state):
            decoder = nnx.merge(graph, state)
            logits = decoder.unembed(decoder(tokens, positions=positions))
            picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

        return jax.value_and_grad(loss)(state)

    batch = NamedSharding(mesh, P(("data", "fsdp")))
    sharded = step(shard(state, mesh), jax.device_put(tokens, batch), jax.device_put(positions, batch))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        step(state, tokens, positions),
        sharded,
    )


def test_kv_heads_that_the_tensor_axis_does_not_divide_are_replicated():
    mesh = make_mesh(1, 1, 8)
    assert fit("layers/k", spec_of("layers/k"), (2, 16, 2, 8), mesh) == P(None, "fsdp", None, None)
    assert fit("layers/q", spec_of("layers/q"), (2, 16, 8, 8), mesh) == P(None, "fsdp", "tensor", None)


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(UserError, match="'layers/adapter'"):
        spec_of("layers/adapter")


def test_the_first_matching_rule_wins():
    assert spec_of("head", ((r"h.*", P("data")), *RULES)) == P("data")


@pytest.mark.parametrize(
    ("spec", "message"),
    [(P("tensor", "tensor"), "twice"), (P("expert"), "expert"), (P(None, None, "data"), "3 dimensions")],
)
def test_collisions_unknown_axes_and_long_specs_are_refused_by_name(spec, message):
    with pytest.raises(UserError, match=rf"'head'.*{message}"):
        fit("head", spec, (8, 8), make_mesh())


def test_activations_are_constrained_only_on_a_mesh():
    x = jnp.ones((8, 3, 4))
    assert constrain(x, ROW_AXES, None, "tensor") is x
    with jax.set_mesh(make_mesh(1, 1, 1, devices=jax.devices()[:1])):
        assert constrain(x, ROW_AXES, None, "tensor") is x
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        placed = jax.jit(lambda x: constrain(x, ROW_AXES, "tensor", "tensor" if x.ndim == 2 else None))(x)
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, P(ROW_AXES, None, None)), 3)


def test_optimiser_state_is_sharded_like_its_parameters_and_counts_are_replicated():
    mesh = make_mesh(1, 4, 2)
    params = nnx.state(Decoder(small(), rngs=nnx.Rngs(0)))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    placed = optimizer_shardings(state, mesh)
    for moment in (placed[0].mu, placed[0].nu):
        assert jax.tree.leaves(moment) == list(shardings(params, mesh).values())
    assert placed[0].count == NamedSharding(mesh, P())
