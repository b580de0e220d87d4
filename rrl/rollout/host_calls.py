"""Calls of the schedulers from inside a jitted program: the device's end of an exchange (`rrl.rollout.exchange`).

`call_schedulers` packs a report for each data shard, calls the host and returns the replies.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.rollout.decode_state import DecodeState
from rrl.rollout.exchange import HEADER_LENGTH, PAUSED, ExchangeSizes, PrefillChunk

HostCallback = Callable[[Int[np.ndarray, "message"]], Int[np.ndarray, "message"]]
"""Passes a device's message to its scheduler and returns the reply. The message holds the scheduler's index (worker * shards +
data shard), the number of slots of all shards that decode or are paused, and the message of `DeviceReport.from_message`."""


class WeakCallback:
    """A weakly held method, for the callback of a jitted program.

    JAX's caches hold a program's callback as long as the program, and the program as long as the jitted function. The owner of
    the method holds the jitted function. If the callback held its owner, none of them would ever be collected.
    """

    def __init__(self, method: Callable) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, message: Any) -> np.ndarray:
        method = self._method()
        assert method is not None, "the owner of the callback was freed during a run"
        return method(message)


class HostReplies(NamedTuple):
    """The replies of the schedulers of all data shards (see `rrl.rollout.exchange`)."""

    chunks: Int[Array, "shards chunks chunk_length"]
    queries: Int[Array, "queries tokens"]
    statuses: Int[Array, "slots"]
    query_count: Int[Array, ""]
    """Number of queries of the shard with the most."""
    max_wait_steps: Int[Array, ""]
    """ABORT if any scheduler met an error."""


def call_schedulers(
    host_callback: HostCallback,
    mesh: Mesh,
    sizes: ExchangeSizes,
    worker: Int[Array, ""],
    state: DecodeState,
    embeddings: Float[Array, "queries E"],
) -> HostReplies:
    """Call the scheduler of every data shard once. Tensor rank 0 calls; a sum over the tensor axis broadcasts the reply."""
    length, shards = sizes.reply_length, data_shards(mesh)

    def per_device(
        worker: jax.Array, active: jax.Array, state: DecodeState, embeddings: jax.Array
    ) -> jax.Array:
        scheduler = worker * shards + jax.lax.axis_index(ROW_AXES)
        message = pack_report(scheduler, active, state, embeddings)

        def call() -> jax.Array:
            shape = jax.ShapeDtypeStruct((length,), jnp.int32)
            return io_callback(host_callback, shape, message, ordered=False)

        first = jax.lax.axis_index("tensor") == 0
        reply = jax.lax.cond(first, call, lambda: jnp.zeros(length, jnp.int32))
        return jax.lax.psum(reply, "tensor")[None]

    spec = PartitionSpec(ROW_AXES)
    mapped = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    return unpack_replies(mapped(worker, jnp.sum(state.status <= PAUSED), state, embeddings), sizes)


def pack_report(
    scheduler: Int[Array, ""],
    active: Int[Array, ""],
    state: DecodeState,
    embeddings: Float[Array, "queries E"],
) -> Int[Array, "message"]:
    """Return the message of one data shard (see `HostCallback`)."""

    def bits(part: Array) -> Array:
        return jax.lax.bitcast_convert_type(part, jnp.int32)

    logps, sampled_logps, vectors = bits(state.logps), bits(state.sampled_logps), bits(embeddings)
    turns = state.ids, logps, sampled_logps, state.length
    parts = (scheduler, active, state.status, state.stop, *turns, vectors)
    return jnp.concatenate([part.reshape(-1) for part in parts])


def unpack_replies(messages: Int[Array, "shards message"], sizes: ExchangeSizes) -> HostReplies:
    """Split the schedulers' messages. A message numbers the slots within its shard; the result numbers those of all shards."""
    shards = len(messages)
    chunks_end = sizes.chunks * (HEADER_LENGTH + sizes.chunk_tokens)
    queries_end = chunks_end + sizes.wake_threshold * sizes.query_tokens
    chunks = messages[:, :chunks_end].reshape(shards, sizes.chunks, -1)
    first_slot = (jnp.arange(shards, dtype=jnp.int32) * sizes.slots)[:, None]
    slot, source = (chunks[..., PrefillChunk._fields.index(name)] for name in ("slot", "source"))
    slot = jnp.where(slot < sizes.slots, slot + first_slot, shards * sizes.slots)
    chunks = chunks.at[..., PrefillChunk._fields.index("slot")].set(slot)
    chunks = chunks.at[..., PrefillChunk._fields.index("source")].set(source + first_slot)
    queries = messages[:, chunks_end:queries_end]
    return HostReplies(
        chunks,
        queries.reshape(shards * sizes.wake_threshold, sizes.query_tokens),
        statuses=messages[:, queries_end:-2].reshape(-1),
        query_count=jnp.max(messages[:, -2]),
        max_wait_steps=jnp.min(messages[:, -1]),
    )
