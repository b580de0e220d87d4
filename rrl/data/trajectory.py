"""What one episode leaves behind: token ids, a role for each, and what the environment did."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.text.chat import opened_thought

PROMPT, POLICY, ENVIRONMENT = 0, 1, 2
"""Roles of a token. Only POLICY tokens were sampled; only they carry loss."""

NOT_FINITE = "not_finite"
"""How an episode ended whose next logits were no distribution: one was NaN or +inf, or all were -inf."""


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """One search that the policy made."""

    turn: int
    """Index of the turn that asked."""
    query: str
    titles: tuple[str, ...] = ()
    """Titles of the passages that were returned, best first."""
    failed: bool = False
    """True when retrieval raised or timed out; the policy was told so."""
    passages: tuple[Passage, ...] = ()
    """The passages themselves, where they are still there: a file of trajectories has only their titles and ids."""
    ids: tuple[str, ...] = ()
    """Ids of these passages in their corpus, beside the titles; empty in older files."""

    @classmethod
    def of(cls, turn: int, query: str, passages: Sequence[Passage] | None) -> "Search":
        """A search that returned these passages; None: it failed."""
        found = tuple(passages or ())
        titles, ids = tuple(p.title for p in found), tuple(p.id for p in found)
        return cls(turn, query, titles, passages is None, found, ids)


@dataclasses.dataclass(slots=True)
class Trajectory:
    """A finished episode; tokens are the sampled ids themselves, never re-encoded text."""

    question: Question
    request: int
    """Seed of the episode: the same request gives the same trajectory whatever else is in the batch."""
    group: int
    """Samples of one question share a group."""
    tokens: Int[np.ndarray, "T"]
    roles: Int[np.ndarray, "T"]
    """PROMPT, POLICY or ENVIRONMENT."""
    logps: Float[np.ndarray, "T"]
    """Log-probability of each policy token under the full distribution (temperature 1, no truncation); 0 elsewhere."""
    sampled_logps: Float[np.ndarray, "T"]
    """The same under the distribution that was sampled from."""
    turns: Int[np.ndarray, "T"]
    """Index of the turn each token belongs to; a turn is policy tokens and the environment's answer to them."""
    segments: list[tuple[int, str]]
    """(role, text) in order, what is said at a time by itself; decoded from the bytes of the ids."""
    searches: list[Search]
    ended: str
    """Why the episode ended: "answer", "turn_limit", "context_limit", ...; docs/metrics.md names all and what they mean."""
    starts: tuple[int, ...] = (0,)
    """Where each context begins: what the policy saw when it wrote a token is what lies between the last start and it."""
    cuts: tuple[tuple[int, str], ...] = ()
    """Limits that were met, each with its turn, in order: "turn_tokens" or "context", where the policy's text broke off;
    "observation_tokens", where the environment's was cut; "room", where it did not fit the context. What followed, a cut, another
    turn or the end, was the environment's choice."""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Reward by component, and "total"."""
    turn_rewards: dict[int, float] | None = None
    """What each turn earned, paid at its last policy token, where a recipe rewards steps (R3-RAG); None: the total is paid at
    the end."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """em, f1, ... of the final answer."""
    answer: str = ""
    evidence: str = ""
    reader_answer: str = ""
    """What the cross-family reader answered from the evidence (R-Search, Eq. 4)."""

    @property
    def response(self) -> list[str]:
        """What the policy wrote, cut where the environment spoke, behind the thought that its prompt opened, if any."""
        return responses(self.segments)

    @property
    def written(self) -> list[str]:
        """What the policy wrote, cut where the environment spoke."""
        return [text for role, text in self.segments if role == POLICY]

    @property
    def contexts(self) -> list[slice]:
        """The tokens of each context."""
        return [slice(*ends) for ends in itertools.pairwise((*self.starts, len(self.tokens)))]

    @property
    def positions(self) -> Int[np.ndarray, "T"]:
        """Position of each token in its context."""
        return np.concatenate([np.arange(part.stop - part.start) for part in self.contexts])

    @property
    def token_rewards(self) -> Float[np.ndarray, "T"]:
        """When what was earned is paid: `turn_rewards`, or the total at the last policy token."""
        paid = np.zeros(len(self.tokens), np.float32)
        own = np.flatnonzero(self.roles == POLICY)
        if self.turn_rewards is None:
            paid[own[-1:]] = self.rewards["total"]
            return paid
        for turn, reward in self.turn_rewards.items():
            written = own[self.turns[own] == turn]
            if not len(written):
                raise ValueError(
                    f"question {self.question.id!r}: turn {turn} earned {reward} but nothing was written in it"
                )
            paid[written[-1]] = reward
        return paid

    @property
    def policy_tokens(self) -> int:
        """Number of sampled tokens."""
        return int((self.roles == POLICY).sum())


def responses(segments: Sequence[tuple[int, str]]) -> list[str]:
    """See `Trajectory.response`."""
    before = ["", *(text if role == PROMPT else "" for role, text in segments)]
    return [opened_thought(prompt) + text for prompt, (role, text) in zip(before, segments) if role == POLICY]
