"""Environments: where a turn of the policy ends, what the environment returns then, and when an episode ends.

Read `Environment` first, then `Stream`, the environment of most recipes.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage, render
from rrl.data.questions import Question, as_prompted
from rrl.data.trajectory import Search
from rrl.errors import UserError, integer_at_least, one_of
from rrl.text.chat import Prompt
from rrl.text.spans import MARKER, Tag, markers, tag_contents

EOS, TURN_TOKENS, CONTEXT = "<eos>", "<turn tokens>", "<context>"
"""The `stop` of a turn that did not end at a stop string: the end-of-sequence token, the turn's token limit,
or the end of the context."""


def check_stops(stops: object, whose: str) -> None:
    """Check a set of stop strings.

    Args:
      stops: the value to check.
      whose: what the error message calls the field, such as "generate.stops".

    Raises:
      UserError: `stops` is not a tuple of strings, or contains EOS, TURN_TOKENS or CONTEXT.
    """
    if not isinstance(stops, tuple) or not all(isinstance(string, str) for string in stops):
        raise UserError(f"{whose}: {stops!r} must be a tuple of strings, such as ('.',)")
    for string in (EOS, TURN_TOKENS, CONTEXT):
        if string in stops:
            raise UserError(f"{whose}: {string!r} is reserved; choose another stop string")


@dataclasses.dataclass(slots=True)
class Episode:
    """The part of an episode that an environment sees when a turn has ended."""

    question: Question
    """As prompts show it (`as_prompted`): its text includes the choices, so that each new context shows them too."""
    turn: int = 0
    """Index of the current turn, from 0. Each message or restart of the environment begins the next turn."""
    searches: list[Search] = dataclasses.field(default_factory=list)
    policy_texts: list[str] = dataclasses.field(default_factory=list)
    """Text that the policy wrote in each turn; the current turn is last."""

    def __post_init__(self) -> None:
        self.question = as_prompted(self.question)


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFor:
    """Result of a step: retrieve passages. `Environment.observe` then receives them and returns the observation."""

    query: str
    parallel_queries: tuple[str, ...] = ()
    """Further queries of the same turn. All are searched at the same time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Result of a step: append an observation to the context. Only `body` is cut to `Environment.observation_tokens`."""

    prefix: str = ""
    body: str = ""
    suffix: str = ""
    max_tokens: int | None = None
    """Maximum tokens of prefix, body and suffix together. The body is cut further to meet it."""
    reserve_tokens: int = 1
    """Tokens of the context that must remain for the policy after the message. A message that leaves fewer does not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restart:
    """Result of a step: an observation that replaces the context by a new prompt, as R3-RAG does after each step.

    A prompt that does not fit the context goes to `Environment.overflow`."""

    prompt: str | Prompt | Int[np.ndarray, "T"]
    """The new prompt. A string is the user's message in the chat template; token ids are used unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Result of a step: the episode ends."""

    reason: str
    """Becomes `Trajectory.ended`."""


StepResult = SearchFor | Append | Restart | Finish


class Environment(Protocol):
    """The protocol between a policy and its tools.

    In the terms of reinforcement learning: the state is an `Episode`, an action is the text that the policy writes in a turn,
    and `step` returns the next observation or the end of the episode. The first observation is the recipe's prompt
    (`rrl.recipes.base.Recipe.prompt`). One environment serves all episodes: its methods depend on their arguments only.
    An environment of a recipe extends this class, which has the defaults of optional members.
    """

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which a turn of the policy ends. It also ends at the end-of-sequence token."""

    @property
    def turn_tokens(self) -> int:
        """Maximum tokens that the policy may write in a turn."""

    @property
    def observation_tokens(self) -> int:
        """Maximum tokens of an observation's body."""

    @property
    def tags(self) -> tuple[Tag, ...]:
        """Optional: tags that the environment reads or writes. `rrl.recipes.base.check_tags` refuses a tokenizer that would hide
        one in text."""
        return ()

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        """Return the result of a turn. `text` is what the policy wrote in it; `stop` is a stop string, EOS, TURN_TOKENS or
        CONTEXT."""

    def observe(self, episode: Episode, passages: Sequence[Passage] | None, /) -> StepResult:
        """Return the observation of a search, or the end. `passages` is None if the search failed.

        With parallel queries there is one such argument per query, in order."""

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        """Return another result in place of `message`, which does not fit the context.

        For an Append, `room` is the number of free tokens in the context; the message must leave `reserve_tokens` of them. For
        a Restart, `room` is the maximum length of the prompt. If the returned message does not fit either, the episode ends as
        "context_limit"."""


def message_ids(
    message: Append,
    encode: Callable[[str], Int[np.ndarray, "T"]],
    body_tokens: int,
    encode_body: Callable[[str], Int[np.ndarray, "T"]] | None = None,
) -> tuple[Int[np.ndarray, "T"], bool]:
    """Encode an environment's message.

    Args:
      message: its body is cut to `body_tokens` tokens; prefix and suffix are never cut.
      encode: encodes prefix and suffix.
      body_tokens: maximum tokens of the body.
      encode_body: encodes the body, in which names of special tokens are ordinary text (`plain_ids`). None: `encode`.

    Returns:
      (token ids, whether the body was cut).
    """
    prefix, suffix = encode(message.prefix), encode(message.suffix)
    body = (encode_body or encode)(message.body)
    if message.max_tokens is not None:
        body_tokens = min(body_tokens, max(0, message.max_tokens - len(prefix) - len(suffix)))
    return np.concatenate([prefix, body[:body_tokens], suffix]), len(body) > body_tokens


