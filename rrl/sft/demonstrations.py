"""Demonstrations of a recipe's scripted expert as training examples, tokenised segment by segment as in the rollout engine."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
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
from rrl.text.chat import Prompt, chat_ids, template_adds_think_tag
from rrl.text.encoding import plain_ids, text_ids


@dataclasses.dataclass(frozen=True)
class RecipeDataConfig:
    """The recipe that the data demonstrates. It is saved with the weights as the recipe card (`rrl_recipe.json`)."""

    top_k: int = 3
    """Passages per search in the demonstrations."""
    card_top_k: int = 0
    """Passages per search for the trained policy, as its recipe card states; 0: `top_k`. R2AG needs both: its expert
    retrieves two passages and shows the first, or sometimes both, but its policy retrieves one."""
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

    @property
    def fingerprint(self) -> str:
        """Optional: identifies data that the other fields do not determine; "" by default."""
        return ""


@dataclasses.dataclass(frozen=True)
class DemonstrationConfig(RecipeDataConfig):
    """A fixed set of demonstrations of the scripted expert."""

    number: int = 300
    """Training demonstrations."""
    held_out: int = 60
    """Held-out demonstrations, from sub-worlds of the dev split, for early stopping."""

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
    examples = []
    for item in items:
        contexts = [_Context(tokenizer, recipe.prompt(item.question))]
        for segment in demonstrate(recipe, item, retrieve):
            if isinstance(segment, str):
                contexts[-1].add_policy_text(segment)
            elif isinstance(segment, Append):
                contexts[-1].add_observation(segment, recipe.environment.observation_tokens)
            else:
                contexts.append(_Context(tokenizer, segment.prompt))
        examples += [context.example() for context in contexts]
    return examples


class _Context:
    """One context of a demonstration: a prompt, then texts of the policy and observations."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt | Int[np.ndarray, "T"]
    ) -> None:
        """`prompt`: a text, a chat prompt, or the token ids of one."""
        self._tokenizer = tokenizer
        if isinstance(prompt, np.ndarray):
            ids, self._template_opens_thought = prompt, False
        else:
            ids = chat_ids(tokenizer, prompt)
            self._template_opens_thought = template_adds_think_tag(tokenizer, prompt)
        self._segments = [(ids, False)]
        """(token ids, whether the policy wrote them)."""

    def add_policy_text(self, text: str) -> None:
        """Add a text of the expert."""
        follows_prompt = len(self._segments) == 1
        if follows_prompt and self._template_opens_thought:
            # The chat template already opens the thought, so the expert does not open it again.
            text = text.removeprefix("<think>")
        self._segments.append((text_ids(self._tokenizer, text), True))

    def add_observation(self, message: Append, observation_tokens: int) -> None:
        """Add a message of the environment. Names of special tokens in its body, such as those in a passage, are plain text."""
        encode, encode_body = (functools.partial(ids, self._tokenizer) for ids in (text_ids, plain_ids))
        ids, _ = message_ids(message, encode, observation_tokens, encode_body)
        self._segments.append((ids, False))

    def example(self) -> Example:
        """Return the example of this context, with the end-of-sequence token at its end."""
        segments = [*self._segments, (np.array([self._tokenizer.eos_token_id], np.int32), True)]
        return Example(
            np.concatenate([ids for ids, _ in segments]),
            np.concatenate([np.full(len(ids), is_policy) for ids, is_policy in segments]),
        )
