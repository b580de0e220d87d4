"""Tokens and embeddings of texts: widths, special tokens, buckets, threads, devices."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rrl.data.passages import Passage
from rrl.models.config import EncoderConfig
from rrl.models.encoder import Encoder
from rrl.retrieval.encode import TextEncoder, length_batches, make_truncating_tokenizer
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


def test_passages_can_be_embedded_without_titles() -> None:
    encoder = text_encoder(passage_tokens=40)
    alone = dataclasses.replace(encoder, titles=False)
    untitled = [dataclasses.replace(passage, title="") for passage in PASSAGES]
    np.testing.assert_allclose(alone.embed_passages(PASSAGES), encoder.embed_passages(untitled), atol=2e-6)
    assert alone.tokenize_passages(PASSAGES[1:2]) == ([[1, 5, 8, 10, 11, 2]], 0)  # without rome
