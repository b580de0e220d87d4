"""The record of an episode: token ids with roles and log-probabilities, searches, answer and rewards. Read `Trajectory` first."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.text.chat import trailing_think_tag

PROMPT, POLICY, ENVIRONMENT = 0, 1, 2
"""Roles of a token. Only POLICY tokens were sampled, and only they are targets of the loss."""

NOT_FINITE = "not_finite"
"""End reason of an episode whose next-token logits could not be sampled from: one was NaN or +inf, or all were -inf."""


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """A search of the policy."""

    turn: int
    """Index of the turn that requested the search."""
    query: str
    titles: tuple[str, ...] = ()
    """Titles of the returned passages, best first."""
    failed: bool = False
    """True if retrieval raised or timed out; the policy then reads that the search failed."""
    passages: tuple[Passage, ...] = ()
    """The returned passages. Empty for a trajectory read from a file, which stores only titles and ids."""
    ids: tuple[str, ...] = ()
    """Ids of the returned passages in their corpus, parallel to `titles`; empty in older files."""

    @classmethod
    def of(cls, turn: int, query: str, passages: Sequence[Passage] | None) -> "Search":
        """Return the search that returned these passages; None: the search failed."""
        returned = tuple(passages or ())
        titles, ids = tuple(p.title for p in returned), tuple(p.id for p in returned)
        return cls(turn, query, titles, passages is None, returned, ids)


@dataclasses.dataclass(slots=True)
class Trajectory:
    """A finished episode. Its tokens are the sampled ids, never re-encoded text."""

    question: Question
    request: int
    """Sampling seed of the request for this episode. The same seed gives the same trajectory in any batch."""
    group: int
    """Index of the group; the samples of one question share a group."""
    tokens: Int[np.ndarray, "T"]
    roles: Int[np.ndarray, "T"]
    """PROMPT, POLICY or ENVIRONMENT."""
    logps: Float[np.ndarray, "T"]
    """Log-probability of each policy token under the full distribution (temperature 1, no truncation); 0 elsewhere."""
    sampled_logps: Float[np.ndarray, "T"]
    """The same under the distribution that was sampled from; 0 elsewhere."""
    turns: Int[np.ndarray, "T"]
    """Index of the turn of each token. A turn is the policy's tokens and the environment's answer to them."""
    segments: list[tuple[int, str]]
    """(role, text) in order, decoded from the bytes of the tokens. Each prompt, each text of the policy and each answer of the
    environment is one segment."""
    searches: list[Search]
    ended: str
    """End reason: "answer", "turn_limit", "context_limit", ...; docs/metrics.md lists all of them."""
    starts: tuple[int, ...] = (0,)
    """Index in `tokens` of the first token of each context. An environment may restart the episode in a new context; a policy
    token was sampled given only the earlier tokens of its own context."""
    cuts: tuple[tuple[int, str], ...] = ()
    """(turn, limit) for each limit that was reached, in order. The limits:

    - "turn_tokens", "context": the policy's text was truncated;
    - "observation_tokens": the environment's text was truncated;
    - "room": an observation or a prompt did not fit into the context; the environment decided how the episode continued."""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Reward by component, and "total"."""
    turn_rewards: dict[int, float] | None = None
    """Reward of each turn, paid at its last policy token, if the recipe rewards single steps (R3-RAG). None: the total reward is
    paid at the last policy token of the episode."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """em, f1, ... of the final answer."""
    answer: str = ""
    evidence: str = ""
    """The policy's evidence (R-Search); "" if the recipe has none."""
    reader_answer: str = ""
    """Answer that a frozen model of another family gives from the evidence (R-Search's cross-family reader, Eq. 4)."""

    @property
    def response(self) -> list[str]:
        """Complete texts of the policy, one per turn: an opening `<think>` at the end of the prompt belongs to the text."""
        return responses(self.segments)

    @property
    def sampled_texts(self) -> list[str]:
        """Sampled texts of the policy, one per turn, without an opening `<think>` that is part of the prompt."""
        return [text for role, text in self.segments if role == POLICY]

    @property
    def contexts(self) -> list[slice]:
        """Slice of `tokens` for each context."""
        return [slice(*ends) for ends in itertools.pairwise((*self.starts, len(self.tokens)))]

    @property
    def positions(self) -> Int[np.ndarray, "T"]:
        """Position of each token in its context."""
        return np.concatenate([np.arange(part.stop - part.start) for part in self.contexts])

    @property
    def token_rewards(self) -> Float[np.ndarray, "T"]:
        """Reward of each token, 0 for most: each of `turn_rewards` is at the last policy token of its turn.

        If `turn_rewards` is None, the total reward is at the last policy token of the episode.

        Raises ValueError if a turn with a reward has no policy token.
        """
        rewards = np.zeros(len(self.tokens), np.float32)
        policy = np.flatnonzero(self.roles == POLICY)
        if self.turn_rewards is None:
            rewards[policy[-1:]] = self.rewards["total"]
            return rewards
        for turn, reward in self.turn_rewards.items():
            tokens = policy[self.turns[policy] == turn]
            if not len(tokens):
                raise ValueError(
                    f"question {self.question.id!r}: turn {turn} has the reward {reward} but no policy token"
                )
            rewards[tokens[-1]] = reward
        return rewards

    @property
    def policy_tokens(self) -> int:
        """Number of policy tokens."""
        return int((self.roles == POLICY).sum())


def responses(segments: Sequence[tuple[int, str]]) -> list[str]:
    """Return the policy's texts in `segments`, as `Trajectory.response`."""
    before = ["", *(text if role == PROMPT else "" for role, text in segments)]
    return [
        trailing_think_tag(prompt) + text for prompt, (role, text) in zip(before, segments) if role == POLICY
    ]
