"""Demonstrations are what the engine would have recorded: same pieces, same tokens, the policy's own as targets."""

import numpy as np
import pytest

from rrl.data.miniwiki import KINDS, generate
from rrl.data.tokenizer import load_tokenizer
from rrl.recipes.rsearch import RSearch
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.index import make_retriever
from rrl.text.chat import chat_ids
from rrl.train.demonstrations import demonstrations


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_the_experts_words_and_the_end(kind):
    wiki = generate("train", 0, 200)
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    recipe = RSearch(instruction="")
    items = wiki.questions(kind, 5, 0)
    retriever = make_retriever(wiki.passages, "bm25", None, Bm25Config(title_weight=3))
    for item, example in zip(items, demonstrations(recipe, tokenizer, items, retriever, 3), strict=True):
        prompt = chat_ids(tokenizer, item.question.text)
        np.testing.assert_array_equal(example.tokens[: len(prompt)], prompt)
        assert not example.loss[: len(prompt)].any()
        own = tokenizer.decode(example.tokens[example.loss])
        assert own.count("<search>") == len(item.plan.hops)
        assert "<observation>" not in own
        assert f"<answer> {item.question.answers[0]} </answer>" in own
        assert example.tokens[-1] == tokenizer.eos_token_id
        assert example.loss[-1]
        given = tokenizer.decode(example.tokens[~example.loss])
        assert all(hop.sentence in given for hop in item.plan.hops)
