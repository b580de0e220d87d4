"""The key-value cache: keys and values of all layers, stored in blocks of slots, as a pytree.

Layer and block are the leading axes, so that attention reads only the filled blocks of one layer, each of them contiguous.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.attention import ReadGroups, cache_attention
from rrl.models.config import DecoderConfig
from rrl.models.kernels import GenerationKernels
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import constrain, fit

BLOCK = 128
"""Slots per block."""
CACHE_AXES = (None, None, ROW_AXES, "tensor", None, None)
"""Mesh axes of the cache: rows over data and fsdp, kv heads over tensor."""
KeyValue = tuple[Array, Array]
"""The cache's arrays k and v."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of R rows with S slots each. The token at position p is stored in slot p.

    A step has a batch of P entries. An entry has T new tokens of one sequence; it reads and writes one row.

    Slot p of a layer is slot p % BLOCK of [layer, p // BLOCK, row]. The layers are stacked, and a loop over layers carries
    the whole cache, so that XLA updates it in place; a slice per layer would be copied.
    """

    k: Float[Array, "L blocks R K slot H"]
    """[..., H, slot] with `slots_last`."""
    v: Float[Array, "L blocks R K slot H"]
    slots: int = dataclasses.field(metadata={"static": True})
    """S; tokens at positions >= S are not stored."""
    slots_last: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether slots are the last axis of `k`. On a CPU the matrix product then needs no transpose; on a TPU writing one key
    would copy all keys."""
    kernels: GenerationKernels | None = dataclasses.field(default=None, metadata={"static": True})
    """Kernels that compute attention over the cache. On a single device they also compute all layers (`Decoder.extend`) and copy
    rows. They need `slots_last`. None: XLA computes everything."""
    windows: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    """Number of slots that a query of each layer attends to at most; (): no layer has a sliding window."""

    @classmethod
    def create(
        cls,
        config: DecoderConfig,
        rows: int,
        slots: int,
        dtype: DTypeLike = jnp.float32,
        *,
        slots_last: bool = False,
        kernels: GenerationKernels | None = None,
    ) -> "KVCache":
        """An empty cache of `rows` sequences of up to `slots` tokens. `kernels` must support the model and the dtype."""
        lead = (config.layers, -(-slots // BLOCK), rows, config.kv_heads)
        last = BLOCK, config.head_dim
        keys = jnp.zeros((*lead, *(reversed(last) if slots_last else last)), dtype)
        values = _shard(jnp.zeros((*lead, *last), dtype))
        return cls(_shard(keys), values, slots, slots_last, kernels, config.windows)

    @property
    def rows(self) -> int:
        """Number of rows R."""
        return self.k.shape[2]

    def read_groups(self, positions: Int[Array, "P T"], batch_sizes: Sequence[int] = ()) -> ReadGroups:
        """Divides the P entries into groups of `batch_sizes[0]` entries that read the cache together (`cache_attention`).

        Entries are sorted by the number of blocks that they read, the largest first, so that short entries do not wait for long
        ones. An entry reads the blocks up to its last position below S. The entries are not sorted and form one group in three
        cases: `batch_sizes` is empty or (P,); `batch_sizes[0]` does not divide P; or the cache has kernels, which need no
        groups. If rows are split over devices, each device groups its own entries.
        """

        def on_device(positions: Array) -> ReadGroups:
            needed = jnp.max(jnp.where(positions < self.slots, positions // BLOCK + 1, 0), axis=1)
            ungrouped = self.kernels is not None or not batch_sizes
            if ungrouped or len(needed) % batch_sizes[0] or tuple(batch_sizes) == (len(needed),):
                return ReadGroups(None, jnp.max(needed)[None, None])
            order = jnp.argsort(-needed).reshape(-1, batch_sizes[0])
            return ReadGroups(order, needed[order], tuple(batch_sizes))

        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return on_device(positions)
        entries = PartitionSpec(ROW_AXES)
        return jax.shard_map(on_device, in_specs=entries, out_specs=entries, check_vma=False)(positions)

    def attend(
        self,
        layer: Int[Array, ""],
        q: Float[Array, "P T N H"],
        k: Float[Array, "P T K H"],
        v: Float[Array, "P T K H"],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
        groups: ReadGroups,
        reads: bool = True,
    ) -> tuple[Float[Array, "P T N H"], "KVCache"]:
        """Writes keys and values of new tokens into one layer of the cache. Each new token attends to its row up to itself.

        If rows are split over devices, so are the P entries, and each belongs to a row of its device.

        Args:
            layer: which layer.
            q: scaled queries of the new tokens.
            k: their keys, after RoPE.
            v: their values.
            positions: slot of each token; tokens at positions >= S are not written.
            rows: cache row of each entry; None: entry p is row p.
            groups: from `read_groups`.
            reads: False: only writes, and returns q instead of the attention's output.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return self._attend_on_device(layer, q, k, v, positions, rows, groups, reads)
        spec = fit("cache", PartitionSpec(*CACHE_AXES), self.k.shape, mesh)
        entries = PartitionSpec(ROW_AXES)
        heads = PartitionSpec(ROW_AXES, None, spec[3], None)
        per_device = self.rows // data_shards(mesh)

        def on_device(
            arrays: KeyValue, layer: Array, rows: Array | None, *new: Any
        ) -> tuple[Array, KeyValue]:
            q, k, v, positions, groups = new
            local = dataclasses.replace(self, k=arrays[0], v=arrays[1])
            local_rows = None if rows is None else rows - jax.lax.axis_index(ROW_AXES) * per_device
            out, local = local._attend_on_device(layer, q, k, v, positions, local_rows, groups, reads)
            return out, (local.k, local.v)

        mapped = jax.shard_map(
            on_device,
            in_specs=(spec, PartitionSpec(), entries, heads, heads, heads, entries, entries),
            out_specs=(heads, spec),
            check_vma=False,
        )
        out, (keys, values) = mapped((self.k, self.v), layer, rows, q, k, v, positions, groups)
        return out, dataclasses.replace(self, k=keys, v=values)

    def _attend_on_device(
        self,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        positions: Array,
        rows: Array | None,
        groups: ReadGroups,
        reads: bool,
    ) -> tuple[Array, "KVCache"]:
        """`attend` on one device, which holds this cache or a part of it."""
        block = jnp.where(positions < self.slots, positions // BLOCK, self.k.shape[1])
        row = (jnp.arange(len(q)) if rows is None else rows)[:, None]
        every, slot = slice(None), positions % BLOCK
        key_index = (every, every, slot) if self.slots_last else (every, slot)

        def write(old: Array, index: tuple[Any, ...], new: Array) -> Array:
            return old.at[layer, block, row, *index].set(new.astype(old.dtype), mode="drop")

        # A masked slot has weight 0, but 0 * NaN is NaN: a NaN or infinite value would spread to queries that do not see its
        # slot. Therefore such a value is stored as 0 and its key as NaN. Its scores are then NaN. The mask replaces them for
        # queries that do not see the slot, so only queries that see it become NaN.
        finite = jnp.isfinite(v).all(axis=-1, keepdims=True)
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        pair = write(self.k, key_index, k), write(self.v, (every, slot), v)
        cache = dataclasses.replace(self, k=pair[0], v=pair[1])
        if not reads:
            return q, cache
        if self.kernels is not None:
            return self.kernels.attend(q, *pair, layer, positions, rows, self.slots), cache
        window = jnp.asarray(self.windows, jnp.int32)[layer] if self.windows else None
        slots_last = self.slots_last
        out = cache_attention(q, pair, layer, positions, rows, groups, slots_last=slots_last, window=window)
        return out, cache

    def copy_rows(
        self,
        source: Int[Array, "P"],
        target: Int[Array, "P"],
        slots: Int[Array, "P"],
        shared: Int[Array, "P"] | int = 0,
    ) -> "KVCache":
        """Copies the first `slots[p]` slots of row `source[p]` to row `target[p]`, in whole blocks.

        If rows are split over devices, so are the entries, and source and target are on the same device.

        Args:
            source: row to copy from.
            target: row to copy to; targets >= R are ignored.
            slots: number of slots to copy; the rest of the last block is copied too.
            shared: number of leading slots in which the target already equals the source. Blocks that contain only these
                slots are not copied.
        """
        mesh = jax.sharding.get_abstract_mesh()
        begin, end = jnp.broadcast_to(shared, slots.shape) // BLOCK, (slots + BLOCK - 1) // BLOCK
        if mesh.empty or mesh.size == 1:
            if self.kernels is not None:
                k, v = self.kernels.copy_rows(self.k, self.v, source, target, begin, end)
            else:
                k, v = _copy_blocks((self.k, self.v), source, target, begin, end, jnp.int32(0))
            return dataclasses.replace(self, k=k, v=v)
        spec = fit("cache", PartitionSpec(*CACHE_AXES), self.k.shape, mesh)
        per_device = self.rows // data_shards(mesh)

        def on_device(arrays: KeyValue, source: Array, target: Array, begin: Array, end: Array) -> KeyValue:
            return _copy_blocks(arrays, source, target, begin, end, jax.lax.axis_index(ROW_AXES) * per_device)

        mapped = jax.shard_map(
            on_device, in_specs=(spec, *[PartitionSpec(ROW_AXES)] * 4), out_specs=spec, check_vma=False
        )
        k, v = mapped((self.k, self.v), source, target, begin, end)
        return dataclasses.replace(self, k=k, v=v)


def _copy_blocks(
    arrays: KeyValue, source: Array, target: Array, begin: Array, end: Array, first: Array
) -> KeyValue:
    """Copies blocks begin..end-1 of each entry; `first` is the number of the device's first row.

    All entries' rows of a block are read before any is written.
    """
    local_rows = arrays[0].shape[2]

    def one_block(block: Array, arrays: KeyValue) -> KeyValue:
        copied = (begin <= block) & (block < end) & (target >= first) & (target < first + local_rows)
        to = jnp.where(copied, target - first, local_rows)
        k, v = (a.at[:, block, to].set(a[:, block, source - first], mode="drop") for a in arrays)
        return k, v

    last = jnp.max(end)
    first_block = jnp.min(jnp.where(end > 0, begin, last))  # entries without slots do not count
    return jax.lax.fori_loop(first_block, last, one_block, arrays)


def _shard(array: Float[Array, "L blocks R K ..."]) -> Float[Array, "L blocks R K ..."]:
    return constrain(array, *CACHE_AXES)
