"""Same numbers as transformers with torch, both ways, on random weights of odd shapes."""

import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models.config import DecoderConfig
from rrl.models.hf import load_decoder, load_encoder, save_decoder, save_encoder
from tests.models.small import embed, encode, make, run

torch = pytest.importorskip("torch", reason="torch is not installed; parity needs the extra [parity]")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity


def random_(model):
    """Weights far from their initial values, so that every norm and bias matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def compare(folder, config: DecoderConfig, theirs, length):
    ours = load_decoder(folder)
    assert ours.config == config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, length))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    logits = ours.unembed(run(ours, jnp.asarray(tokens), positions))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("length", [17, 300])
def test_a_folder_that_transformers_wrote_gives_its_logits(config, tmp_path, length):
    hf = transformers.AutoConfig.for_model(**config.to_hf())
    theirs = random_(transformers.AutoModelForCausalLM.from_config(hf))
    theirs.save_pretrained(tmp_path)
    compare(tmp_path, config, theirs, length)


def test_a_folder_that_we_wrote_gives_our_logits_in_transformers(config, tmp_path):
    save_decoder(tmp_path, make(config))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    compare(tmp_path, config, theirs.eval(), 40)


@pytest.mark.parametrize("encoder_config", ["bert", "roberta", "xlm-roberta"], indirect=True)
def test_encoder_folders_give_the_same_hidden_states_both_ways(encoder_config, tmp_path):
    hf = transformers.AutoConfig.for_model(**encoder_config.to_hf())
    theirs = random_(transformers.AutoModel.from_config(hf))
    theirs.save_pretrained(tmp_path / "theirs")
    save_encoder(tmp_path / "ours", load_encoder(tmp_path / "theirs"))
    again, report = type(theirs).from_pretrained(
        tmp_path / "ours", add_pooling_layer=False, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    again.eval()
    # Padding ids stand within the texts too: positions must skip them as theirs do.
    tokens = np.random.default_rng(0).integers(0, encoder_config.vocab_size, (3, 21))
    mask = np.arange(21) < np.array([[21], [9], [1]])
    arguments = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask, dtype=torch.long)}
    with torch.no_grad():
        first, second = (model(**arguments).last_hidden_state.numpy() for model in (theirs, again))
    hidden = encode(load_encoder(tmp_path / "ours"), jnp.asarray(tokens), jnp.asarray(mask))
    np.testing.assert_allclose(hidden[mask], first[mask], atol=1e-4)
    np.testing.assert_allclose(second[mask], first[mask], atol=1e-5)
    pooled = (first * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    expected = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    embedded = embed(load_encoder(tmp_path / "theirs"), jnp.asarray(tokens), jnp.asarray(mask))
    np.testing.assert_allclose(embedded, expected, atol=1e-5)
