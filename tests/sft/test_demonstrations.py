"""Examples from demonstrations have the engine's tokens, with the loss on the policy's tokens only."""

import numpy as np
import pytest

from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.models.tokenizer import load_tokenizer
from rrl.recipes.rsearch import RSearch
from rrl.recipes.search_r1 import SearchR1
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.index import make_retriever
from rrl.rollout.protocol import Append, Restart
from rrl.sft.demonstrations import demonstration_examples
from rrl.text.chat import chat_ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_on_the_expert_text_and_the_end_token(kind):
    wiki = generate("train", 0, 200)
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    recipe = RSearch(instruction="")
    items = wiki.questions(kind, 5, 0)
    retriever = make_retriever(wiki.passages, "bm25", None, Bm25Config(title_weight=3))
    for item, example in zip(
        items, demonstration_examples(recipe, tokenizer, items, retriever, 3), strict=True
    ):
        prompt = chat_ids(tokenizer, item.question.text)
        np.testing.assert_array_equal(example.tokens[: len(prompt)], prompt)
        assert not example.loss_mask[: len(prompt)].any()
        targets = tokenizer.decode(example.tokens[example.loss_mask])
        assert targets.count("<search>") == len(item.plan.hops)
        assert "<observation>" not in targets
        assert f"<answer> {item.question.answers[0]} </answer>" in targets
        assert example.tokens[-1] == tokenizer.eos_token_id
        assert example.loss_mask[-1]
        given = tokenizer.decode(example.tokens[~example.loss_mask])
        assert all(hop.sentence in given for hop in item.plan.hops)


def test_each_context_of_a_demonstration_becomes_an_example_with_an_end_token():
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    wiki = generate("train", 0, 200)

    class Own(RSearch):
        """A recipe with an expert of its own."""

    @demonstrate.register
    def _(recipe: Own, item, retrieve):
        return ["first", Append(" seen "), "more", Restart("asked again"), "second"]

    items = wiki.questions("one_hop", 2, 0)
    retriever = make_retriever(wiki.passages, "bm25")
    examples = demonstration_examples(Own(instruction=""), tokenizer, items, retriever, 3)
    assert len(examples) == 4
    targets = [tokenizer.decode(e.tokens[e.loss_mask], skip_special_tokens=True) for e in examples]
    assert targets == ["firstmore", "second"] * 2
    assert all(e.tokens[-1] == tokenizer.eos_token_id and e.loss_mask[-1] for e in examples)
    given = chat_ids(tokenizer, "asked again")
    np.testing.assert_array_equal(examples[1].tokens[: len(given)], given)
    assert not examples[1].loss_mask[: len(given)].any()


def test_a_thought_that_the_chat_template_opens_is_not_opened_again():
    wiki = generate("train", 0, 200)
    items = wiki.questions("one_hop", 2, 0)
    retriever = make_retriever(wiki.passages, "bm25")
    plain, opening = (load_tokenizer("assets/miniwiki-tokenizer") for _ in range(2))
    opening.chat_template = plain.chat_template.replace("assistant\n'", "assistant\n<think>\n'")
    for recipe in (SearchR1(instruction=""), RSearch(instruction="")):
        usual = demonstration_examples(recipe, plain, items, retriever, 3)
        opened = demonstration_examples(recipe, opening, items, retriever, 3)
        for one, other in zip(usual, opened, strict=True):
            text = plain.decode(one.tokens)
            where = text.index("assistant\n") + len("assistant\n")
            said = text[where:].removeprefix("<think>")
            assert plain.decode(other.tokens) == f"{text[:where]}<think>\n{said}"
            assert plain.decode(other.tokens[other.loss_mask]) == plain.decode(
                one.tokens[one.loss_mask]
            ).removeprefix("<think>")
