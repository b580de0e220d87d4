"""What a run of the engine cost, and how much of it failed."""

import dataclasses


@dataclasses.dataclass(slots=True)
class RolloutStats:
    """What a run of the engine cost."""

    seconds: float = 0.0
    retrieval_seconds: float = 0.0
    policy_tokens: int = 0
    row_steps: int = 0
    """Decode steps, times the rows that decode at a time: the tokens that would have been written if none had ever been idle, and
    each had written one a step."""
    written_steps: int = 0
    """Those of the row steps in which the row wrote."""
    prefilled_tokens: int = 0
    """Of prompts and observations; what is copied from another row is not counted."""
    searches_failed: int = 0
    not_finite: int = 0
    """Requests that ended where the logits were no distribution (`rrl.data.trajectory.NOT_FINITE`)."""

    @property
    def busy(self) -> float:
        """Mean share of the rows that were decoding, of those that decode at a time, over the decode steps."""
        return self.written_steps / max(self.row_steps, 1)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a row writes in a decode step: 1 without draft tokens."""
        return self.policy_tokens / max(self.written_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Policy tokens a second: of the whole run, prefilling and searches (and the first time compiling) included."""
        return self.policy_tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        """Of two runs, one after the other."""
        fields = (field.name for field in dataclasses.fields(self))
        return RolloutStats(**{name: getattr(self, name) + getattr(other, name) for name in fields})
