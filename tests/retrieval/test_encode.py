"""Tokens and embeddings of texts: widths, special tokens, buckets, threads, the folder on disk."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.models.config import EncoderConfig, Pooling
from rrl.models.encoder import Encoder
from rrl.retrieval.build import build_index
from rrl.retrieval.encode import (
    TextEncoder,
    folder_fingerprint,
    length_batches,
    load_text_encoder,
    make_truncating_tokenizer,
    save_text_encoder,
)
from rrl.retrieval.index import make_retriever, open_index
from rrl.retrieval.settings import TextSettings

WORDS = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "query:",
    "passage:",
    "oslo",
    "rome",
    "rain",
    "sun",
    "of",
    "town",
]


def tokenizer(special: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


def text_encoder(**settings: int) -> TextEncoder:
    config = EncoderConfig(
        len(WORDS), hidden=16, layers=1, heads=2, mlp=16, max_positions=64, type_vocab_size=1
    )
    return TextEncoder(Encoder(config, rngs=nnx.Rngs(0)), tokenizer(), TextSettings(**settings))


PASSAGES = [Passage(str(i), ["oslo", "rome"][i % 2], "rain of town " * i) for i in range(19)]


def test_queries_have_prefix_fixed_width_and_closing_token() -> None:
    tokens = text_encoder(query_tokens=6).tokenize_queries(["oslo", "", "rain rain rain rain rain sun"])
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[1, 4, 6, 2, 0, 0], [1, 4, 2, 0, 0, 0], [1, 4, 8, 8, 8, 2]]


def test_without_special_tokens_a_long_text_is_only_cut() -> None:
    assert make_truncating_tokenizer(tokenizer(special=False))(["oslo rain sun", ""], 2) == ([[6, 8], []], 1)


def test_batches_have_every_row_once_longest_first_with_little_padding() -> None:
    lengths = [0, 1, 16, 17, 32, 33, 50, 50, 65, 81, 97]
    assert [(width, [lengths[row] for row in rows]) for width, rows in length_batches(lengths, 100, 2)] == [
        (100, [97, 81]),
        (80, [65, 50]),
        (56, [50, 33]),
        (32, [32, 17]),
        (16, [16, 1]),
        (16, [0]),
    ]
    widths = {width for length in range(513) for width, _ in length_batches([length], 512, 4)}
    assert len(widths) == 19 and widths > {16, 24, 64, 80, 128, 512}


@pytest.mark.parametrize("batch", [4, 64])
def test_buckets_and_batches_do_not_change_an_embedding(batch: int) -> None:
    encoder = text_encoder(passage_tokens=40)
    together = encoder.embed_passages(PASSAGES, batch)
    alone = np.concatenate([encoder.embed_passages([passage], 1) for passage in PASSAGES])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("devices", [3, 8])
def test_embeddings_on_many_devices_equal_those_on_one(devices: int) -> None:
    one = text_encoder(passage_tokens=40)
    many = dataclasses.replace(one, devices=tuple(jax.devices()[:devices]))
    np.testing.assert_allclose(many.embed_passages(PASSAGES, 4), one.embed_passages(PASSAGES, 4), atol=2e-6)
    np.testing.assert_allclose(many.embed_queries(["oslo"]), one.embed_queries(["oslo"]), atol=2e-6)


def test_long_passages_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    encoder = text_encoder(passage_tokens=12)
    caplog.set_level("INFO")
    embeddings = encoder.embed_passages(PASSAGES)
    assert "of 19 passages truncated to 12 tokens" in caplog.text
    np.testing.assert_allclose(embeddings[16], embeddings[18], atol=2e-6)
    cut = np.array([[1, 5, 6, *[8, 10, 11] * 2, 8, 10, 2]])  # [CLS] passage: oslo rain of town ... [SEP]
    np.testing.assert_allclose(embeddings[16], encoder.encoder.embed(cut, cut != 0)[0], atol=2e-6)


def test_embedding_queries_equals_embedding_their_tokens() -> None:
    encoder = text_encoder(query_tokens=8)
    tokens = encoder.tokenize_queries(["oslo rain", "sun"])
    np.testing.assert_allclose(
        encoder.embed_queries(["oslo rain", "sun"]), encoder.encoder.embed(tokens, tokens != 0), atol=2e-6
    )


def test_tokenizing_is_thread_safe() -> None:
    encoder = text_encoder()
    jobs = [[f"oslo {'rain ' * (i % 7)}", "\ud800 town"] for i in range(400)]
    expected = [encoder.tokenize_queries(job).tolist() for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        assert [tokens.tolist() for tokens in pool.map(encoder.tokenize_queries, jobs)] == expected


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


def test_passages_can_be_embedded_without_titles() -> None:
    encoder = text_encoder(passage_tokens=40)
    alone = dataclasses.replace(encoder, titles=False)
    untitled = [dataclasses.replace(passage, title="") for passage in PASSAGES]
    np.testing.assert_allclose(alone.embed_passages(PASSAGES), encoder.embed_passages(untitled), atol=2e-6)
    assert alone.tokenize_passages(PASSAGES[1:2]) == ([[1, 5, 8, 10, 11, 2]], 0)  # without rome
