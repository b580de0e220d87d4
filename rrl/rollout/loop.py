"""The jitted programs of the rollout: the episode loop, which calls the schedulers from inside, and a host-driven reference loop.

They depend on sizes, a model's graph and a host callback, but on no tokenizer, environment or parameters. So they can also be
compiled ahead of time for devices that are not present (`rrl.plan.capacity`). Read `RolloutPrograms.episode_loop` first.
"""

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from rrl.errors import UserError
from rrl.models.cache import BLOCK, KVCache
from rrl.models.config import DecoderConfig
from rrl.models.cpu.layers import can_attend, can_compute, supports
from rrl.models.decoder import Decoder, cast_params
from rrl.models.lora import merge_lora
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.runtime import available_cores
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.workers import compiler_options, weights_dominate, worker_count
from rrl.rollout.device import DecodeState, Sampler, decode, prefill, tokens_per_row
from rrl.rollout.drafts import NgramDrafts
from rrl.rollout.exchange import ABORT, HEADER, OFF, PAUSED, ExchangeSizes, PrefillChunk

log = logging.getLogger(__name__)


QUERIES_PER_ENCODE = 4
"""On one CPU: number of queries that are embedded together. Other devices embed all queries of an exchange together."""

DECODE_SCOPE, PREFILL_SCOPE = "decode_rows", "prefill_rows"
"""Names of the loop's two halves in a compiled program."""

HostCallback = Callable[[Int[np.ndarray, "message"]], Int[np.ndarray, "message"]]
"""Passes a device's message to its scheduler and returns the reply. The message holds the scheduler's index (worker * shards +
data shard), the number of slots of all shards that decode or are paused, and the message of `DeviceReport.from_message`."""


class WeakCallback:
    """A weakly held method, for the callback of a jitted program.

    JAX's caches hold a program's callback as long as the program, and the program as long as the jitted function, which the
    engine holds. If the callback held the engine, neither would ever be collected.
    """

    def __init__(self, method: Callable) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, message: Any) -> np.ndarray:
        method = self._method()
        assert method is not None, "the caller of a run holds the engine"
        return method(message)


@dataclasses.dataclass(frozen=True)
class QueryEncoder:
    """The part of a text encoder that the loop runs on the device."""

    graph: nnx.GraphDef
    pad_token_id: int
    query_tokens: int
    """Width of its input."""
    dim: int
    """Width of an embedding."""


class _HostReplies(NamedTuple):
    """The replies of the schedulers of all data shards (see `ExchangeSizes.reply_length`)."""

    chunks: Int[Array, "shards chunks chunk_length"]
    queries: Int[Array, "queries tokens"]
    statuses: Int[Array, "slots"]
    query_count: Int[Array, ""]
    """Number of queries of the shard with the most."""
    max_wait_steps: Int[Array, ""]
    """ABORT if any scheduler met an error."""


