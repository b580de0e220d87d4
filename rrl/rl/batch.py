"""What an update step reads: packed rows of tokens, as one pytree."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Bool, Int, Shaped


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Several sequences a row, kept apart by `segment_ids`."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    """Position in the sequence, from 0; restarts with each sequence."""
    segment_ids: Int[Array, "B T"]
    """1, 2, ... by sequence of the row; 0 is padding."""
    loss_mask: Bool[Array, "B T"]
    """True where the token itself is a target (it is predicted from the token before it)."""
    extras: dict[str, Shaped[Array, "B T"]] = dataclasses.field(default_factory=dict)
    """Per-token side arrays by name: advantages, old log-probabilities, ..."""
    branches: Int[Array, "B T"] | None = None
    """Where sequences share a beginning: 0 on the segment's trunk, which all of the segment that stands right of it sees; 1, 2,
    ... on what its own branch alone sees. None: no segment branches."""
