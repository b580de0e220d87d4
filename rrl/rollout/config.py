"""Sizes and sampling of the rollout engine."""

import dataclasses

from rrl.errors import UserError, at_least, at_most, integer_at_least, require_number
from rrl.models.decoder import MAX_DECODE_TOKENS


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and sampling of an engine; all static, so that one program serves a whole run."""

    rows: int = 64
    """Episodes that decode side by side, over all data shards."""
    oversubscribed_slots: int = 0
    """Episodes in flight beside them: one that waits for passages leaves its place to the one that has come least far. They take
    the memory of their cache, and change no number. Each loop has as many, rounded up. Where far more requests than rows are run,
    the longest end late."""
    context: int = 8192
    """Most tokens that the policy sees at a time, its own among them; a restart begins anew."""
    wake_threshold: int = 16
    """How many paused rows of a data shard interrupt decoding; as many queries are encoded together."""
    prefill_tokens: int = 256
    """Tokens prefilled together, per data shard: pieces of 32 of as many texts as have room (one piece, where it is less)."""
    draft_tokens: int = 0
    """Speculative decoding: tokens guessed for each row in a decode step, by looking its last tokens up in what all have read and
    written (`rrl.rollout.drafts`). A step takes longer, and writes several tokens of a row where they were guessed right. A
    narrower step guesses more for each. The last bits of a log-probability depend on how many are guessed, not on what. On
    one CPU this is tried before the first run, and the option left out, with a warning, where it is not so."""
    max_wait_steps: int = 8
    """Decode steps that a paused row waits at most while others run, twice as many where spare rows write in its place; one whose
    query is being encoded waits for a quarter of them."""
    workers: int = 0
    """On one CPU: workers that share the rows and the requests, each on a core of its own; 0: one for all cores if reading the
    weights is what a decode step costs, else one a core, of eight rows at least (`rrl.rollout.cpu.workers`).
    Other devices have one.
    Where XLA computes, the last bits of a log-probability depend on how many rows are computed together, and so on this."""
    top_k: int = 3
    """Passages a search returns."""
    top_p: float = 1.0
    sample_top_k: int = 0
    """Sampling among the k likeliest tokens; 0 is off."""
    share_prompts: bool = True
    """Whether rows copy the beginning of a context from rows that hold it, instead of prefilling it again: a prompt, and what
    samples of one question wrote and read alike after it. What is copied has the bits of what it stands for."""
    search_seconds: float = 60.0
    """A search that takes longer is given up: the policy is told that it failed. Each of three attempts at a search service
    gets a third of it. Of queries that are searched together and fail, each is searched alone before that, and of a few that
    take half of it."""
    stall_seconds: float = 300.0
    """Without a word from the device for so long, the log says what everything is waiting for."""

    def __post_init__(self) -> None:
        integer_at_least(
            1, self, "rows", "context", "wake_threshold", "prefill_tokens", "max_wait_steps", "top_k"
        )
        integer_at_least(0, self, "oversubscribed_slots", "workers", "sample_top_k", "draft_tokens")
        at_most(MAX_DECODE_TOKENS - 1, self, "draft_tokens")
        at_least(0, self, "stall_seconds")
        require_number(self, "search_seconds", "top_p")
        if not self.search_seconds > 0:
            raise UserError(
                f"search_seconds={self.search_seconds} must be above 0: each search would be given up"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie above 0 and not above 1")

    @property
    def slots(self) -> int:
        """Episodes at a time, with those that wait."""
        return self.rows + self.oversubscribed_slots


RESULT_INVARIANT_FIELDS = ("search_seconds", "stall_seconds", "oversubscribed_slots")
"""Fields of an EngineConfig that touch no number, unless a search is given up."""
