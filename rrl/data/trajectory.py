"""The record of an episode: token ids with roles and log-probabilities, searches, answer and rewards. Read `Trajectory` first."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.text.chat import opened_thought

PROMPT, POLICY, ENVIRONMENT = 0, 1, 2
"""Roles of a token. Only POLICY tokens were sampled, and only they have a loss."""

NOT_FINITE = "not_finite"
"""End reason of an episode whose next logits were not a distribution: one was NaN or +inf, or all were -inf."""


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
    """Seed of the episode: the same request gives the same trajectory in any batch."""
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
    """(role, text) in order, decoded from the bytes of the ids. Each prompt, each text of the policy and each answer of the
    environment is one segment."""
    searches: list[Search]
    ended: str
    """End reason: "answer", "turn_limit", "context_limit", ...; docs/metrics.md lists all of them."""
    starts: tuple[int, ...] = (0,)
    """Index of the first token of each context. The policy saw only the tokens from the last start on when it wrote a token."""
    cuts: tuple[tuple[int, str], ...] = ()
    """(turn, limit) for each limit that was reached, in order. "turn_tokens" and "context" truncated the policy's text,
    "observation_tokens" truncated the environment's; with "room" the environment's text did not fit into the context. The
    environment decides how the episode continues."""
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
    """The answer of the cross-family reader from the evidence (R-Search, Eq. 4)."""

    @property
    def response(self) -> list[str]:
        """Texts of the policy, one per turn. A text whose prompt ends with an opening `<think>` begins with this tag."""
        return responses(self.segments)

    @property
    def written(self) -> list[str]:
        """Texts of the policy, one per turn, without an opening tag from the prompt."""
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
        """Reward of each token: `turn_rewards` at the last policy token of each turn, or the total at that of the episode.

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
    return [opened_thought(prompt) + text for prompt, (role, text) in zip(before, segments) if role == POLICY]
