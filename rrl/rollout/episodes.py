"""Requests, and the state of an episode in flight: its request and all tokens so far."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.errors import UserError, at_least, at_most, integer_at_least
from rrl.rollout.protocol import Episode, check_stops

MAX_TEMPERATURE = float(np.finfo(np.float32).max)
"""The largest float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One episode to run. Raises UserError for an invalid field."""

    question: Question
    prompt: Int[np.ndarray, "T"]
    """Token ids of the prompt."""
    seed: int
    """Folded into the sampling key. The same seed gives the same trajectory. At most 2**31 - 1."""
    group: int = 0
    """Samples of one prompt share a group."""
    temperature: float = 1.0
    """0 is greedy."""
    turn_tokens: int = 0
    """Maximum tokens of a turn, at most the environment's. 0: the environment's."""
    stops: tuple[str, ...] | None = None
    """Strings at which its turns end. None: the environment's."""

    def __post_init__(self) -> None:
        integer_at_least(0, self, "seed", "group", "turn_tokens", where="request.")
        at_most(2**31 - 1, self, "seed", where="request.")
        at_least(0, self, "temperature", where="request.")
        at_most(MAX_TEMPERATURE, self, "temperature", where="request.")
        check_token_array(self.prompt, f"the prompt of question {self.question.id!r}")
        if self.stops is not None:
            check_stops(self.stops, f"request.stops of question {self.question.id!r}")


def check_token_array(tokens: object, name: str) -> None:
    """Raise UserError unless `tokens` is a non-empty 1-D array of integers. The error message calls it `name`."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # a ragged list
        raise UserError(
            f"{name} must be a 1-D array of token ids, found sequences of several lengths; make one request for each"
        ) from None
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        found = f"{ids.dtype} of shape {ids.shape}" if ids.ndim else type(tokens).__name__
        raise UserError(
            f"{name} must be a 1-D array of token ids, found {found}; rrl.text.chat.chat_ids encodes a text"
        )
    if not ids.size:
        raise UserError(f"{name} is empty: give at least one token")


def check_tokens(tokens: Int[np.ndarray, "T"], vocab_size: int, name: str) -> None:
    """Raise UserError as `check_token_array` does, and for a token id outside the model's vocabulary."""
    check_token_array(tokens, name)
    if wrong := [int(token) for token in (np.min(tokens), np.max(tokens)) if not 0 <= token < vocab_size]:
        raise UserError(f"{name} has token {wrong[0]}; the model's token ids are 0 to {vocab_size - 1}")


class EpisodeState:
    """State of one episode in flight.

    A context is the token sequence that the policy sees. Each restart begins a new context; all contexts are stored one after
    the other in the arrays of one trajectory.
    """

    def __init__(self, request: Request, text: str) -> None:
        """`text` is the decoded prompt of `request`."""
        self.request = request
        self.episode = Episode(request.question)
        self.starts: list[int] = []
        """Index of the first token of each context."""
        self.cuts: list[tuple[int, str]] = []
        """(turn index, name of the limit) of each token limit that was reached, such as "turn_tokens"; see `Trajectory.cuts`."""
        self.length = 0
        """Tokens of all contexts."""
        self._ids: list[np.ndarray] = []
        self._roles: list[np.ndarray] = []
        self._logps: list[np.ndarray] = []
        self._sampled_logps: list[np.ndarray] = []
        self._turns: list[np.ndarray] = []
        self._segments: list[tuple[int, str]] = []
        self._start_context(request.prompt, text)

    @property
    def context_length(self) -> int:
        """Tokens of the current context."""
        return self.length - self.starts[-1]

    @property
    def last_token(self) -> Int[np.ndarray, "1"]:
        """The last token. Messages without tokens are skipped."""
        return next(ids for ids in reversed(self._ids) if len(ids))[-1:]

    def _start_context(self, prompt: Int[np.ndarray, "T"], text: str) -> None:
        self.starts.append(self.length)
        self._add(prompt, PROMPT, text, None, None)

    def hit_limit(self, limit: str) -> None:
        """Record that the current turn reached a limit (see `Trajectory.cuts`)."""
        self.cuts.append((self.episode.turn, limit))

    def add_policy_turn(
        self,
        ids: Int[np.ndarray, "T"],
        text: str,
        logps: Float[np.ndarray, "T"],
        sampled_logps: Float[np.ndarray, "T"],
    ) -> None:
        """Add the tokens that the policy wrote in the current turn."""
        self._add(ids, POLICY, text, logps, sampled_logps)

    def add_observation(self, ids: Int[np.ndarray, "T"], text: str) -> None:
        """Add a message of the environment and begin the next turn."""
        self._add(ids, ENVIRONMENT, text, None, None)
        self.episode.turn += 1

    def restart(self, prompt: Int[np.ndarray, "T"], text: str) -> None:
        """Begin a new context with `prompt`, and the next turn."""
        self.episode.turn += 1
        self._start_context(prompt, text)

    def _add(
        self,
        ids: np.ndarray,
        role: int,
        text: str,
        logps: np.ndarray | None,
        sampled_logps: np.ndarray | None,
    ) -> None:
        """Add a segment of the current turn. If `logps` or `sampled_logps` is None, its values are 0."""
        zeros = np.zeros(len(ids), np.float32)
        self._ids.append(np.asarray(ids, np.int32))
        self._roles.append(np.full(len(ids), role, np.int8))
        self._logps.append(zeros if logps is None else logps)
        self._sampled_logps.append(zeros if sampled_logps is None else sampled_logps)
        self._turns.append(np.full(len(ids), self.episode.turn, np.int16))
        # A turn of special tokens has no text, but its segment separates two messages of the environment.
        if len(ids) or text:
            self._segments.append((role, text))
        self.length += len(ids)

    def trajectory(self, ended: str) -> Trajectory:
        """Return the finished trajectory; `ended` is the reason of its end."""

        def joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate(parts).astype(dtype, copy=False)

        return Trajectory(
            question=self.request.question,
            request=self.request.seed,
            group=self.request.group,
            tokens=joined(self._ids, np.int32),
            roles=joined(self._roles, np.int8),
            logps=joined(self._logps, np.float32),
            sampled_logps=joined(self._sampled_logps, np.float32),
            turns=joined(self._turns, np.int16),
            segments=self._segments,
            searches=list(self.episode.searches),
            ended=ended,
            starts=tuple(self.starts),
            cuts=tuple(self.cuts),
        )
