"""Statistics of a run of the engine: time, tokens, failures."""

import dataclasses


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
    """Decode steps times rows per step, idle rows included."""
    written_steps: int = 0
    """Row steps in which the row wrote a token."""
    prefilled_tokens: int = 0
    """Prefilled tokens of prompts and observations, without those copied from another slot."""
    searches_failed: int = 0
    """Failed searches, counted once per episode."""
    not_finite: int = 0
    """Episodes that ended because the logits were not finite (`rrl.data.trajectory.NOT_FINITE`)."""

    @property
    def busy(self) -> float:
        """Mean share of the rows that wrote, over all decode steps."""
        return self.written_steps / max(self.row_steps, 1)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per decode step of a row that writes: 1 without draft tokens."""
        return self.policy_tokens / max(self.written_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Policy tokens per second of the whole run, including prefilling, searches and, in a first run, compilation."""
        return self.policy_tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        """Return the statistics of two runs together."""
        fields = (field.name for field in dataclasses.fields(self))
        return RolloutStats(**{name: getattr(self, name) + getattr(other, name) for name in fields})
