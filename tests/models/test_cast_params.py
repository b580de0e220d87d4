"""`cast_params` gives the values that the decoder computes with."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, cast_params


def test_parameters_cast_once_give_the_same_outputs_as_casting_at_each_use():
    config = DecoderConfig(
        vocab_size=32, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16, model_type="qwen3"
    )
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    params = jax.tree.map(lambda x: x * 1.001, params)  # so that norms would be rounded too
    cast = cast_params(params, jnp.bfloat16)
    in_float32 = {"/".join(path) for path, leaf in nnx.to_flat_state(cast) if leaf.dtype == jnp.float32}
    assert in_float32 == {
        "norm",
        "layers/attention_norm",
        "layers/mlp_norm",
        "layers/q_norm",
        "layers/k_norm",
    }
    tokens = jnp.arange(12).reshape(2, 6)

    @jax.jit
    def logits(params):
        decoder = nnx.merge(graph, params)
        return decoder.unembed(decoder(tokens, positions=jnp.broadcast_to(jnp.arange(6), (2, 6))))

    np.testing.assert_array_equal(logits(params), logits(cast))
