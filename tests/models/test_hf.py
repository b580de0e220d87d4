"""Hugging Face folders: exact round trips, sharded files, other precisions, and precise errors for broken folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rrl.errors import UserError
from rrl.models.config import ENCODER_FAMILIES
from rrl.models.hf import (
    folder_hash,
    load_decoder,
    load_encoder,
    load_language_model,
    load_value_model,
    save_decoder,
    save_encoder,
)
from rrl.models.tokenizer import train_tokenizer
from rrl.models.weights import SafetensorsFolder
from rrl.parallel.mesh import make_mesh
from tests.memory import limit_memory
from tests.models.small import SMALL, filled

WEIGHTS = "model.safetensors"


def same(first, second):
    pairs = zip(
        *(map(np.asarray, jax.tree.leaves(nnx.state(model))) for model in (first, second)), strict=True
    )
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def folder(tmp_path):
    save_decoder(tmp_path, filled(SMALL))
    return tmp_path


def test_export_then_import_is_exact(config, tmp_path):
    decoder = filled(config)
    save_decoder(tmp_path, decoder)
    loaded = load_decoder(tmp_path)
    assert loaded.config == config
    assert same(decoder, loaded)


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        (2, {"eos_token_id": [2, 7], "temperature": 0.7}, (2, 7)),  # Qwen2.5-Instruct
        (7, {"eos_token_id": [7, 5, 2]}, (7, 5, 2)),  # Llama 3.1: the end of a chat turn is not the first
        ([7, 2], {"eos_token_id": 5}, (7, 2, 5)),
        (None, {"eos_token_id": 2}, 2),
        (2, {"eos_token_id": None}, 2),
        (2, None, 2),
    ],
)
def test_end_tokens_come_from_both_files_and_survive_export(tmp_path, config, generation, found):
    first, second = tmp_path / "first", tmp_path / "second"
    tokenizer = train_tokenizer(["some text"], 259)  # its end token is 2
    save_decoder(first, filled(dataclasses.replace(SMALL, vocab_size=259)), tokenizer)
    hf = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(hf | {"eos_token_id": config}))
    if generation is None:
        (first / "generation_config.json").unlink()
    else:
        (first / "generation_config.json").write_text(json.dumps(generation))
    decoder, _ = load_language_model(first, "policy", chat=False)
    assert decoder.config.eos_token_id == found
    save_decoder(second, decoder, tokenizer)
    written = list(found) if isinstance(found, tuple) else found
    for file in ("config.json", "generation_config.json"):
        assert json.loads((second / file).read_text())["eos_token_id"] == written
    assert load_decoder(second).config == decoder.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"eos_token_id": [2, "end"]}',
            r"generation_config.json: eos_token_id=\[2, 'end'\] must be a token id",
        ),
        ("{", r"generation_config.json is not valid JSON"),
    ],
)
def test_an_invalid_generation_config_is_named(folder, text, message):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_decoder(folder)
    assert str(folder) in str(caught.value)


def test_encoder_export_then_import_is_exact(encoder_config, tmp_path):
    encoder = filled(encoder_config)
    save_encoder(tmp_path, encoder)
    assert same(encoder, load_encoder(tmp_path))


def test_encoder_weights_with_pooler_and_prefix_are_read(encoder_config, tmp_path):
    encoder = filled(encoder_config)
    save_encoder(tmp_path, encoder)
    prefix = ENCODER_FAMILIES[encoder_config.model_type].prefix
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    ignored = dict.fromkeys(
        [f"{prefix}pooler.dense.bias", "cls.predictions.bias", "lm_head.bias"], np.zeros(3)
    )
    save_file(tensors | ignored, tmp_path / WEIGHTS)
    assert same(encoder, load_encoder(tmp_path))
    save_file(tensors | {"classifier.weight": np.zeros(3)}, tmp_path / WEIGHTS)
    with pytest.raises(
        UserError, match=r"do not belong .*: classifier.weight \(3,\) in model.safetensors; use"
    ):
        load_encoder(tmp_path)


def test_bfloat16_folder_is_read_and_written(folder):
    decoder = filled(SMALL, dtype=jnp.bfloat16)
    save_decoder(folder, decoder, dtype=jnp.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert same(decoder, load_decoder(folder, param_dtype=jnp.bfloat16))
    wide, narrow = (jax.tree.leaves(nnx.state(model)) for model in (load_decoder(folder), decoder))
    assert all(
        w.dtype == jnp.float32 and np.array_equal(w, np.asarray(n, np.float32)) for w, n in zip(wide, narrow)
    )


def test_sharded_files_with_an_index_are_read(folder):
    whole = load_decoder(folder)
    tensors = load_file(folder / WEIGHTS)
    index = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(tensors.items())[number::3])
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same(whole, load_decoder(folder))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors.*missing"):
        load_decoder(folder)


def test_loading_onto_a_mesh_shards_and_keeps_every_bit(folder):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    sharded = load_decoder(folder, mesh=mesh)
    assert same(load_decoder(folder), sharded)
    assert not sharded.layers.gate[...].sharding.is_fully_replicated


def test_the_hash_depends_on_the_weights(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_decoder(other, load_decoder(folder))
    assert folder_hash(other) == folder_hash(folder)
    save_decoder(other, filled(SMALL, seed=1))
    assert folder_hash(other) != folder_hash(folder)


def break_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack.*model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(surprise=np.zeros(2, np.float32)), "do not belong.*surprise"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(5, np.float32)}),
            r"model.safetensors: tensor model.norm.weight has shape \(5,\), but config.json requires \(16,\)",
        ),
    ],
)
def test_wrong_tensors_are_named_with_both_shapes(folder, change, message):
    break_weights(folder, change)
    with pytest.raises(UserError, match=message):
        load_decoder(folder)


def test_a_tied_head_that_was_stored_anyway_is_ignored(folder):
    whole = load_decoder(folder)
    break_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert same(whole, load_decoder(folder))


def test_a_tied_head_that_differs_is_loaded_as_a_separate_head(folder, caplog):
    # As transformers 5, PreTrainedModel.tie_weights: tensors that are both present with different values are not tied.
    whole = load_decoder(folder)
    rolled = np.roll(np.asarray(whole.embedding), 1, 0)
    break_weights(folder, lambda t: t.update({"lm_head.weight": rolled}))
    loaded = load_decoder(folder)
    assert "tie_word_embeddings=true" in caplog.text and str(folder) in caplog.text
    assert not loaded.config.tie_embeddings
    np.testing.assert_array_equal(loaded.embedding, whole.embedding)
    np.testing.assert_array_equal(loaded.head, rolled.T)
    save_decoder(folder / "again", loaded)
    assert same(loaded, load_decoder(folder / "again"))
    assert json.loads((folder / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    assert same(load_value_model(folder), load_value_model(folder / "again")), "no head is read"


def test_truncated_file_is_named(folder):
    data = (folder / WEIGHTS).read_bytes()
    for size in (len(data) // 2, 4, 0):
        (folder / WEIGHTS).write_bytes(data[:size])
        with pytest.raises(UserError, match=rf"model.safetensors \({size} bytes\) is truncated"):
            load_decoder(folder)


@pytest.mark.parametrize(
    ("config", "template", "message"),
    [
        (
            {"vocab_size": 200},
            "",
            r"policy='.*': the tokenizer has 259 tokens but the model's vocab_size is 200",
        ),
        ({"eos_token_id": 0}, "", r"policy='.*': the tokenizer's eos_token_id is 2 but the model's is 0"),
        ({"eos_token_id": (0, 1)}, "", r"eos_token_id is 2 but the model's is \(0, 1\)"),
        ({}, "", r"policy='.*': the tokenizer has no chat_template"),
        ({"eos_token_id": (0, 2)}, "{{ messages }}", ""),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_weights_are_read(
    tmp_path, config, template, message
):
    tokenizer = train_tokenizer(["some text"], 259)
    tokenizer.chat_template = template
    save_decoder(tmp_path, filled(dataclasses.replace(SMALL, **{"vocab_size": 259, **config})), tokenizer)
    if message:
        (tmp_path / WEIGHTS).unlink()
        with pytest.raises(UserError, match=message):
            load_language_model(tmp_path, "policy")
    else:
        assert load_language_model(tmp_path, "policy")[1].eos_token_id == 2


def test_a_context_that_is_too_long_is_refused_before_the_weights_are_read(tmp_path):
    shape = dataclasses.replace(SMALL, vocab_size=259, max_positions=64)
    save_decoder(tmp_path, filled(shape), train_tokenizer(["some text"], 259))
    assert load_language_model(tmp_path, "reader", chat=False, context=64)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(
        UserError, match=r"reader='.*': a context of 65 tokens .* max_position_embeddings=64; give"
    ):
        load_language_model(tmp_path, "reader", chat=False, context=65)


def test_missing_files_are_named(folder, tmp_path):
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"no model.safetensors"):
        load_decoder(folder)
    with pytest.raises(UserError, match=r"no config.json"):
        load_decoder(tmp_path / "nowhere")
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"only pytorch_model.bin, which is not supported; save it again"):
        load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_decoder(folder)


@pytest.mark.parametrize(
    "read", [load_decoder, load_value_model, load_encoder, lambda at: load_language_model(at, "policy")]
)
def test_an_invalid_config_is_reported_with_its_folder(folder, read):
    train_tokenizer(["some text"], 259).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match=f"{folder.name}: config.json: model_type='mamba' is not"):
        read(folder)


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(UserError, match=r"model.safetensors \(\d+ bytes\) .*git lfs pull"):
        load_decoder(folder)


def test_a_head_with_several_labels_is_refused_as_a_value_head(folder):
    break_weights(folder, lambda t: t.update({"score.weight": np.zeros((3, 16), np.float32)}))
    with pytest.raises(
        UserError, match=r"model.safetensors: tensor score.weight \(3, 16\) has 3 labels.*num_labels=1"
    ):
        load_value_model(folder)


def test_a_model_larger_than_memory_is_refused_before_its_weights_are_read(folder, tmp_path, monkeypatch):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(load_decoder(folder))))
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("nothing may be read"))
    (tmp_path / "limit").mkdir()
    limit_memory(monkeypatch, tmp_path / "limit", size)
    with pytest.raises(
        UserError, match=rf"^{folder} needs .* are available: parameters .*, largest tensor .*bfloat16"
    ):
        load_decoder(folder)
