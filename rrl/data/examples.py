"""One training example: token ids and which of them are targets."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A tokenised text of which some tokens are learned."""

    tokens: Int[np.ndarray, "T"]
    """int32 token ids."""
    loss: Bool[np.ndarray, "T"]
    """True where the token is a target; the first token has no context and is never one."""

    def __len__(self) -> int:
        return len(self.tokens)
