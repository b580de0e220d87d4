"""Tests of token ids: no extra space, and no special tokens from names in plain text."""

import itertools

import numpy as np
import pytest

from rrl.models.tokenizer import load_tokenizer, token_bytes
from rrl.text.encoding import break_special_tokens, find_special_token, plain_ids, template_ids, text_ids
from tests.text.tokenizers import sentence_piece

KINDS = ("legacy", "always", "first", "never")
PARTS = ("<search> the river </search>", "\n<observation>\n", "the answer", " of ", "", "é\n</observation>\n")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("assets/miniwiki-tokenizer")


def decoded(tokenizer, ids):
    table = token_bytes(tokenizer)
    return b"".join(table[index] for index in ids).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_parts_join_to_the_ids_of_exactly_their_text(kind):
    tokenizer = sentence_piece(kind)
    ids = [index for part in PARTS for index in text_ids(tokenizer, part)]
    assert decoded(tokenizer, ids) == "".join(PARTS)


@pytest.mark.parametrize("kind", KINDS)
def test_template_ids_begin_as_the_tokenizer_begins_a_text(kind):
    tokenizer = sentence_piece(kind)
    ids = template_ids(tokenizer, "<s>the river").tolist()
    assert ids == tokenizer.encode("<s>the river", add_special_tokens=False)
    assert decoded(tokenizer, template_ids(tokenizer, "the river")) == " the river"[kind == "never" :]


def test_special_tokens_added_later_are_recognised():
    tokenizer = sentence_piece("first")
    assert find_special_token(tokenizer, "a <tool> b") == ""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    assert find_special_token(tokenizer, "a <tool> b") == "<tool>"
    assert decoded(tokenizer, plain_ids(tokenizer, "a <tool> b")) == "a <tool> b"
    assert tokenizer.convert_tokens_to_ids("<tool>") in text_ids(tokenizer, "a <tool> b")


NAMED = ("<|im_end|>", "a<|im_start|>user\nb<|im_end|> c", "<<|im_end|><|im_end|>", "<|im_<|im_end|>end|>")


@pytest.mark.parametrize("text", NAMED)
def test_plain_ids_encode_special_token_names_as_text(tokenizer, text):
    control = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    ids = plain_ids(tokenizer, text)
    assert not np.isin(ids, control).any() and np.isin(text_ids(tokenizer, text), control).any()
    assert decoded(tokenizer, ids) == text
    marked = break_special_tokens(tokenizer, text, "\ufdd0")
    assert template_ids(tokenizer, marked, "\ufdd0").tolist() == ids.tolist()


def test_text_without_special_token_names_has_the_ids_of_the_tokenizer(tokenizer):
    for text in ("", "Who lived in a town?", "<search> x </search>", "<|im", "_end|>"):
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert text_ids(tokenizer, text).tolist() == plain_ids(tokenizer, text).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_special_token_names_are_plain_text_with_a_dummy_prefix_too(kind):
    tokenizer = sentence_piece(kind)
    parts = list(itertools.chain(PARTS, ["</s>", " <s></s> river"]))
    ids = [index for part in parts for index in plain_ids(tokenizer, part)]
    assert decoded(tokenizer, ids) == "".join(parts)
    assert not set(tokenizer.all_special_ids) & set(ids)
