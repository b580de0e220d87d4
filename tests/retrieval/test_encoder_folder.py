"""The folder of a text encoder: its settings, pooling and fingerprint, and errors that name what is missing."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.config import EncoderConfig, Pooling
from rrl.models.encoder import Encoder
from rrl.retrieval.build import build_index
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.encoder_folder import folder_fingerprint, load_text_encoder, save_text_encoder
from rrl.retrieval.index import make_retriever, open_index
from rrl.retrieval.settings import TextSettings
from tests.retrieval.test_encode import PASSAGES, WORDS, text_encoder, tokenizer


def test_a_saved_folder_keeps_its_settings_and_another_encoder_is_rejected(tmp_path: Path) -> None:
    saved = save_text_encoder(tmp_path / "first", text_encoder(query_tokens=9))
    opened = load_text_encoder(tmp_path / "first")
    assert (opened.settings, opened.name, opened.fingerprint) == (saved.settings, "first", saved.fingerprint)
    np.testing.assert_array_equal(opened.embed_passages(PASSAGES), saved.embed_passages(PASSAGES))
    other = save_text_encoder(tmp_path / "second", text_encoder(query_tokens=8))
    build_index(PASSAGES, tmp_path / "index", "scann", saved)
    retriever = open_index(tmp_path / "index", opened)
    assert retriever.encoder is opened.encoder
    in_memory = make_retriever(PASSAGES, "scann", saved)
    queries = ["rome", "oslo town"]
    assert retriever.search(queries, 3, retriever.embed(queries)) == in_memory.search(
        queries, 3, in_memory.embed(queries)
    )
    with pytest.raises(UserError, match=r"built with the encoder 'first' .*, got 'second'"):
        open_index(tmp_path / "index", other)


def test_the_shipped_encoder_has_the_fingerprint_in_its_indexes() -> None:
    fingerprint = folder_fingerprint(Path("assets/miniwiki-encoder"))
    assert fingerprint == "85713baf5accaf7d5536130634ec60edc44432e0b2e540181d6b96b9e006fddd"
    assert load_text_encoder("assets/miniwiki-encoder").fingerprint == fingerprint


def test_pooling_is_saved_and_other_settings_change_the_fingerprint(tmp_path: Path) -> None:
    pooling = Pooling("cls", normalize=False)
    config = EncoderConfig(len(WORDS), hidden=4, layers=1, heads=1, mlp=4, max_positions=64, pooling=pooling)
    encoder = TextEncoder(Encoder(config, rngs=nnx.Rngs(0)), tokenizer(), TextSettings())
    saved = save_text_encoder(tmp_path, encoder)
    opened = load_text_encoder(tmp_path)
    assert (opened.encoder.config, opened.fingerprint) == (config, saved.fingerprint)
    assert load_text_encoder(tmp_path, {}).fingerprint == saved.fingerprint
    other = load_text_encoder(tmp_path, {"pooling": "mean", "query_prefix": ""})
    assert other.settings.query_prefix == ""
    assert other.encoder.config.pooling == Pooling("mean", normalize=False)
    assert other.fingerprint != saved.fingerprint


def test_a_tokenizer_larger_than_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    encoder = text_encoder()
    encoder.tokenizer.add_tokens(["paris"])
    save_text_encoder(tmp_path, encoder)
    with pytest.raises(
        UserError, match=f"encoder='{tmp_path}': the tokenizer has 13 tokens .*vocab_size is 12"
    ):
        load_text_encoder(tmp_path)


def test_the_error_for_a_folder_without_settings_shows_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"encoder=.* is no Hugging Face folder \(no config.json there\)"):
        load_text_encoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no text_encoder.json.*query_prefix, passage_prefix.*family.*e5"):
        load_text_encoder(tmp_path)
    (tmp_path / "text_encoder.json").write_text('{"prefix": "q"}')
    with pytest.raises(UserError, match=r"text_encoder.json: .*prefix.*Allowed"):
        load_text_encoder(tmp_path)
