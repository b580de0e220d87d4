"""The key-value cache: keys and values of all layers, stored in blocks of slots, as a pytree.

Layer and block are the leading axes, so that attention reads only the filled blocks of one layer, each of them contiguous.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.attention import ReadGroups, Ring, cache_attention
from rrl.models.config import DecoderConfig
from rrl.models.kernels import GenerationKernels
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import constrain, fit

BLOCK = 128
"""Slots per block."""
WRITE_TOKENS = 256
"""Maximum number of tokens of a row that are written to a layer with a sliding window before their queries read it. Such
a layer has room for its window and this many new tokens. A longer prefill is computed in parts."""
CACHE_AXES = (None, None, ROW_AXES, "tensor", None, None)
"""Mesh axes of the cache: rows over data and fsdp, kv heads over tensor."""
KeyValue = tuple[Array, Array]
"""The cache's arrays k and v."""


def layer_blocks(config: DecoderConfig, slots: int) -> tuple[int, ...]:
    """Number of blocks in which the cache holds each layer of a row of up to `slots` tokens.

    A layer with a sliding window holds only the last positions. WRITE_TOKENS tokens may be written before the first of them
    reads its window, so the layer has at least window + WRITE_TOKENS - 1 slots.
    """
    all_blocks = -(-slots // BLOCK)
    windows = config.windows or (slots,) * config.layers
    return tuple(min(all_blocks, -(-(window + WRITE_TOKENS - 1) // BLOCK)) for window in windows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of R rows of up to S tokens each. The token at position p is stored in slot p.

    A step has a batch of P entries. An entry has T new tokens of one sequence; it reads and writes one row.

    Slot p of a layer is slot p % BLOCK of [layer, p // BLOCK, row]. The layers are stacked, and a loop over layers carries
    the whole cache, so that XLA updates it in place; a slice per layer would be copied.

    If the model has sliding windows, L is 1, and the blocks of all layers follow each other on the second axis: layer l has
    `blocks[l]` of them. Position p is then stored in slot p % (BLOCK * blocks[l]) of layer l (`rrl.models.attention.Ring`).
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
    """Number of tokens that a query of each layer attends to at most; (): no layer has a sliding window."""
    blocks: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    """Number of blocks of each layer, if the model has sliding windows; else ()."""

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
        blocks = layer_blocks(config, slots)
        lead = (*((1, sum(blocks)) if config.windows else (config.layers, blocks[0])), rows, config.kv_heads)
        last = BLOCK, config.head_dim
        keys = jnp.zeros((*lead, *(reversed(last) if slots_last else last)), dtype)
        values = _shard(jnp.zeros((*lead, *last), dtype))
        held = blocks if config.windows else ()
        return cls(_shard(keys), values, slots, slots_last, kernels, config.windows, held)

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
        on_device = functools.partial(self._read_groups_on_device, batch_sizes=tuple(batch_sizes))
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return on_device(positions)
        entries = PartitionSpec(ROW_AXES)
        return jax.shard_map(on_device, in_specs=entries, out_specs=entries, check_vma=False)(positions)

    def _read_groups_on_device(
        self, positions: Int[Array, "P T"], batch_sizes: tuple[int, ...]
    ) -> ReadGroups:
        needed = jnp.max(jnp.where(positions < self.slots, positions // BLOCK + 1, 0), axis=1)
        ungrouped = self.kernels is not None or not batch_sizes
        if ungrouped or len(needed) % batch_sizes[0] or batch_sizes == (len(needed),):
            return ReadGroups(None, jnp.max(needed)[None, None])
        order = jnp.argsort(-needed).reshape(-1, batch_sizes[0])
        return ReadGroups(order, needed[order], batch_sizes)

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
        """`attend` on one device, which holds this cache or a part of it.

        If a layer holds only the last positions, at most WRITE_TOKENS tokens of a row are written before they are read. More
        tokens, or entries that may all belong to one row, are computed in parts, one after the other in the order of the batch.
        """
        count, time = positions.shape
        overwrites = any(blocks * BLOCK < self.slots for blocks in self.blocks)
        if not overwrites or (time if rows is None else count * time) <= WRITE_TOKENS:
            return self._write_and_read(layer, q, k, v, positions, rows, groups, reads)
        if rows is None or count == 1:
            outputs, cache = [], self
            for start in range(0, time, WRITE_TOKENS):
                span = slice(start, start + WRITE_TOKENS)
                new = q[:, span], k[:, span], v[:, span]
                out, cache = cache._write_and_read(layer, *new, positions[:, span], rows, groups, reads)
                outputs.append(out)
            return jnp.concatenate(outputs, axis=1), cache

        def attend_part(arrays: KeyValue, part: tuple[Array, ...]) -> tuple[KeyValue, Array]:
            cache = dataclasses.replace(self, k=arrays[0], v=arrays[1])
            q, k, v, positions, rows = part
            part_groups = self._read_groups_on_device(positions, groups.batch_sizes)
            out, cache = cache._attend_on_device(layer, q, k, v, positions, rows, part_groups, reads)
            return (cache.k, cache.v), out

        most = max(WRITE_TOKENS // time, 1)
        size = max(size for size in range(1, most + 1) if count % size == 0)  # entries of a part
        parts = (x.reshape(-1, size, *x.shape[1:]) for x in (q, k, v, positions, rows))
        (keys, values), out = jax.lax.scan(attend_part, (self.k, self.v), tuple(parts))
        return out.reshape(q.shape), dataclasses.replace(self, k=keys, v=values)

    def _write_and_read(
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
        ring, block = self._ring(layer), positions // BLOCK
        if ring is not None:
            layer, block = jnp.int32(0), ring.first + block % ring.blocks
        block = jnp.where(positions < self.slots, block, self.k.shape[1])
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
        slots_last = self.slots_last
        return cache_attention(
            q, pair, layer, positions, rows, groups, slots_last=slots_last, ring=ring
        ), cache

    def _ring(self, layer: Array) -> Ring | None:
        """The blocks and the window of a layer; None if the model has no sliding windows."""
        if not self.windows:
            return None
        tables = self._first_blocks, self.blocks, self.windows
        return Ring(*(jnp.asarray(table, jnp.int32)[layer] for table in tables))

    @property
    def _first_blocks(self) -> tuple[int, ...]:
        """First block of each layer."""
        return tuple(int(first) for first in np.cumsum((0, *self.blocks[:-1])))

    def copy_rows(
        self,
        source: Int[Array, "P"],
        target: Int[Array, "P"],
        slots: Int[Array, "P"],
        shared: Int[Array, "P"] | int = 0,
    ) -> "KVCache":
        """Copies the first `slots[p]` positions of row `source[p]` to row `target[p]`, in whole blocks.

        A layer with a sliding window holds only the last positions of a row. Its copy is complete if the source still holds all
        positions that a query at position `slots[p]` attends to.

        If rows are split over devices, so are the entries, and source and target are on the same device.

        Args:
            source: row to copy from.
            target: row to copy to; targets >= R are ignored.
            slots: number of positions to copy; the rest of the last block is copied too.
            shared: number of leading positions in which the target already equals the source. Blocks that contain only these
                are not copied.
        """
        mesh = jax.sharding.get_abstract_mesh()
        begin, end = jnp.broadcast_to(shared, slots.shape) // BLOCK, (slots + BLOCK - 1) // BLOCK
        copy_blocks = (
            functools.partial(_copy_rings, rings=self._rings_by_size()) if self.windows else _copy_blocks
        )
        if mesh.empty or mesh.size == 1:
            if self.kernels is not None:
                k, v = self.kernels.copy_rows(self.k, self.v, source, target, begin, end)
            else:
                k, v = copy_blocks((self.k, self.v), source, target, begin, end, jnp.int32(0))
            return dataclasses.replace(self, k=k, v=v)
        spec = fit("cache", PartitionSpec(*CACHE_AXES), self.k.shape, mesh)
        per_device = self.rows // data_shards(mesh)

        def on_device(arrays: KeyValue, source: Array, target: Array, begin: Array, end: Array) -> KeyValue:
            return copy_blocks(arrays, source, target, begin, end, jax.lax.axis_index(ROW_AXES) * per_device)

        mapped = jax.shard_map(
            on_device, in_specs=(spec, *[PartitionSpec(ROW_AXES)] * 4), out_specs=spec, check_vma=False
        )
        k, v = mapped((self.k, self.v), source, target, begin, end)
        return dataclasses.replace(self, k=k, v=v)

    def _rings_by_size(self) -> dict[int, list[int]]:
        """Number of blocks -> first blocks of the layers that have so many."""
        rings: dict[int, list[int]] = {}
        for first, blocks in zip(self._first_blocks, self.blocks, strict=True):
            rings.setdefault(blocks, []).append(first)
        return rings


def _copy_blocks(
    arrays: KeyValue, source: Array, target: Array, begin: Array, end: Array, first: Array
) -> KeyValue:
    """Copies blocks begin..end-1 of each entry; `first` is the number of the device's first row.

    All entries' rows of a block are read before any is written.
    """

    def one_block(block: Array, arrays: KeyValue) -> KeyValue:
        copied = (begin <= block) & (block < end)
        return _copy_block(arrays, (slice(None), block), source, target, copied, first)

    last = jnp.max(end)
    first_block = jnp.min(jnp.where(end > 0, begin, last))  # entries without slots do not count
    return jax.lax.fori_loop(first_block, last, one_block, arrays)


def _copy_rings(
    arrays: KeyValue,
    source: Array,
    target: Array,
    begin: Array,
    end: Array,
    first: Array,
    rings: dict[int, list[int]],
) -> KeyValue:
    """As `_copy_blocks` for layers with rings (`KVCache._rings_by_size`).

    Each block of a ring is copied at most once, so that a row that is both source and target is read before it is written.
    """
    for size, first_blocks in rings.items():

        def one_block(
            index: Array, arrays: KeyValue, size: int = size, first_blocks: list[int] = first_blocks
        ) -> KeyValue:
            stored = end - 1 - (end - 1 - index) % size  # the last block before `end` that is stored there
            at = jnp.asarray(first_blocks)[:, None] + index
            return _copy_block(arrays, (0, at), source, target, begin <= stored, first)

        arrays = jax.lax.fori_loop(0, jnp.minimum(jnp.max(end), size), one_block, arrays)
    return arrays


def _copy_block(
    arrays: KeyValue, block: tuple[Any, Any], source: Array, target: Array, copied: Array, first: Array
) -> KeyValue:
    """Copies a block of each entry in `copied` whose target is on this device. `block` is its place on the first two axes."""
    local_rows = arrays[0].shape[2]
    copied = copied & (target >= first) & (target < first + local_rows)
    to = jnp.where(copied, target - first, local_rows)
    k, v = (a.at[*block, to].set(a[*block, source - first], mode="drop") for a in arrays)
    return k, v


def _shard(array: Float[Array, "L blocks R K ..."]) -> Float[Array, "L blocks R K ..."]:
    return constrain(array, *CACHE_AXES)
