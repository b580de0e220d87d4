"""Value models: a decoder with a scalar output that starts at 0; the reward of a sequence is the value of its last token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.heads import ValueModel
from rrl.models.hf import load_decoder, load_value_model, save_decoder
from rrl.parallel.mesh import make_mesh
from tests.models.small import SMALL, draw, filled, places, run


@nnx.jit
def values(model, tokens, positions, segment_ids=None):
    return model.values(tokens, positions=positions, segment_ids=segment_ids)


@nnx.jit
def rewards(model, tokens, lengths):
    return model.sequence_reward(tokens, lengths)


def test_a_language_model_is_loaded_with_a_value_head_of_zeros(tmp_path):
    save_decoder(tmp_path, filled(SMALL))
    critic = load_value_model(tmp_path)
    tokens, at = draw(SMALL, 2, 9), places(2, 9)
    np.testing.assert_array_equal(run(critic, tokens, at), run(filled(SMALL), tokens, at))
    assert not np.asarray(values(critic, tokens, at)).any()
    assert not hasattr(load_value_model(tmp_path), "head")


@pytest.mark.parametrize("mesh", [None, {"data": 1, "fsdp": 2, "tensor": 4}])
def test_a_value_model_may_use_only_the_first_layers(tmp_path, mesh):
    whole = filled(SMALL)
    save_decoder(tmp_path, whole)
    critic = load_value_model(tmp_path, layers=1, mesh=mesh and make_mesh(**mesh))
    short = nnx.eval_shape(lambda: Decoder(dataclasses.replace(SMALL, layers=1), rngs=nnx.Rngs(0)))
    state = nnx.state(whole)
    state["layers"] = jax.tree.map(lambda x: x[:1], state["layers"])
    nnx.update(short, state)
    tokens, at = draw(SMALL, 2, 9), places(2, 9)
    np.testing.assert_allclose(run(critic, tokens, at), run(short, tokens, at), atol=0 if not mesh else 1e-5)
    assert not np.allclose(run(critic, tokens, at), run(whole, tokens, at), atol=1e-3)
    with pytest.raises(UserError, match=rf"has {SMALL.layers} layers; layers=9 must be 0"):
        load_value_model(tmp_path, layers=9)


def trained() -> ValueModel:
    critic = nnx.eval_shape(lambda: ValueModel(SMALL, rngs=nnx.Rngs(0)))
    state = nnx.state(filled(SMALL))
    state["score"] = nnx.Param(jnp.linspace(-1, 1, SMALL.hidden)[:, None])
    nnx.update(critic, state)
    return critic


@pytest.mark.parametrize("mesh", [None, {"data": 1, "fsdp": 2, "tensor": 4}])
def test_a_value_model_survives_saving_and_loading_exactly(tmp_path, mesh):
    critic = trained()
    save_decoder(tmp_path, critic)
    again = load_value_model(tmp_path, mesh=mesh and make_mesh(**mesh))
    tokens, at = draw(SMALL, 2, 9), places(2, 9)
    np.testing.assert_allclose(
        values(again, tokens, at), values(critic, tokens, at), atol=0 if not mesh else 1e-5
    )


def test_values_are_the_hidden_states_times_the_score_kernel():
    critic, tokens, at = trained(), draw(SMALL, 2, 9), places(2, 9)
    hidden = run(critic, tokens, at)
    np.testing.assert_allclose(values(critic, tokens, at), hidden @ critic.score[...][:, 0], atol=1e-5)


def test_a_sequences_reward_is_the_value_after_its_last_token_whatever_the_padding():
    critic, tokens = trained(), draw(SMALL, 2, 9)
    found = rewards(critic, tokens, jnp.array([9, 4]))
    alone = values(critic, tokens[1:, :4], places(1, 4))
    np.testing.assert_allclose(found, [values(critic, tokens, places(2, 9))[0, -1], alone[0, -1]], atol=1e-5)


def test_a_value_model_is_refused_as_a_language_model(tmp_path):
    save_decoder(tmp_path, trained())
    with pytest.raises(UserError, match=r"contain tensors that do not belong .*score\.weight"):
        load_decoder(tmp_path)


@pytest.mark.parity
def test_value_models_and_transformers_sequence_classification_are_interchangeable(config, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed; parity needs the extra [parity]")
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoConfig.for_model(
        **(config.to_hf() | {"pad_token_id": 0, "id2label": {0: "v"}, "label2id": {"v": 0}})
    )
    theirs = transformers.AutoModelForSequenceClassification.from_config(hf).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_value_model(tmp_path / "theirs")
    save_decoder(tmp_path / "ours", ours)
    again, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (3, 21))
    lengths = np.array([21, 9, 1])
    inside = np.arange(21) < lengths[:, None]
    tokens[~inside] = 0
    found = rewards(ours, jnp.asarray(tokens), jnp.asarray(lengths))
    for model in (theirs, again.eval()):
        with torch.no_grad():
            expected = model(
                torch.tensor(tokens), attention_mask=torch.tensor(inside, dtype=torch.long)
            ).logits
        np.testing.assert_allclose(found, expected.numpy()[:, 0], atol=1e-5)