class RolloutPrograms:
    """Builds the programs of one model graph on one mesh."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        decoder_config: DecoderConfig,
        config: EngineConfig,
        mesh: Mesh,
        *,
        eos: Int[np.ndarray, "E"],
        host_callback: HostCallback,
        encoder: QueryEncoder | None = None,
    ) -> None:
        """Check the sizes.

        Args:
          graph: the policy's graph.
          decoder_config: the policy's shape.
          config: the engine's settings.
          mesh: devices to run on.
          eos: end-of-sequence token ids.
          host_callback: called from inside the loop.
          encoder: embeds queries. None: the retriever needs no embeddings.

        Raises:
          UserError: the rows, slots or workers do not fit the mesh, or `sample_top_k` exceeds the vocabulary.
        """
        self.graph, self.decoder_config, self.config = graph, decoder_config, config
        self.mesh, self.eos, self.host_callback, self.encoder = mesh, eos, host_callback, encoder
        self.shards = data_shards(mesh)
        for name in ("rows", "oversubscribed_slots"):
            if (count := getattr(config, name)) % self.shards:
                raise UserError(
                    f"rollout.{name}={count} must be a multiple of data x fsdp = {self.shards} shards of the mesh"
                )
        if config.sample_top_k > decoder_config.vocab_size:
            raise UserError(
                f"rollout.sample_top_k={config.sample_top_k} must be at most {decoder_config.vocab_size}, the model's "
                "vocab_size; 0 is off"
            )
        self.on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.one_cpu = self.on_cpu and mesh.size == 1
        self.weights_dominate = self.one_cpu and weights_dominate(decoder_config)
        self.workers = worker_count(config, decoder_config) if self.one_cpu else 1
        self.decode_rows = config.rows // self.workers
        """Rows of a decode step of one worker."""
        self.slots = self.decode_rows + -(-config.oversubscribed_slots // self.workers)
        """Slots of one worker."""
        self.sizes = ExchangeSizes(
            slots=self.slots // self.shards,
            context=config.context,
            wake_threshold=min(config.wake_threshold, self.decode_rows // self.shards),
            prefill_tokens=config.prefill_tokens,
            query_tokens=encoder.query_tokens if encoder else 0,
            max_wait_steps=config.max_wait_steps * (2 if config.oversubscribed_slots else 1),
        )
        self.widths: tuple[int, ...] = (self.decode_rows,)
        """Allowed numbers of rows of a decode step, largest first."""
        self.chunk_counts: tuple[int, ...] = (self.sizes.chunks_per_prefill,)
        """Allowed numbers of chunks that are prefilled together, largest first."""
        self.readers: tuple[int, ...] = ()
        """Allowed numbers of rows whose attention reads a cache block together in a decode step, largest first (see
        `rrl.models.attention.cache_attention`). (): all rows read as many cache blocks as the longest one."""
        self.prefill_readers = (1,) if self.one_cpu else ()
        """`readers` of prefill chunks."""
        self.step_tokens = self.decode_rows * (config.draft_tokens + 1) if config.draft_tokens else 0
        """Tokens that a decode step computes, including draft tokens. 0: no drafts."""
        self.compiler_options = compiler_options(self.workers) if self.one_cpu else {}
        self._jitted: weakref.WeakSet = weakref.WeakSet()

    def jit(self, function: Callable, **options: Any) -> Any:
        """Return `jax.jit` of a function with this mesh's compiler options. `close` frees what is compiled."""
        jitted = jax.jit(function, compiler_options=self.compiler_options, **options)
        self._jitted.add(jitted)
        return jitted

    def close(self) -> None:
        """Free all compiled programs. The next call of one compiles it again."""
        for jitted in list(self._jitted):
            jitted.clear_cache()

    def episode_loop(self, turn_tokens: int, first_accept: int) -> Callable:
        """Return the jitted episode loop of one worker.

        Args:
          turn_tokens: maximum tokens of a turn.
          first_accept: first accepting state of the stop automaton.

        Returns:
          (params, encoder state, key, stop table, worker) -> (number of decode steps, sum of the numbers of
          rows that wrote in each step). The schedulers hold the episodes.
        """

        @self.jit
        def episode_loop(
            params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, worker: jax.Array
        ) -> jax.Array:
            params = cast_params(params, nnx.merge(self.graph, params).dtype)
            model = self.model(params)
            sampler = self.sampler(key, table, first_accept)

            def cond(carry: tuple) -> jax.Array:
                return jnp.any(carry[0].status != OFF) & (carry[4] != ABORT)

            def body(carry: tuple) -> tuple:
                state, cache, drafts, embeddings, max_wait_steps, counts = carry
                with jax.named_scope(DECODE_SCOPE):
                    state, cache, drafts, new_counts = self._decode(
                        model, state, cache, drafts, sampler, max_wait_steps
                    )
                replies = self._unpack_replies(self._call_hosts(state, embeddings, worker))
                with jax.named_scope(PREFILL_SCOPE):
                    prefilling = self._unhoisted(model, params, replies.chunks)
                    state, cache, drafts = self._prefill(prefilling, state, cache, drafts, replies)
                embeddings = self._embed(encoder_state, replies.queries, replies.query_count, embeddings)
                return state, cache, drafts, embeddings, replies.max_wait_steps, counts + new_counts

            start = (
                *self._initial(model, turn_tokens),
                jnp.int32(self.sizes.max_wait_steps),
                jnp.zeros(2, jnp.int32),
            )
            return jax.lax.while_loop(cond, body, start)[-1]

        return episode_loop

    def reference_loop(self, turn_tokens: int, first_accept: int) -> Callable:
        """Return the same loop, driven from Python with jitted steps. Tests compare the episode loop with it."""

        @functools.partial(self.jit, donate_argnums=2)
        def decode_step(
            params: PyTree,
            state: DecodeState,
            cache: KVCache,
            drafts: NgramDrafts,
            key: Key,
            table: jax.Array,
            max_wait_steps: jax.Array,
        ) -> tuple:
            sampler = self.sampler(key, table, first_accept)
            return self._decode(self.model(params), state, cache, drafts, sampler, max_wait_steps)

        @functools.partial(self.jit, donate_argnums=2)
        def prefill_step(
            params: PyTree, state: DecodeState, cache: KVCache, drafts: NgramDrafts, replies: _HostReplies
        ) -> tuple:
            return self._prefill(self.model(params), state, cache, drafts, replies)

        @self.jit
        def start(params: PyTree) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
            return self._initial(nnx.merge(self.graph, params), turn_tokens)

        embed = self.jit(self._embed)

        def drive(
            params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, worker: int
        ) -> jax.Array:
            state, cache, drafts, embeddings = start(params)
            max_wait_steps, counts = jnp.int32(self.sizes.max_wait_steps), jnp.zeros(2, jnp.int32)
            while np.any(np.asarray(state.status) != OFF) and max_wait_steps != ABORT:
                state, cache, drafts, new_counts = decode_step(
                    params, state, cache, drafts, key, table, max_wait_steps
                )
                counts += new_counts
                active, messages = jnp.sum(state.status <= PAUSED), []
                for shard in range(self.shards):
                    shard_part = jax.tree.map(
                        lambda part, shard=shard: jnp.split(part, self.shards)[shard], (state, embeddings)
                    )
                    message = _pack_report(jnp.int32(worker * self.shards + shard), active, *shard_part)
                    messages.append(self.host_callback(np.asarray(message)))
                replies = self._unpack_replies(jnp.asarray(np.stack(messages)))
                state, cache, drafts = prefill_step(params, state, cache, drafts, replies)
                embeddings = embed(encoder_state, replies.queries, replies.query_count, embeddings)
                max_wait_steps = replies.max_wait_steps
            return counts

        return drive

    def describe(self) -> str:
        """Return the shapes of the loop for the log."""

        def each(counts: Sequence[int | str]) -> str:
            return ", ".join(map(str, counts))

        steps = f"{each(self.widths)} rows"
        if self.step_tokens:
            steps = each(
                [f"{width} rows x {tokens_per_row(self.step_tokens, width)} tokens" for width in self.widths]
            )
        if self.readers:
            steps += f", which read cache blocks of {BLOCK} tokens for {each(self.readers)} rows together"
        return (
            f"{self.workers} rollout workers, each with {self.slots} slots x {self.sizes.context} tokens: decode steps of "
            f"{steps}; prefills of {each(self.chunk_counts)} chunks x {self.sizes.chunk_tokens} tokens on each of {self.shards} "
            "data shards"
        )

    def cache(self, positions: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache for the slots of one worker, with `positions` tokens each."""
        return KVCache.create(
            self.decoder_config,
            self.slots,
            positions,
            dtype,
            slots_last=self.on_cpu,
            cpu_kernel=self.uses_cpu_attention(dtype),
            threads=available_cores() if self.one_cpu and self.workers == 1 else 1,
        )

    def uses_cpu_attention(self, dtype: DTypeLike) -> bool:
        """Return whether the CPU kernel (`rrl.models.cpu.layers`) reads the cache."""
        config = self.decoder_config
        return self.on_cpu and supports(config) and can_attend(dtype, config.head_dim)

    def uses_cpu_layers(self, dtype: DTypeLike) -> bool:
        """Return whether the CPU kernel computes the layers. It skips padding, so that padding takes no time there."""
        return self.one_cpu and self.uses_cpu_attention(dtype) and can_compute(self.decoder_config, dtype)

    def model(self, params: PyTree) -> Decoder:
        """Return the decoder with these parameters, prepared for generation. Call it before the program's loop.

        On one CPU, adapters are added to the weights, and a tied embedding table is transposed, once for all tokens. Each
        worker holds its own copies.
        """
        model = nnx.merge(self.graph, params)
        if self.uses_cpu_layers(model.dtype):
            model = merge_lora(model)
        if self.one_cpu and model.config.tie_embeddings:
            model.transposed_embedding = model.embedding[...].T
        return model

    def sampler(self, key: Key, table: jax.Array, first_accept: int) -> Sampler:
        """Return the inputs of sampling."""
        return Sampler(key, table, self.eos, first_accept, self.config.top_p, self.config.sample_top_k)

    def _initial(
        self, model: Decoder, turn_tokens: int
    ) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
        state = DecodeState.create(self.slots, turn_tokens)
        cache = self.cache(self.config.context, model.dtype)
        width = self.encoder.dim if self.encoder else 0
        embeddings = jnp.zeros((self.shards * self.sizes.wake_threshold, width), jnp.float32)
        return state, cache, NgramDrafts.create(self.shards), embeddings

    def _unhoisted(self, model: Decoder, params: PyTree, chunks: jax.Array) -> Decoder:
        """Return the model for prefilling, with parameters that XLA cannot move out of the loop.

        Prefilling all-gathers sharded parameters. Without the barrier, XLA reshards the parameters of all layers before the
        loop, once for all turns, which takes four times their memory.
        """
        if self.mesh.size == 1:
            return model
        return nnx.merge(self.graph, jax.lax.optimization_barrier((params, chunks))[0])

    def _decode(
        self,
        model: Decoder,
        state: DecodeState,
        cache: KVCache,
        drafts: NgramDrafts,
        sampler: Sampler,
        max_wait_steps: jax.Array,
    ) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
        return decode(
            model,
            state,
            cache,
            drafts,
            sampler,
            context=self.config.context,
            wake_threshold=self.sizes.wake_threshold * self.shards,
            max_wait_steps=max_wait_steps,
            widths=self.widths,
            readers=self.readers,
            step_tokens=self.step_tokens,
        )

    def _prefill(
        self,
        model: Decoder,
        state: DecodeState,
        cache: KVCache,
        drafts: NgramDrafts,
        replies: _HostReplies,
    ) -> tuple[DecodeState, KVCache, NgramDrafts]:
        return prefill(
            model,
            state,
            cache,
            drafts,
            replies.chunks,
            replies.statuses,
            context=self.config.context,
            chunk_counts=self.chunk_counts,
            copies=self.sizes.copies,
            readers=self.prefill_readers,
            learn_drafts=self.step_tokens > 0,
        )

    def _embed(
        self, encoder_state: PyTree, queries: jax.Array, count: jax.Array, previous: jax.Array
    ) -> Float[Array, "queries E"]:
        """Return `previous` with the embeddings of the first `count` queries in its first entries.

        One CPU embeds only these queries, QUERIES_PER_ENCODE at a time. Other devices embed all queries if `count` > 0."""
        if (query_encoder := self.encoder) is None:
            return previous
        encoder = nnx.merge(query_encoder.graph, encoder_state)

        def embed(queries: jax.Array) -> jax.Array:
            return encoder.embed(queries, queries != query_encoder.pad_token_id)

        if not self.one_cpu:
            return jax.lax.cond(count > 0, lambda: embed(queries), lambda: previous)
        batch_size = math.gcd(len(queries), QUERIES_PER_ENCODE)

        def embed_batch(index: jax.Array, embeddings: jax.Array) -> jax.Array:
            new = embed(jax.lax.dynamic_slice_in_dim(queries, index * batch_size, batch_size))
            return jax.lax.dynamic_update_slice_in_dim(embeddings, new, index * batch_size, axis=0)

        return jax.lax.fori_loop(0, (count + batch_size - 1) // batch_size, embed_batch, previous)

    def _unpack_replies(self, messages: Int[Array, "shards message"]) -> "_HostReplies":
        """Split the schedulers' messages. Slots get their global numbers."""
        sizes = self.sizes
        chunks_end = sizes.chunks * (HEADER + sizes.chunk_tokens)
        queries_end = chunks_end + sizes.wake_threshold * sizes.query_tokens
        chunks = messages[:, :chunks_end].reshape(self.shards, sizes.chunks, -1)
        first_slot = (jnp.arange(self.shards, dtype=jnp.int32) * sizes.slots)[:, None]
        slot, source = (chunks[..., PrefillChunk._fields.index(name)] for name in ("slot", "source"))
        slot = jnp.where(slot < sizes.slots, slot + first_slot, self.slots)
        chunks = chunks.at[..., PrefillChunk._fields.index("slot")].set(slot)
        chunks = chunks.at[..., PrefillChunk._fields.index("source")].set(source + first_slot)
        queries = messages[:, chunks_end:queries_end]
        return _HostReplies(
            chunks,
            queries.reshape(self.shards * sizes.wake_threshold, sizes.query_tokens),
            statuses=messages[:, queries_end:-2].reshape(-1),
            query_count=jnp.max(messages[:, -2]),
            max_wait_steps=jnp.min(messages[:, -1]),
        )

    def _call_hosts(
        self, state: DecodeState, embeddings: jax.Array, worker: jax.Array
    ) -> Int[Array, "shards message"]:
        """Call the scheduler of every data shard once. Tensor rank 0 calls; a sum over the tensor axis broadcasts the reply."""
        length = self.sizes.reply_length

        def per_device(
            worker: jax.Array, active: jax.Array, state: DecodeState, embeddings: jax.Array
        ) -> jax.Array:
            scheduler = worker * self.shards + jax.lax.axis_index(ROW_AXES)
            message = _pack_report(scheduler, active, state, embeddings)

            def call() -> jax.Array:
                shape = jax.ShapeDtypeStruct((length,), jnp.int32)
                return io_callback(self.host_callback, shape, message, ordered=False)

            first = jax.lax.axis_index("tensor") == 0
            reply = jax.lax.cond(first, call, lambda: jnp.zeros(length, jnp.int32))
            return jax.lax.psum(reply, "tensor")[None]

        spec = PartitionSpec(ROW_AXES)
        mapped = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), spec, spec),
            out_specs=spec,
            check_vma=False,
        )
        return mapped(worker, jnp.sum(state.status <= PAUSED), state, embeddings)


def _pack_report(
    scheduler: jax.Array, active: jax.Array, state: DecodeState, embeddings: jax.Array
) -> Int[Array, "message"]:
    """Return the message of one data shard (see `HostCallback`)."""
    floats = (
        jax.lax.bitcast_convert_type(part, jnp.int32)
        for part in (state.logps, state.sampled_logps, embeddings)
    )
    logps, sampled, vectors = floats
    parts = (scheduler, active, state.status, state.stop, state.ids, logps, sampled, state.length, vectors)
    return jnp.concatenate([part.reshape(-1) for part in parts])
