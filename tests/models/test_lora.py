"""LoRA adapters: no effect at first, equal to the merged model after training, on layers chosen by a regular expression."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.cache import KVCache
from rrl.models.decoder import Decoder
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.lora import LoraConfig, add_lora, has_lora, merge_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from tests.models.small import SMALL, draw, extend, filled, places, run

UNTIED = dataclasses.replace(SMALL, tie_embeddings=False)
EVERY = LoraConfig(rank=3, alpha=6.0, layers=".*")


def adapted(config=EVERY, shape=UNTIED, trained=True) -> Decoder:
    """A small model with random adapters, as after training."""
    decoder = filled(shape)
    add_lora(decoder, config, rngs=nnx.Rngs(1))
    if trained:
        state = nnx.state(decoder, nnx.LoRAParam)
        draws = np.random.default_rng(2)
        drawn = jax.tree.map(lambda x: jnp.asarray(draws.normal(0, 0.3, x.shape), x.dtype), state)
        nnx.update(decoder, drawn)
    return decoder


@nnx.jit
def logits(decoder, hidden):
    return decoder.unembed(hidden)


def outputs(decoder):
    """Logits of one pass, and of the same tokens with the cache."""
    tokens, at = draw(SMALL, 2, 7), places(2, 7)
    whole = run(decoder, tokens, at)
    steps, _ = extend(decoder, tokens, at, KVCache.create(SMALL, 2, 7))
    return np.asarray(logits(decoder, whole)), np.asarray(logits(decoder, steps))


def test_new_adapters_do_not_change_the_outputs():
    for one, other in zip(outputs(adapted(trained=False)), outputs(filled(UNTIED))):
        np.testing.assert_array_equal(one, other)


def test_a_model_with_adapters_equals_the_merged_model():
    decoder = adapted()
    alone = merge_lora(decoder)
    assert has_lora(decoder) and not has_lora(alone)
    before = outputs(filled(UNTIED))
    for one, other, start in zip(outputs(decoder), outputs(alone), before):
        np.testing.assert_allclose(one, other, atol=2e-5)
        assert np.abs(one - start).max() > 0.1


def test_merging_adds_alpha_over_rank_times_the_product():
    decoder = adapted(LoraConfig(rank=2, alpha=8.0, layers="layers/o"))
    layers, alone = decoder.layers, merge_lora(decoder)
    a, b = np.asarray(layers.o_lora_a[...]), np.asarray(layers.o_lora_b[...])
    change = 4.0 * np.einsum("lnhr,lrd->lnhd", a, b)
    np.testing.assert_allclose(alone.layers.o[...] - layers.o[...], change, atol=1e-6)
    assert alone.layers.q is layers.q  # shared, not copied
    assert not hasattr(layers, "q_lora_a")


def test_float32_adapters_are_not_rounded_when_merged_into_a_narrower_kernel():
    decoder = adapted()
    kernel = decoder.layers.o[...]
    change, narrow = merge_lora(decoder).layers.o[...] - kernel, kernel.astype(jnp.bfloat16)
    decoder.layers.o = nnx.Param(narrow)
    found = merge_lora(decoder).layers.o[...]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, narrow.astype(jnp.float32) + change, atol=1e-6)


def test_the_regular_expression_selects_layers_and_an_error_lists_them():
    decoder = adapted(dataclasses.replace(EVERY, layers="layers/(q|v)|head"))
    names = {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(decoder, nnx.LoRAParam))}
    assert names == {
        f"{name}_lora_{part}" for name in ("layers/q", "layers/v", "head") for part in ("a", "b")
    }
    with pytest.raises(
        UserError, match=r"lora.layers='head' matches no linear layer; this model has layers/q"
    ):
        adapted(LoraConfig(rank=2, layers="head"), shape=SMALL)


@pytest.mark.parametrize("fields", [{"rank": -1}, {"alpha": 0}, {"layers": "("}])
def test_invalid_fields_are_refused_by_name(fields):
    with pytest.raises(UserError, match=f"lora.{next(iter(fields))}"):
        LoraConfig(**fields)


def test_rank_zero_adds_nothing():
    decoder = filled(SMALL)
    add_lora(decoder, LoraConfig(), rngs=nnx.Rngs(0))
    assert not has_lora(decoder) and merge_lora(decoder) is decoder


def test_adapters_are_sharded_like_their_kernels():
    decoder = adapted()
    expected = outputs(decoder)
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    nnx.update(decoder, shard(nnx.state(decoder), mesh))
    assert decoder.layers.q_lora_b[...].sharding.spec[2] == "tensor"
    for one, other in zip(outputs(decoder), expected):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_an_export_contains_the_merged_kernels(tmp_path):
    decoder = adapted()
    save_decoder(tmp_path, decoder)
    for one, other in zip(outputs(load_decoder(tmp_path)), outputs(merge_lora(decoder))):
        np.testing.assert_array_equal(one, other)


def test_bfloat16_kernels_get_bfloat16_adapters():
    decoder = filled(SMALL, dtype=jnp.bfloat16)
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    assert decoder.layers.q_lora_a[...].dtype == decoder.layers.down_lora_b[...].dtype == jnp.bfloat16
