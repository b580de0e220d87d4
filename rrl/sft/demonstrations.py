"""Demonstrations of a recipe's scripted expert as training examples, tokenised segment by segment as in the rollout engine."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.passages import Passage
from rrl.errors import at_least
from rrl.miniwiki.experts import demonstrate
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Recipe, check_tags
from rrl.recipes.catalogue import make_recipe
from rrl.retrieval.retriever import Retriever
from rrl.rollout.protocol import Append, message_ids
from rrl.text.chat import chat_ids, template_adds_think_tag
from rrl.text.encoding import plain_ids, text_ids


@dataclasses.dataclass(frozen=True)
class RecipeDataConfig:
    """The recipe that the data demonstrates. It is saved with the weights as the recipe card (`rrl_recipe.json`)."""

    top_k: int = 3
    """Passages per search in the demonstrations."""
    card_top_k: int = 0
    """Passages per search for the trained policy, as its recipe card states; 0: `top_k`. R2AG needs both: its expert
    retrieves two passages and shows one of them (mostly the first), but its policy retrieves one."""
    context: int = 1024
    """Largest number of tokens of a trajectory, for the recipe card."""
    recipe: str = "rsearch"
    """Name of the recipe."""
    recipe_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the recipe that differ from their defaults."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the recipe's environment that differ from their defaults."""

    def __post_init__(self) -> None:
        at_least(1, self, "top_k", "context")
        at_least(0, self, "card_top_k")

    def make(self) -> Recipe:
        """Return the recipe. Raises UserError if it is unknown or has a wrong field."""
        return make_recipe(self.recipe, dict(self.recipe_options), dict(self.environment))


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig(RecipeDataConfig):
    """A fixed set of demonstrations of the scripted expert."""

    number: int = 300
    """Training demonstrations."""
    held_out: int = 60
    """Held-out demonstrations, from worlds of the dev split, for early stopping."""

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
    """Let the recipe's scripted expert answer each question with a real retriever; return one example per context.

    A recipe that restarts its prompt (`Restart`) has several contexts per question, others have one.

    The loss is on the policy's tokens, including the end-of-sequence token, and not on prompts and observations.

    Args:
        recipe: recipe whose scripted expert writes the demonstrations.
        tokenizer: tokenizer of the policy.
        items: questions of the built-in world.
        retriever: answers the searches.
        top_k: passages per search.

    Raises:
        UserError: a tag of the recipe contains a special token of the tokenizer.
    """
    queries = list(dict.fromkeys(hop.query for item in items for hop in item.plan.hops))
    vectors = retriever.embed(queries) if retriever.needs_embeddings else None
    hits = dict(zip(queries, retriever.search(queries, top_k, vectors), strict=True))

    def retrieve(query: str) -> list[Passage]:
        return [hit.passage for hit in hits[query]]

    check_tags(recipe, tokenizer)
    # `encode` turns names of special tokens into those tokens; `encode_body` treats them as plain text.
    encode, encode_body = (functools.partial(ids, tokenizer) for ids in (text_ids, plain_ids))

    examples = []
    for item in items:
        prompt = recipe.prompt(item.question)
        contexts = [[(chat_ids(tokenizer, prompt), False)]]
        template_opens_thought = template_adds_think_tag(tokenizer, prompt)
        for segment in demonstrate(recipe, item, retrieve):
            if isinstance(segment, str):
                # If the chat template already opens the thought, the expert does not open it again.
                text = (
                    segment.removeprefix("<think>")
                    if template_opens_thought and len(contexts[-1]) == 1
                    else segment
                )
                contexts[-1].append((encode(text), True))
            elif isinstance(segment, Append):
                body, _ = message_ids(segment, encode, recipe.environment.observation_tokens, encode_body)
                contexts[-1].append((body, False))
            else:
                next_prompt = segment.prompt
                template_opens_thought = not isinstance(next_prompt, np.ndarray) and template_adds_think_tag(
                    tokenizer, next_prompt
                )
                contexts.append(
                    [
                        (
                            next_prompt
                            if isinstance(next_prompt, np.ndarray)
                            else chat_ids(tokenizer, next_prompt),
                            False,
                        )
                    ]
                )
        examples += [_example(segments, tokenizer.eos_token_id) for segments in contexts]
    return examples


def _example(segments: Sequence[tuple[np.ndarray, bool]], end: int) -> Example:
    """Return the example of one context: its segments (token ids, whether the policy wrote them) and the end token."""
    segments = [*segments, (np.array([end], np.int32), True)]
    return Example(
        np.concatenate([ids for ids, _ in segments]),
        np.concatenate([np.full(len(ids), is_policy) for ids, is_policy in segments]),
    )
