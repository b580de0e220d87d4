"""Tests of model families: what counts as the same one."""

import pytest

from rrl.miniwiki import generate
from rrl.models.config import DecoderConfig
from rrl.models.hf import save_decoder
from rrl.models.lineage import same_family
from rrl.models.tokenizer import train_tokenizer
from tests.models.small import filled

TEXTS = [passage.text for passage in generate("train", 0, 50).passages]


def folder(path, texts, model_type="qwen2", layers=1):
    tokenizer = train_tokenizer(texts, 700)
    shape = DecoderConfig(
        len(tokenizer),
        16,
        layers,
        2,
        2,
        8,
        16,
        model_type,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    save_decoder(path, filled(shape), tokenizer)
    return path


@pytest.fixture
def first(tmp_path):
    return folder(tmp_path / "first", TEXTS)


def test_releases_and_sizes_of_one_lineage_with_one_vocabulary_are_one_family(first, tmp_path):
    again = folder(tmp_path / "again", TEXTS, "qwen3", layers=2)
    assert same_family(first, first) and same_family(first, again)


def test_another_lineage_or_vocabulary_is_another_family(first, tmp_path):
    llama = folder(tmp_path / "llama", TEXTS, "llama")
    other = folder(tmp_path / "other", [text[::-1] for text in TEXTS])
    assert not same_family(first, llama) and not same_family(first, other)
