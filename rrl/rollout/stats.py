"""Statistics of a run of the engine: time, tokens, failures."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class SchedulerCounts(NamedTuple):
    """What one scheduler counted in a run."""

    search_seconds: float
    """Sum of the durations of its searches; concurrent ones add up."""
    policy_tokens: int
    prefilled_tokens: int
    searches_failed: int
    not_finite: list[tuple[int, str]]
    """(request number, question id) of each episode that ended because its logits were not finite."""


@dataclasses.dataclass(slots=True)
class RolloutStats:
    """Statistics of one run, or of several (`+`)."""

    seconds: float = 0.0
    """Wall time."""
    retrieval_seconds: float = 0.0
    """For each scheduler, the durations of its searches are summed, also of concurrent ones. This is the largest sum."""
    policy_tokens: int = 0
    """Tokens that the policy wrote."""
    row_steps: int = 0
    """Decode steps times rows of a step: one row-step is one row in one step, idle or not."""
    written_row_steps: int = 0
    """Row-steps in which the row wrote: the sum, over all steps, of the number of rows that wrote."""
    prefilled_tokens: int = 0
    """Prefilled tokens of prompts and observations, without those copied from another slot."""
    searches_failed: int = 0
    """Failed searches. A search that several episodes share counts once for each of them."""
    not_finite: int = 0
    """Episodes that ended because the logits were not finite (`rrl.data.trajectory.NOT_FINITE`)."""

    @classmethod
    def of_run(
        cls, counts: Sequence[SchedulerCounts], *, seconds: float, row_steps: int, written_row_steps: int
    ) -> "RolloutStats":
        """Return the statistics of a run from the counts of its schedulers and its decode steps."""
        return cls(
            seconds=seconds,
            retrieval_seconds=max(count.search_seconds for count in counts),
            policy_tokens=sum(count.policy_tokens for count in counts),
            row_steps=row_steps,
            written_row_steps=written_row_steps,
            prefilled_tokens=sum(count.prefilled_tokens for count in counts),
            searches_failed=sum(count.searches_failed for count in counts),
            not_finite=sum(len(count.not_finite) for count in counts),
        )

    @property
    def busy(self) -> float:
        """Mean share of the rows that wrote, over all decode steps."""
        return self.written_row_steps / max(self.row_steps, 1)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per decode step of a row that writes: 1 without draft tokens."""
        return self.policy_tokens / max(self.written_row_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Policy tokens per second of the whole run, including prefilling, searches and, in a first run, compilation."""
        return self.policy_tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        """Return the statistics of two runs together."""
        fields = (field.name for field in dataclasses.fields(self))
        return RolloutStats(**{name: getattr(self, name) + getattr(other, name) for name in fields})
