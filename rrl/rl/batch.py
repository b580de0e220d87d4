"""`Batch`: packed rows of tokens with their per-token arrays, as one pytree. `take_rows` selects rows."""

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that hold several sequences each; `segment_ids` separates them."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    """Position of each token in its sequence, from 0."""
    segment_ids: Int[Array, "B T"]
    """Number of the sequence within its row: 1, 2, ...; 0 is padding."""
    loss_mask: Bool[Array, "B T"]
    """True if the token is a target of the loss. A target is predicted from the token before it."""
    extras: dict[str, Shaped[Array, "B T"]] = dataclasses.field(default_factory=dict)
    """Other per-token arrays by name: advantages, old log-probabilities, ..."""
    branches: Int[Array, "B T"] | None = None
    """Branch of each token in a segment that is a prefix tree (`rrl.rl.prefix_tree`): 0 is the trunk, which all later tokens of
    the segment see; 1, 2, ... are branches, visible only to their own tokens. None: no segment branches."""


def take_rows(batch: Batch, rows: Int[np.ndarray, "B"]) -> Batch:
    """Selects rows of a batch of NumPy arrays; index -1 gives a row of padding."""

    def take(x: np.ndarray) -> np.ndarray:
        out = x[rows]
        out[np.asarray(rows) < 0] = 0
        return out

    return jax.tree.map(take, batch)