@dataclasses.dataclass(frozen=True)
class Stream(Environment):
    """Reasoning and search as one stream of text in one context, without restarts (R-Search, TIRESRAG-R1, Search-R1, ReSearch).

    A turn ends at `</search>`, and the environment appends an observation. After `max_searches` turns there is one last
    turn without search. After a turn that neither searches nor answers, the environment appends `correction`, which costs a
    turn; if `correction` is empty, the episode ends. A tag is a name (`<name>`, `</name>`) or a pair of other markers.
    """

    search: Tag = "search"
    observation: Tag = "observation"
    answer: Tag = "answer"
    stop_at_answer: bool = False
    """Whether a turn also ends at the answer's closing tag, so that nothing follows an answer (Search-R1)."""
    max_searches: int = 4
    """Number of turns in which the policy may search. A turn that ends with a correction counts too."""
    turn_tokens: int = 500
    observation_tokens: int = 1800
    correction: str = (
        "My action is not correct. To search, I write the query between {search}. "
        "To answer, I write the answer between {answer}."
    )
    """The message after a malformed turn. `{search}` and `{answer}` are replaced by the markers of these tags."""
    failure: str = "The search failed."
    """The observation after a failed search."""
    when_full: str = "end"
    """What happens to an observation that does not fit the context. "end": the episode ends if no token would remain for the
    policy. "cut": the observation is cut so that one whole turn still fits; the episode ends if the tags alone leave no room
    for it."""

    def __post_init__(self) -> None:
        one_of(("end", "cut"), self, "when_full", where="environment.")
        integer_at_least(0, self, "max_searches", where="environment.")
        integer_at_least(1, self, "turn_tokens", "observation_tokens", where="environment.")
        used: list[str] = []
        for field in ("search", "observation", "answer"):
            tag = getattr(self, field)
            if isinstance(tag, list):  # JSON has no tuples
                object.__setattr__(self, field, tag := tuple(tag))
            if not _is_tag(tag) or set(markers(tag)) & set(used):
                raise UserError(
                    f"environment.{field}={tag!r} must be a tag's name (letters, digits and underscores) or the pair of its "
                    "markers, such as ('<|begin_of_query|>', '<|end_of_query|>'); search, observation and answer must differ"
                )
            used += markers(tag)

    @property
    def stops(self) -> tuple[str, ...]:
        closing = markers(self.search)[1]
        return (closing, markers(self.answer)[1]) if self.stop_at_answer else (closing,)

    @property
    def tags(self) -> tuple[Tag, ...]:
        return self.search, self.observation, self.answer

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        last = episode.turn >= self.max_searches
        if stop == self.stops[0]:
            queries = tag_contents(text, self.search)
            if queries and queries[-1].strip():
                return Finish("search_limit") if last else SearchFor(queries[-1].strip())
        elif tag_contents(text, self.answer):
            return Finish("answer")
        if stop == CONTEXT:
            return Finish("context_limit")
        if last or not self.correction:
            if stop == TURN_TOKENS:
                return Finish("length")
            return Finish("turn_limit" if last else "no_action")
        tags = {"search": " and ".join(markers(self.search)), "answer": " and ".join(markers(self.answer))}
        return Append(prefix="\n" + self.correction.format(**tags) + "\n")

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Append:
        body = self.failure if passages is None else render(passages)
        opening, closing = markers(self.observation)
        reserve_tokens = self.turn_tokens if self.when_full == "cut" else 1
        return Append(f"\n{opening}\n", body, f"\n{closing}\n", reserve_tokens=reserve_tokens)

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        max_tokens = room - self.turn_tokens
        if isinstance(message, Restart) or self.when_full == "end" or max_tokens <= 0:
            return Finish("context_limit")
        return dataclasses.replace(message, max_tokens=max_tokens)


def _is_tag(tag: object) -> bool:
    if isinstance(tag, str):
        return re.fullmatch(r"\w+", tag) is not None
    pair = tag if isinstance(tag, tuple) and len(tag) == 2 else ()
    return len(set(pair)) == 2 and all(isinstance(part, str) and MARKER.fullmatch(part) for part in pair)


@dataclasses.dataclass(frozen=True)
class SingleTurn(Environment):
    """One prompt and one output: for readers, judges and closed-book generation."""

    turn_tokens: int = 64
    observation_tokens: int = 0

    def __post_init__(self) -> None:
        integer_at_least(1, self, "turn_tokens", where="environment.")
        integer_at_least(0, self, "observation_tokens", where="environment.")

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        return Finish({EOS: "answer", CONTEXT: "context_limit"}.get(stop, "length"))

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Append:
        raise NotImplementedError("a single-turn environment never searches")

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        raise NotImplementedError("a single-turn environment never appends a message")
