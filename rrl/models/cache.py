"""The key-value cache: one pair of arrays a layer, a plain pytree."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of R rows with S slots each; a token at position p lives in slot p.

    One array a layer, not one stacked array, so that each can be updated in place inside a while_loop.
    """

    k: tuple[Float[Array, "R S K H"], ...]
    v: tuple[Float[Array, "R S K H"], ...]

    @classmethod
    def create(
        cls, config: DecoderConfig, rows: int, slots: int, dtype: DTypeLike = jnp.float32
    ) -> "KVCache":
        """An empty cache of `rows` sequences of up to `slots` tokens."""
        shape = (rows, slots, config.kv_heads, config.head_dim)
        k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)) for _ in range(2))
        return cls(k, v)

    @property
    def rows(self) -> int:
        """R."""
        return self.k[0].shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.k[0].shape[1]


def write(
    past: Float[Array, "R S K H"],
    new: Float[Array, "P T K H"],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
) -> Float[Array, "R S K H"]:
    """Puts each token's key or value into slot `positions` of its row; positions >= S are dropped."""
    rows = jnp.arange(new.shape[0]) if rows is None else rows
    return past.at[rows[:, None], positions].set(new.astype(past.dtype), mode="drop", unique_indices=True)


def read(
    past: Float[Array, "R S K H"], rows: Int[Array, "P"] | None, window: int | None
) -> Float[Array, "P W K H"]:
    """The first `window` slots of the given rows."""
    past = past[:, :window]
    return past if rows is None else past[rows]
