"""Parity with transformers (torch) in both directions, on random weights of unusual shapes."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rrl.models.cache import KVCache
from rrl.models.config import DecoderConfig
from rrl.models.families import DECODER_FAMILIES
from rrl.models.heads import ValueModel
from rrl.models.hf import load_decoder, load_encoder, load_value_model, save_decoder, save_encoder
from rrl.models.rope_scaling import Llama3Scaling
from tests.models.conftest import ODD
from tests.models.small import embed, encode, extend, make, places, run

torch = pytest.importorskip("torch", reason="torch is not installed; parity needs the extra [parity]")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity


def random_(model):
    """Moves the weights far from their initial values, so that every norm and bias matters."""
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
def test_a_folder_written_by_transformers_gives_the_same_logits(config, tmp_path, length):
    hf = transformers.AutoConfig.for_model(**config.to_hf())
    theirs = random_(transformers.AutoModelForCausalLM.from_config(hf))
    theirs.save_pretrained(tmp_path)
    compare(tmp_path, config, theirs, length)


GEMMA3 = {
    "local_rope_theta": 100.0, "query_pre_attn_scalar": 12, "sliding_window": 40, "sliding_layers": (True, False)
}  # fmt: skip
LONG = {
    family: DecoderConfig(
        vocab_size=89, hidden=24, layers=2, heads=4, kv_heads=1, head_dim=10, mlp=37, model_type=family,
        tie_embeddings=family == "qwen2", rope_theta=500.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
        max_positions=512, **(GEMMA3 if family == "gemma3_text" else {}),
    )
    for family in DECODER_FAMILIES
}  # fmt: skip
"""One kv head, heads that are not hidden / heads wide, an odd vocabulary, and RoPE scaled beyond 64 positions."""


@pytest.fixture(scope="module", params=LONG)
def narrow(request, tmp_path_factory):
    """A bfloat16 model of transformers, its folder with several files, and tokens far beyond the RoPE scaling point."""
    config, folder = LONG[request.param], tmp_path_factory.mktemp("narrow")
    theirs = random_(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf()))
    )
    theirs.to(torch.bfloat16).save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return config, folder, np.random.default_rng(0).integers(0, config.vocab_size, (2, 300))


def opened(folder, dtype):
    """Reloads the model, because casting it would also round its RoPE frequencies."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits_of(folder, dtype, tokens):
    model = opened(folder, dtype)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_16_bit_files_computed_in_float32_give_the_logits_of_transformers(narrow, stored, tmp_path):
    config, folder, tokens = narrow
    if stored == torch.float16:
        opened(folder, stored).save_pretrained(tmp_path, max_shard_size="6KB")
        folder = tmp_path
    compare(folder, config, opened(folder, torch.float32), tokens.shape[1])


