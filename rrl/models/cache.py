"""The key-value cache: keys and values of all layers, in blocks of slots; a plain pytree.

Layer and block are the leading axes, so that attention reads one layer's filled blocks only, each of them contiguous.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import constrain, fit

BLOCK = 128
"""Slots in a block."""
PLACE = (None, None, ROW_AXES, None, "tensor", None)
"""Rows over the devices that decode them, kv heads over those that share a row."""
Pair = tuple[Array, Array]


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

    def copy_rows(
        self, source: Int[Array, "P"], target: Int[Array, "P"], slots: Int[Array, "P"]
    ) -> "KVCache":
        """The cache with the first `slots` of row `source[p]` (and some more) in row `target[p]`; targets >= R are dropped.

        Where rows are split over devices, the entries are too, and a row is copied from one on the same device.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            k, v = _copied((self.k, self.v), source, target, slots, jnp.int32(0))
            return dataclasses.replace(self, k=k, v=v)
        spec = fit("cache", PartitionSpec(*PLACE), self.k.shape, mesh)
        per_device = self.rows // data_shards(mesh)

        def on_one(arrays: Pair, source: Array, target: Array, slots: Array) -> Pair:
            return _copied(arrays, source, target, slots, jax.lax.axis_index(ROW_AXES) * per_device)

        mapped = jax.shard_map(
            on_one, in_specs=(spec, *[PartitionSpec(ROW_AXES)] * 3), out_specs=spec, check_vma=False
        )
        k, v = mapped((self.k, self.v), source, target, slots)
        return dataclasses.replace(self, k=k, v=v)


def _copied(arrays: Pair, source: Array, target: Array, slots: Array, first: Array) -> Pair:
    """Block by block; `first` is the number of the first row here. A block is read before it is written."""
    here = arrays[0].shape[2]

    def one_block(block: Array, arrays: Pair) -> Pair:
        wanted = (slots > block * BLOCK) & (target >= first) & (target < first + here)
        to = jnp.where(wanted, target - first, here)
        k, v = (a.at[:, block, to].set(a[:, block, source - first], mode="drop") for a in arrays)
        return k, v

    return jax.lax.fori_loop(0, (jnp.max(slots) + BLOCK - 1) // BLOCK, one_block, arrays)


def _placed(array: Float[Array, "L blocks R slot K H"]) -> Float[Array, "L blocks R slot K H"]:
    return constrain(array, *PLACE)
