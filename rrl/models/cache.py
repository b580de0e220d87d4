"""The key-value cache: one pair of arrays a layer, in blocks of slots; a plain pytree.

The block is the leading axis, so that attention reads the filled blocks only, each of them contiguous.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig
from rrl.parallel.mesh import ROW_AXES
from rrl.parallel.rules import constrain

BLOCK = 128
"""Slots in a block."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of R rows with S slots each; a token at position p lives in slot p.

    Slot p is [p // BLOCK, row, p % BLOCK]. One array a layer, not one stacked array, so that each is updated in place
    inside a while_loop.
    """

    k: tuple[Float[Array, "blocks R slot K H"], ...]
    v: tuple[Float[Array, "blocks R slot K H"], ...]
    slots: int = dataclasses.field(metadata={"static": True})
    """S; positions from S on are dropped."""

    @classmethod
    def create(
        cls, config: DecoderConfig, rows: int, slots: int, dtype: DTypeLike = jnp.float32
    ) -> "KVCache":
        """An empty cache of `rows` sequences of up to `slots` tokens."""
        shape = (-(-slots // BLOCK), rows, BLOCK, config.kv_heads, config.head_dim)
        k, v = (tuple(_placed(jnp.zeros(shape, dtype)) for _ in range(config.layers)) for _ in range(2))
        return cls(k, v, slots)

    @property
    def rows(self) -> int:
        """R."""
        return self.k[0].shape[1]

    def filled(self, positions: Int[Array, "P T"]) -> Int[Array, ""]:
        """How many blocks hold all slots up to these positions (those >= S left out); at least 1."""
        return jnp.max(jnp.where(positions < self.slots, positions, 0)) // BLOCK + 1

    def write(
        self,
        layer: int,
        k: Float[Array, "P T K H"],
        v: Float[Array, "P T K H"],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
    ) -> "KVCache":
        """The cache with each token's key and value in slot `positions` of its row; positions >= S are dropped."""
        rows = jnp.arange(k.shape[0]) if rows is None else rows
        block = jnp.where(positions < self.slots, positions // BLOCK, self.k[layer].shape[0])
        where = (block, rows[:, None], positions % BLOCK)

        def put(old: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
            array = old[layer].at[where].set(new.astype(old[layer].dtype), mode="drop")
            return (*old[:layer], _placed(array), *old[layer + 1 :])

        return dataclasses.replace(self, k=put(self.k, k), v=put(self.v, v))


def _placed(array: Float[Array, "blocks R slot K H"]) -> Float[Array, "blocks R slot K H"]:
    """Rows over the devices that decode them, kv heads over those that share a row."""
    return constrain(array, None, ROW_AXES, None, "tensor", None)