def test_bfloat16_computation_is_as_close_to_float32_as_in_transformers(narrow):
    _, folder, tokens = narrow
    ours = load_decoder(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = np.asarray(ours.unembed(run(ours, jnp.asarray(tokens), positions)))
    exact, near = (logits_of(folder, dtype, tokens) for dtype in (torch.float32, torch.bfloat16))
    error, their_error = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (logits, near))
    assert error < min(2e-2, 1.5 * their_error), (error, their_error)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_reads_our_16_bit_sharded_folders_bit_for_bit(narrow, tmp_path, dtype):
    _, folder, _ = narrow
    theirs = opened(folder, getattr(torch, dtype))
    save_decoder(tmp_path, load_decoder(folder), dtype=dtype, shard_size=6000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.dtype == getattr(torch, dtype)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.generation_config.eos_token_id == theirs.generation_config.eos_token_id


def test_transformers_gives_the_same_logits_for_our_folder(config, tmp_path):
    save_decoder(tmp_path, make(config))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    compare(tmp_path, config, theirs.eval(), 40)


SLIDING = [name for name, config in ODD.items() if config.sliding_layers]


@pytest.mark.parametrize("config", SLIDING, indirect=True)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_with_sliding_windows_give_the_logits_of_transformers(config, side, tmp_path):
    theirs = random_(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf()))
    )
    theirs.save_pretrained(tmp_path)
    length, texts = 40, np.array([[40], [23], [3]])
    columns = np.arange(length)
    mask = columns >= length - texts if side == "left" else columns < texts
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, mask.shape)
    inputs = {"input_ids": tokens, "attention_mask": mask.astype(int), "position_ids": positions}
    with torch.no_grad():
        expected = theirs(**{name: torch.tensor(value) for name, value in inputs.items()}).logits.numpy()
    ours = load_decoder(tmp_path)
    logits = ours.unembed(run(ours, *(jnp.asarray(part) for part in (tokens, positions, mask.astype(int)))))
    np.testing.assert_allclose(logits[mask], expected[mask], rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("config", SLIDING, indirect=True)
def test_greedy_decoding_with_sliding_windows_gives_the_tokens_of_transformers(config, tmp_path):
    theirs = random_(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf()))
    )
    theirs.save_pretrained(tmp_path)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (2, 19))
    settings = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = {"input_ids": torch.tensor(prompt), "attention_mask": torch.ones(prompt.shape, dtype=torch.long)}
    expected = theirs.generate(**inputs, **settings).numpy()[:, 19:]
    ours, cache = load_decoder(tmp_path), KVCache.create(config, 2, 64)
    tokens, positions, written = jnp.asarray(prompt), places(2, 19), []
    for step in range(25):
        hidden, cache = extend(ours, tokens, positions, cache)
        tokens = ours.unembed(hidden[:, -1:]).argmax(axis=-1)
        positions = jnp.full((2, 1), 19 + step)
        written.append(tokens)
    np.testing.assert_array_equal(jnp.concatenate(written, axis=1), expected)


@pytest.mark.parametrize("names", ["transformers 5", "published"])
def test_the_text_part_of_gemma_3_with_images_gives_the_logits_of_transformers(names, tmp_path):
    config = ODD["gemma3"]
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    hf = transformers.Gemma3Config(text_config=config.to_hf(), vision_config=vision, mm_tokens_per_image=4)
    theirs = random_(transformers.Gemma3ForConditionalGeneration(hf))
    theirs.save_pretrained(tmp_path)
    prefixes = "model.language_model.", "language_model.model."
    old, new = prefixes if names == "published" else reversed(prefixes)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(rf"^{re.escape(old)}", new, name): tensor for name, tensor in tensors.items()}
    assert any(name.startswith(new) for name in renamed) and any("vision_tower" in name for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    compare(tmp_path, config, theirs, 33)
    save_decoder(tmp_path / "text", load_decoder(tmp_path))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(exported) is transformers.Gemma3ForCausalLM
    compare(tmp_path / "text", config, exported, 33)


def test_a_value_model_of_gemma_3_gives_the_scores_of_transformers(tmp_path):
    config = ODD["gemma3"]
    model = ValueModel(config, rngs=nnx.Rngs(0))
    model.score[...] = jnp.asarray(np.random.default_rng(0).normal(size=model.score.shape), jnp.float32)
    save_decoder(tmp_path, model)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.num_labels == 1
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, 21))
    with torch.no_grad():
        expected = theirs.score(theirs.model(torch.tensor(tokens)).last_hidden_state).numpy()[..., 0]
    ours = load_value_model(tmp_path)
    values = nnx.jit(lambda model, tokens: model.values(tokens, positions=places(2, 21)))(
        ours, jnp.asarray(tokens)
    )
    np.testing.assert_allclose(values, expected, atol=1e-4)


@pytest.mark.parametrize("encoder_config", ["bert", "roberta", "xlm-roberta"], indirect=True)
def test_encoder_folders_give_the_same_hidden_states_in_both_directions(encoder_config, tmp_path):
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
    # Padding ids occur within the texts too: positions must skip them as in transformers.
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
