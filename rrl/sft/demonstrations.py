"""Demonstrations of a recipe as training examples, tokenised piece by piece exactly as the engine would see them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.passages import Passage
from rrl.errors import at_least
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Recipe, check_tags
from rrl.recipes.catalogue import make_recipe
from rrl.retrieval.retriever import Retriever
from rrl.rollout.protocol import Append, message_ids
from rrl.text.chat import chat_ids, opened_by_template
from rrl.text.encoding import plain_ids, text_ids


@dataclasses.dataclass(frozen=True)
class RecipeDataConfig:
    """What is taught: the recipe, for the card beside the weights."""

    top_k: int = 3
    card_top_k: int = 0
    """Passages of a search with which the policy is to be used, where these are others than its teacher searches for (R2AG's
    shows the first of two, and now and then the second); 0: as many."""
    context: int = 1024
    """Most tokens of a trajectory."""
    recipe: str = "rsearch"
    recipe_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, self, "top_k", "context")
        at_least(0, self, "card_top_k")

    def make(self) -> Recipe:
        """The recipe itself. Raises UserError for an unknown one or a wrong field."""
        return make_recipe(self.recipe, dict(self.recipe_options), dict(self.environment))


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig(RecipeDataConfig):
    """A fixed set of the scripted expert's demonstrations."""

    number: int = 300
    held_out: int = 60
    """Further demonstrations, in worlds of the dev split, for early stopping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "number", "held_out")


def demonstration_examples(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[MiniQuestion],
    retriever: Retriever,
    top_k: int,
) -> list[Example]:
    """What the recipe's scripted expert does on each question, with the real retriever's passages; one example a context.

    Targets are the policy's tokens, the end-of-sequence token among them; prompts and observations are given.
    """
    queries = list(dict.fromkeys(hop.query for item in items for hop in item.plan.hops))
    vectors = retriever.embed(queries) if retriever.needs_embeddings else None
    found = dict(zip(queries, retriever.search(queries, top_k, vectors), strict=True))

    def retrieve(query: str) -> list[Passage]:
        return [hit.passage for hit in found[query]]

    check_tags(recipe, tokenizer)
    encode, encode_body = (functools.partial(ids, tokenizer) for ids in (text_ids, plain_ids))

    examples = []
    for item in items:
        prompt = recipe.prompt(item.question)
        contexts = [[(chat_ids(tokenizer, prompt), False)]]
        thinks = opened_by_template(tokenizer, prompt)
        for segment in recipe.demonstrate(item, retrieve):
            if isinstance(segment, str):
                # A thought that the template has opened is not opened again.
                own = segment.removeprefix("<think>") if thinks and len(contexts[-1]) == 1 else segment
                contexts[-1].append((encode(own), True))
            elif isinstance(segment, Append):
                body, _ = message_ids(segment, encode, recipe.environment.observation_tokens, encode_body)
                contexts[-1].append((body, False))
            else:
                again = segment.prompt
                thinks = not isinstance(again, np.ndarray) and opened_by_template(tokenizer, again)
                contexts.append(
                    [(again if isinstance(again, np.ndarray) else chat_ids(tokenizer, again), False)]
                )
        examples += [_example(pieces, tokenizer.eos_token_id) for pieces in contexts]
    return examples


def _example(pieces: Sequence[tuple[np.ndarray, bool]], end: int) -> Example:
    """A context whose pieces are the policy's own or not; it ends where the policy says so."""
    pieces = [*pieces, (np.array([end], np.int32), True)]
    return Example(
        np.concatenate([ids for ids, _ in pieces]),
        np.concatenate([np.full(len(ids), own) for ids, own in pieces]),
    )
