"""The key-value cache: keys and values of all layers, in blocks of slots; a plain pytree.

Layer and block are the leading axes, so that attention reads one layer's filled blocks only, each of them contiguous.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.attention import Groups, cache_attention
from rrl.models.config import DecoderConfig
from rrl.models.cpu.layers import cpu_attention, cpu_copy
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import constrain, fit

BLOCK = 128
"""Slots in a block."""
PLACE = (None, None, ROW_AXES, "tensor", None, None)
"""Rows over the devices that decode them, kv heads over those that share a row."""
Pair = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of R rows with S slots each; a token at position p lives in slot p.

    Slot p of a layer is slot p % BLOCK of [layer, p // BLOCK, row]. The layers are stacked, so that a loop over them
    carries the whole cache and XLA updates it in place: an array cut out of it by layer would be copied.
    """

    k: Float[Array, "L blocks R K slot H"]
    """[..., H, slot] with `slots_last`."""
    v: Float[Array, "L blocks R K slot H"]
    slots: int = dataclasses.field(metadata={"static": True})
    """S; positions from S on are dropped."""
    slots_last: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether keys have their slots last, as a CPU's matrix product wants them: it transposes no block then. A TPU would copy
    all keys to write one there."""
    cpu_kernel: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether `rrl.models.cpu.layers` reads it and, on one device, writes it: only on a CPU, and with `slots_last`."""
    threads: int = dataclasses.field(default=1, metadata={"static": True})
    """Most that it may use; bits don't depend on it."""

    @classmethod
    def create(
        cls,
        config: DecoderConfig,
        rows: int,
        slots: int,
        dtype: DTypeLike = jnp.float32,
        *,
        slots_last: bool = False,
        cpu_kernel: bool = False,
        threads: int = 1,
    ) -> "KVCache":
        """An empty cache of `rows` sequences of up to `slots` tokens."""
        lead = (config.layers, -(-slots // BLOCK), rows, config.kv_heads)
        last = BLOCK, config.head_dim
        keys = jnp.zeros((*lead, *(reversed(last) if slots_last else last)), dtype)
        values = _placed(jnp.zeros((*lead, *last), dtype))
        return cls(_placed(keys), values, slots, slots_last, cpu_kernel, threads)

    @property
    def rows(self) -> int:
        """R."""
        return self.k.shape[2]

    def groups(self, positions: Int[Array, "P T"], readers: Sequence[int] = ()) -> Groups:
        """The P entries in groups of `readers[0]`, and how many blocks hold all slots up to the positions of each (below S).

        Those that need most come first, so that short entries are not kept waiting by long ones. Without readers, or where their
        first does not divide P, or is P and no other follows, all are one group in their order; so they are where each reads by
        itself (`compiled`). Where rows are split over devices, each groups its own.
        """

        def on_one(positions: Array) -> Groups:
            needed = jnp.max(jnp.where(positions < self.slots, positions // BLOCK + 1, 0), axis=1)
            alone = self.cpu_kernel or not readers
            if alone or len(needed) % readers[0] or tuple(readers) == (len(needed),):
                return None, jnp.max(needed)[None, None]
            order = jnp.argsort(-needed).reshape(-1, readers[0])
            return order, needed[order]

        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return on_one(positions)
        entries = PartitionSpec(ROW_AXES)
        return jax.shard_map(on_one, in_specs=entries, out_specs=entries, check_vma=False)(positions)

    def attend(
        self,
        layer: Int[Array, ""],
        q: Float[Array, "P T N H"],
        k: Float[Array, "P T K H"],
        v: Float[Array, "P T K H"],
        positions: Int[Array, "P T"],
        rows: Int[Array, "P"] | None,
        groups: Groups,
        readers: Sequence[int],
        reads: bool = True,
    ) -> tuple[Float[Array, "P T N H"], "KVCache"]:
        """Writes each token's key and value to slot `positions` of its row (those >= S are dropped), then attends to the past,
        unless `reads` is False: then q comes back.

        Where rows are split over devices, the P entries are too, and each concerns a row of its own device.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            out, pair = _attended(
                (self.k, self.v), layer, q, k, v, positions, rows, groups, readers, self, reads
            )
            return out, dataclasses.replace(self, k=pair[0], v=pair[1])
        held = fit("cache", PartitionSpec(*PLACE), self.k.shape, mesh)
        entries = PartitionSpec(ROW_AXES)
        heads = PartitionSpec(ROW_AXES, None, held[3], None)
        per_device = self.rows // data_shards(mesh)

        def on_one(
            pair: Pair,
            layer: Array,
            q: Array,
            k: Array,
            v: Array,
            at: Array,
            rows: Array | None,
            groups: Groups,
        ) -> tuple:
            here = None if rows is None else rows - jax.lax.axis_index(ROW_AXES) * per_device
            return _attended(pair, layer, q, k, v, at, here, groups, readers, self, reads)

        mapped = jax.shard_map(
            on_one,
            in_specs=(held, PartitionSpec(), heads, heads, heads, entries, entries, entries),
            out_specs=(heads, held),
            check_vma=False,
        )
        out, pair = mapped((self.k, self.v), layer, q, k, v, positions, rows, groups)
        return out, dataclasses.replace(self, k=pair[0], v=pair[1])

    def copy_rows(
        self,
        source: Int[Array, "P"],
        target: Int[Array, "P"],
        slots: Int[Array, "P"],
        kept: Int[Array, "P"] | int = 0,
    ) -> "KVCache":
        """The cache with the first `slots` of row `source[p]` (and some more) in row `target[p]`; targets >= R are dropped.

        The first `kept` of the target hold the same already: blocks that have no others are left as they are. Where rows are
        split over devices, the entries are too, and a row is copied from one on the same device.
        """
        mesh = jax.sharding.get_abstract_mesh()
        begin, end = jnp.broadcast_to(kept, slots.shape) // BLOCK, (slots + BLOCK - 1) // BLOCK
        if mesh.empty or mesh.size == 1:
            if self.cpu_kernel:
                k, v = cpu_copy(self.k, self.v, source, target, begin, end, threads=self.threads)
            else:
                k, v = _copied((self.k, self.v), source, target, begin, end, jnp.int32(0))
            return dataclasses.replace(self, k=k, v=v)
        spec = fit("cache", PartitionSpec(*PLACE), self.k.shape, mesh)
        per_device = self.rows // data_shards(mesh)

        def on_one(arrays: Pair, source: Array, target: Array, begin: Array, end: Array) -> Pair:
            return _copied(arrays, source, target, begin, end, jax.lax.axis_index(ROW_AXES) * per_device)

        mapped = jax.shard_map(
            on_one, in_specs=(spec, *[PartitionSpec(ROW_AXES)] * 4), out_specs=spec, check_vma=False
        )
        k, v = mapped((self.k, self.v), source, target, begin, end)
        return dataclasses.replace(self, k=k, v=v)


def _attended(
    pair: Pair,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    rows: Array | None,
    groups: Groups,
    readers: Sequence[int],
    cache: KVCache,
    reads: bool,
) -> tuple[Array, Pair]:
    """`KVCache.attend` on one device, whose part of `cache` the pair is."""
    block = jnp.where(positions < cache.slots, positions // BLOCK, pair[0].shape[1])
    row = (jnp.arange(len(q)) if rows is None else rows)[:, None]
    every, slot = slice(None), positions % BLOCK
    of_key = (every, every, slot) if cache.slots_last else (every, slot)

    def put(old: Array, where: tuple[Any, ...], new: Array) -> Array:
        return old.at[layer, block, row, *where].set(new.astype(old.dtype), mode="drop")

    # A value that is not finite would reach queries that do not see its slot, since 0 times NaN is NaN. So the value becomes
    # 0 and the key NaN: scores are masked, and only queries that see the slot get NaN.
    finite = jnp.isfinite(v).all(axis=-1, keepdims=True)
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
    pair = put(pair[0], of_key, k), put(pair[1], (every, slot), v)
    if not reads:
        return q, pair
    if cache.cpu_kernel:
        return cpu_attention(q, *pair, layer, positions, rows, cache.slots), pair
    out = cache_attention(q, *pair, layer, positions, rows, groups, readers, slots_last=cache.slots_last)
    return out, pair


def _copied(arrays: Pair, source: Array, target: Array, begin: Array, end: Array, first: Array) -> Pair:
    """The blocks from `begin` on, before `end`; `first` is the number of the first row here. A block is read before it is
    written."""
    here = arrays[0].shape[2]

    def one_block(block: Array, arrays: Pair) -> Pair:
        wanted = (begin <= block) & (block < end) & (target >= first) & (target < first + here)
        to = jnp.where(wanted, target - first, here)
        k, v = (a.at[:, block, to].set(a[:, block, source - first], mode="drop") for a in arrays)
        return k, v

    return jax.lax.fori_loop(
        jnp.min(jnp.where(end > 0, begin, jnp.max(end))), jnp.max(end), one_block, arrays
    )


def _placed(array: Float[Array, "L blocks R K ..."]) -> Float[Array, "L blocks R K ..."]:
    return constrain(array, *PLACE)
