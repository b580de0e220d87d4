"""The key-value cache: keys and values of all layers, in blocks of slots; a plain pytree.

Layer and block are the leading axes, so that attention reads one layer's filled blocks only, each of them contiguous.
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

    Slot p of a layer is [layer, p // BLOCK, row, p % BLOCK]. The layers are stacked, so that a loop over them carries the
    whole cache and XLA updates it in place: an array cut out of it by layer would be copied.
    """

    k: Float[Array, "L blocks R slot K H"]
    v: Float[Array, "L blocks R slot K H"]
    slots: int = dataclasses.field(metadata={"static": True})
    """S; positions from S on are dropped."""

    @classmethod
    def create(
        cls, config: DecoderConfig, rows: int, slots: int, dtype: DTypeLike = jnp.float32
    ) -> "KVCache":
        """An empty cache of `rows` sequences of up to `slots` tokens."""
        shape = (config.layers, -(-slots // BLOCK), rows, BLOCK, config.kv_heads, config.head_dim)
        return cls(_placed(jnp.zeros(shape, dtype)), _placed(jnp.zeros(shape, dtype)), slots)

    @property
    def rows(self) -> int:
        """R."""
        return self.k.shape[2]

    def filled(self, positions: Int[Array, "P T"]) -> Int[Array, ""]:
        """How many blocks hold all slots up to these positions (those >= S left out); at least 1."""
        return jnp.max(jnp.where(positions < self.slots, positions, 0)) // BLOCK + 1

    def write(
        self,
        layer: Int[Array, ""],
        k: Float[Array, "P T K H"],
        v: Float[Array, "P T K H"],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
    ) -> "KVCache":
        """The cache with each token's key and value in slot `positions` of its row; positions >= S are dropped."""
        rows = jnp.arange(k.shape[0]) if rows is None else rows
        block = jnp.where(positions < self.slots, positions // BLOCK, self.k.shape[1])
        where = (layer, block, rows[:, None], positions % BLOCK)

        def put(old: Array, new: Array) -> Array:
            return _placed(old.at[where].set(new.astype(old.dtype), mode="drop"))

        return dataclasses.replace(self, k=put(self.k, k), v=put(self.v, v))


def _placed(array: Float[Array, "L blocks R slot K H"]) -> Float[Array, "L blocks R slot K H"]:
    """Rows over the devices that decode them, kv heads over those that share a row."""
    return constrain(array, None, None, ROW_AXES, None, "tensor", None)
