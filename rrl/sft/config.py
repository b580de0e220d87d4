"""Settings of supervised training, and which of them a continued run may change."""

import dataclasses

from rrl.errors import UserError, at_least, at_most
from rrl.rl.optim import OptimConfig


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of one supervised training run."""

    steps: int
    """Updates."""
    optim: OptimConfig
    rows: int = 16
    """Rows per step. A row holds one or more packed examples."""
    row_length: int = 512
    """Tokens per row."""
    chunk: int = 1024
    """Positions whose logits are computed at a time, which bounds memory. Chunks without a target are skipped."""
    seed: int = 0
    """Seed of initial parameters and data."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    patience: int = 0
    """Early stopping: end after this many evaluations without a lower held-out loss, with the best parameters; 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and after SIGTERM."""
    minutes: float = 0.0
    """Limit of training time in minutes; 0: no limit. The run ends at the first step that exceeds it. Evaluations do not count.
    With a limit the result is not bitwise reproducible."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "row_length", "chunk", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        at_least(0, self, "seed", "eval_every", "patience", "checkpoint_every", "minutes")
        at_most(2**32 - 1, self, "seed")


MAY_DIFFER = ("log_every", "checkpoint_every", "run.data.path", "run.data.encoder", "run.tokenizer")
"""Fields that a continued run may change, since they do not affect its results. Data, encoder and tokenizer are identified by
their content, not by their paths."""
MAY_GROW = ("steps", "optim.total_steps", "eval_every")
"""Fields that a continued run may raise. It then continues with the learning-rate schedule of the longer run."""
