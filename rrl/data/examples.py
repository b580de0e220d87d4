"""A training example: token ids, and which of them are targets."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A tokenised text with a loss mask."""

    tokens: Int[np.ndarray, "T"]
    """int32 token ids."""
    loss_mask: Bool[np.ndarray, "T"]
    """True if the token is a target. The first token has no context and is never a target."""

    def __len__(self) -> int:
        return len(self.tokens)
