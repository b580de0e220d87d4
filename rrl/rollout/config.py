"""Sizes and sampling settings of the rollout engine."""

import dataclasses
from typing import Literal, get_args

from rrl.errors import UserError, at_least, at_most, integer_at_least, one_of, require_number
from rrl.models.decoder import MAX_DECODE_TOKENS

Weights = Literal["auto", "unpacked", "float32", "bfloat16", "int8"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and sampling settings of an engine. All are static: one compiled program serves a whole run.

    A slot holds one episode in flight and its KV cache. When a turn has ended, for example at a stop string, its slot is paused
    until the host replies.
    """

    rows: int = 64
    """Rows of a decode step: the number of episodes that decode at the same time, over all data shards."""
    oversubscribed_slots: int = 0
    """Episodes in flight in addition to `rows`. While an episode waits for passages, the shortest episode without a row
    decodes in its place. Each of these slots takes the memory of a KV cache. Several workers share the slots equally; the
    number of slots per worker is rounded up. No result changes, but long episodes end late: if more episodes can decode than
    there are rows, the longest ones wait."""
    context: int = 8192
    """Maximum tokens in the context, including those that the policy writes. A restart begins an empty context."""
    wake_threshold: int = 16
    """Decoding is interrupted when this many slots per data shard are paused, on average over the shards. Also the maximum
    number of queries per data shard that are embedded together."""
    prefill_tokens: int = 256
    """Tokens that are prefilled together, per data shard: chunks of 32 tokens from as many slots as fit (one chunk if this
    is below 32)."""
    draft_tokens: int = 0
    """Speculative decoding: draft tokens per row and decode step, by prompt lookup (`rrl.rollout.drafts`). 0 is off. A step
    takes longer, but writes several tokens per row if the drafts are right. All steps compute about the same number of
    tokens: if fewer rows decode, each gets more draft tokens. Another value of this field may change the last bits of
    log-probabilities. With the same value, log-probabilities must not depend on which draft tokens are proposed. On one CPU
    the engine checks this before the first run; if the check fails, it logs a warning and uses no drafts."""
    max_wait_steps: int = 8
    """Maximum number of decode steps between two calls of the scheduler while any slot is paused, or waits for a search or a
    request. It is doubled if there are oversubscribed slots, and divided by four while a query is being embedded."""
    workers: int = 0
    """On one CPU: workers that share the rows and the requests, each on its own core. 0 chooses: one worker for all cores if
    reading the weights dominates a decode step, else one per core with at least eight rows each
    (`rrl.rollout.cpu.workers`). Other devices have one. With the CPU kernel (`rrl.models.cpu.layers`) this
    field changes no result. Without it, XLA computes the layers, and this field may change the last bits of
    log-probabilities."""
    weights: Weights = "auto"
    """Number format of the matrix products of rollouts on one CPU: float32, bfloat16 or int8, each with a packed copy of the
    weights (`rrl.models.cpu.packed`), or unpacked: float32 without a copy, which takes less memory and is slower.
    auto: bfloat16 if the processor multiplies it and reading the weights dominates a decode step, else float32. Updates compute
    with the policy's own weights; the metric sampling_logp_diff is the size of the difference, and `objective.importance_cap`
    corrects for it. Models that the CPU kernels do not support and other devices compute in `compute.dtype`; they allow only
    auto."""
    top_k: int = 3
    """Passages per search."""
    top_p: float = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability mass. 1 is off."""
    sample_top_k: int = 0
    """Sampling among the k most likely tokens. 0 is off. (`top_k` counts passages.)"""
    share_prompts: bool = True
    """Whether slots copy a common prefix from each other's KV cache instead of prefilling it again. Samples of one
    question share the prompt, and the text after it as long as it is identical. A copy is bitwise equal to prefilling. If the
    model has sliding windows, a slot is copied from only until it has written some 250 tokens after the common prefix."""
    search_seconds: float = 60.0
    """Time limit of a search. A slower search fails, and the policy is informed. If a batch of queries fails, they are
    searched again in smaller batches, down to single queries. The same happens if a batch of at most 32 queries takes half
    of the limit. All attempts for a query share one limit, including repeated requests to a remote search service."""
    stall_seconds: float = 300.0
    """If nothing happens for this time, the log names what the rollout waits for. 0 is off."""

    def __post_init__(self) -> None:
        integer_at_least(
            1, self, "rows", "context", "wake_threshold", "prefill_tokens", "max_wait_steps", "top_k"
        )
        integer_at_least(0, self, "oversubscribed_slots", "workers", "sample_top_k", "draft_tokens")
        at_most(MAX_DECODE_TOKENS - 1, self, "draft_tokens")
        at_least(0, self, "stall_seconds")
        one_of(get_args(Weights), self, "weights", where="rollout.")
        require_number(self, "search_seconds", "top_p")
        if not self.search_seconds > 0:
            raise UserError(
                f"search_seconds={self.search_seconds} must be above 0: otherwise each search would fail"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")

    @property
    def slots(self) -> int:
        """Episodes in flight: those that decode and those that wait."""
        return self.rows + self.oversubscribed_slots


RESULT_INVARIANT_FIELDS = ("search_seconds", "stall_seconds", "oversubscribed_slots")
"""Fields of an EngineConfig that change no trajectory, unless a search times out."""
