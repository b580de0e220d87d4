"""What an environment is: the prompt, where the policy pauses, what it is answered, and when the episode ends."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage, render
from rrl.data.questions import Question
from rrl.data.trajectory import Search
from rrl.errors import UserError, integer_at_least, one_of
from rrl.text.chat import Prompt
from rrl.text.spans import MARKER, Tag, boxes, markers

EOS, TURN_TOKENS, CONTEXT = "<eos>", "<turn tokens>", "<context>"
"""Why a turn paused, when it was not one of the protocol's stop strings."""


def check_stops(stops: object, whose: str) -> None:
    """Raises UserError for what is no tuple of texts, or has EOS, TURN_TOKENS or CONTEXT; `whose` it is says the error."""
    if not isinstance(stops, tuple) or not all(isinstance(string, str) for string in stops):
        raise UserError(f"{whose}: {stops!r} must be a tuple of texts, such as ('.',)")
    for string in (EOS, TURN_TOKENS, CONTEXT):
        if string in stops:
            raise UserError(f"{whose}: {string!r} stands for a pause at no stop string; choose another")


@dataclasses.dataclass(slots=True)
class Episode:
    """What an environment may look at when a turn has paused."""

    question: Question
    turn: int = 0
    """Index of the current turn; every answer of the environment opens the next one."""
    searches: list[Search] = dataclasses.field(default_factory=list)
    policy_texts: list[str] = dataclasses.field(default_factory=list)
    """What the policy wrote in each turn, the current one last."""


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFor:
    """Action: retrieve passages, then do what `Environment.observe(...)` says."""

    query: str
    parallel_queries: tuple[str, ...] = ()
    """Further queries, searched side by side with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Action: append a message of the environment; only `body` is cut to the observation budget."""

    prefix: str = ""
    body: str = ""
    suffix: str = ""
    max_tokens: int | None = None
    """Most tokens of the three together, for which the body is cut further."""
    reserve_tokens: int = 1
    """How many tokens of the context the policy is to have after it; a message that leaves fewer does not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restart:
    """Action: the context is cleared and the policy is asked anew; the episode goes on (R3-RAG's steps). One that does not fit
    the context goes to `Environment.overflow`."""

    prompt: str | Prompt | Int[np.ndarray, "T"]
    """What opens the new context (a text: the user's turn of the chat template), or token ids as they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Action: the episode is over, and why."""

    reason: str


Action = SearchFor | Append | Restart | Finish


class Environment(Protocol):
    """One protocol between a policy and its tools."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which the policy must pause (the end-of-sequence token always pauses)."""

    @property
    def turn_tokens(self) -> int:
        """Most tokens the policy may write in a turn."""

    @property
    def observation_tokens(self) -> int:
        """Most tokens of an observation's body."""

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        """Answers a paused turn whose text is `text`; `stop` is a stop string, EOS, TURN_TOKENS or CONTEXT."""

    def observe(self, episode: Episode, passages: Sequence[Passage] | None, /) -> Action:
        """Answers a search; `passages` is None when it failed. Of queries side by side each has its own, in their order."""

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        """Answers in place of `message`, which does not fit: the context has room for `room` tokens, of which an Append leaves
        the policy some. What does not fit either ends the episode as "context_limit"."""


def message_ids(
    message: Append,
    encode: Callable[[str], Int[np.ndarray, "T"]],
    body_tokens: int,
    encode_body: Callable[[str], Int[np.ndarray, "T"]] | None = None,
) -> tuple[Int[np.ndarray, "T"], bool]:
    """Token ids of an environment's message, and whether its body was cut: to `body_tokens`, so that what closes it survives.

    `encode_body` encodes the body, which holds what others wrote (`plain_ids`); None: `encode` does.
    """
    prefix, suffix = encode(message.prefix), encode(message.suffix)
    body = (encode_body or encode)(message.body)
    if message.max_tokens is not None:
        body_tokens = min(body_tokens, max(0, message.max_tokens - len(prefix) - len(suffix)))
    return np.concatenate([prefix, body[:body_tokens], suffix]), len(body) > body_tokens


@dataclasses.dataclass(frozen=True)
class Stream:
    """Reasoning and search in one growing context (R-Search, TIRESRAG-R1, Search-R1, ReSearch ...).

    The policy pauses at `</search>`; the environment appends an observation. After `max_searches` turns one last turn
    runs with search off. A turn that neither searches nor answers gets `correction`, which costs a turn; without
    one it ends the episode. A tag is its name, or the pair of its markers where these are not `<name>` and `</name>`.
    """

    search: Tag = "search"
    observation: Tag = "observation"
    answer: Tag = "answer"
    stop_at_answer: bool = False
    """Whether a turn ends at the answer's closing tag too: nothing is written after an answer (Search-R1)."""
    max_searches: int = 4
    turn_tokens: int = 500
    observation_tokens: int = 1800
    correction: str = (
        "My action is not correct. To search, I write the query between {search}. "
        "To answer, I write the answer between {answer}."
    )
    """The markers of the two tags are filled in."""
    failure: str = "The search failed."
    when_full: str = "end"
    """What an observation does that does not fit the context: "end" (the policy would have no token left) ends the episode,
    "cut" shortens it so that one whole turn still fits, and ends the episode where its tags alone leave no room for one."""

    def __post_init__(self) -> None:
        one_of(("end", "cut"), self, "when_full", where="environment.")
        integer_at_least(0, self, "max_searches", where="environment.")
        integer_at_least(1, self, "turn_tokens", "observation_tokens", where="environment.")
        written: list[str] = []
        for field in ("search", "observation", "answer"):
            tag = getattr(self, field)
            if isinstance(tag, list):  # as JSON has it
                object.__setattr__(self, field, tag := tuple(tag))
            if not _is_tag(tag) or set(markers(tag)) & set(written):
                raise UserError(
                    f"environment.{field}={tag!r} must be a tag's name (letters, digits and underscores) or the pair of its "
                    "markers, such as ('<|begin_of_query|>', '<|end_of_query|>'), and unlike the other two of search, "
                    "observation and answer"
                )
            written += markers(tag)

    @property
    def stops(self) -> tuple[str, ...]:
        closing = markers(self.search)[1]
        return (closing, markers(self.answer)[1]) if self.stop_at_answer else (closing,)

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        last = episode.turn >= self.max_searches
        if stop == self.stops[0]:
            queries = boxes(text, self.search)
            if queries and queries[-1].strip():
                return Finish("search_limit") if last else SearchFor(queries[-1].strip())
        elif boxes(text, self.answer):
            return Finish("answer")
        if stop == CONTEXT:
            return Finish("context_limit")
        if last or not self.correction:
            if stop == TURN_TOKENS:
                return Finish("length")
            return Finish("turn_limit" if last else "no_action")
        said = {"search": " and ".join(markers(self.search)), "answer": " and ".join(markers(self.answer))}
        return Append(prefix="\n" + self.correction.format(**said) + "\n")

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Append:
        body = self.failure if passages is None else render(passages)
        opening, closing = markers(self.observation)
        leaves = self.turn_tokens if self.when_full == "cut" else 1
        return Append(f"\n{opening}\n", body, f"\n{closing}\n", reserve_tokens=leaves)

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        most = room - self.turn_tokens
        if isinstance(message, Restart) or self.when_full == "end" or most <= 0:
            return Finish("context_limit")
        return dataclasses.replace(message, max_tokens=most)


def _is_tag(tag: object) -> bool:
    if isinstance(tag, str):
        return re.fullmatch(r"\w+", tag) is not None
    pair = tag if isinstance(tag, tuple) and len(tag) == 2 else ()
    return len(set(pair)) == 2 and all(isinstance(part, str) and MARKER.fullmatch(part) for part in pair)


@dataclasses.dataclass(frozen=True)
class SingleTurn:
    """One prompt, one output: readers, judges and closed-book generation."""

    turn_tokens: int = 64
    observation_tokens: int = 0

    def __post_init__(self) -> None:
        integer_at_least(1, self, "turn_tokens", where="environment.")
        integer_at_least(0, self, "observation_tokens", where="environment.")

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        return Finish({EOS: "answer", CONTEXT: "context_limit"}.get(stop, "length"))

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Append:
        raise NotImplementedError("a single-turn environment never searches")

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        raise NotImplementedError("a single-turn environment never answers")
