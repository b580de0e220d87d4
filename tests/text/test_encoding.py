"""Token ids say what the text says: no space before it, and no control token that it only names."""

import itertools

import numpy as np
import pytest

from rrl.models.tokenizer import load_tokenizer, token_bytes
from rrl.text.encoding import plain_ids, special_name, split_names, template_ids, text_ids
from tests.text.tokenizers import sentence_piece

KINDS = ("legacy", "always", "first", "never")
PARTS = ("<search> the river </search>", "\n<observation>\n", "the answer", " of ", "", "é\n</observation>\n")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("assets/miniwiki-tokenizer")


def said(tokenizer, ids):
    table = token_bytes(tokenizer)
    return b"".join(table[index] for index in ids).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_stream_are_joined_to_the_text_that_was_sent(kind):
    tokenizer = sentence_piece(kind)
    ids = [index for part in PARTS for index in text_ids(tokenizer, part)]
    assert said(tokenizer, ids) == "".join(PARTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_begins_as_the_tokenizer_begins_a_text(kind):
    tokenizer = sentence_piece(kind)
    ids = template_ids(tokenizer, "<s>the river").tolist()
    assert ids == tokenizer.encode("<s>the river", add_special_tokens=False)
    assert said(tokenizer, template_ids(tokenizer, "the river")) == " the river"[kind == "never" :]


def test_a_tokenizer_that_grows_is_looked_at_again():
    tokenizer = sentence_piece("first")
    assert special_name(tokenizer, "a <tool> b") == ""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    assert special_name(tokenizer, "a <tool> b") == "<tool>"
    assert said(tokenizer, plain_ids(tokenizer, "a <tool> b")) == "a <tool> b"
    assert tokenizer.convert_tokens_to_ids("<tool>") in text_ids(tokenizer, "a <tool> b")


NAMED = ("<|im_end|>", "a<|im_start|>user\nb<|im_end|> c", "<<|im_end|><|im_end|>", "<|im_<|im_end|>end|>")


@pytest.mark.parametrize("text", NAMED)
def test_the_name_of_a_special_token_is_text_where_others_wrote_it(tokenizer, text):
    control = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    ids = plain_ids(tokenizer, text)
    assert not np.isin(ids, control).any() and np.isin(text_ids(tokenizer, text), control).any()
    assert said(tokenizer, ids) == text
    marked = split_names(tokenizer, text, "\ufdd0")
    assert template_ids(tokenizer, marked, "\ufdd0").tolist() == ids.tolist()


def test_a_text_that_names_no_special_token_has_the_ids_it_always_had(tokenizer):
    for text in ("", "Who lived in a town?", "<search> x </search>", "<|im", "_end|>"):
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert text_ids(tokenizer, text).tolist() == plain_ids(tokenizer, text).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_text_with_a_dummy_prefix_too(kind):
    tokenizer = sentence_piece(kind)
    parts = list(itertools.chain(PARTS, ["</s>", " <s></s> river"]))
    ids = [index for part in parts for index in plain_ids(tokenizer, part)]
    assert said(tokenizer, ids) == "".join(parts)
    assert not set(tokenizer.all_special_ids) & set(ids)
