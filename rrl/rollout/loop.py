"""The jitted programs of the rollout: the whole episode loop, which asks the host from inside, and its host-driven double.

They know sizes, a model's graph and a function that answers, but no tokenizer, environment or parameters, so that they can
also be compiled ahead of time for devices that are not there (`rrl.plan.capacity`).
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
from jaxtyping import Array, Int, Key, PyTree

from rrl.errors import UserError
from rrl.models.cache import BLOCK, KVCache
from rrl.models.config import DecoderConfig
from rrl.models.cpu.layers import can_attend, can_compute
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
"""On one CPU, so many queries are encoded at a time; elsewhere all that an exchange may bring."""

DECODE_SCOPE, PREFILL_SCOPE = "decode_rows", "prefill_rows"
"""Names of the loop's two halves in a compiled program."""

HostCallback = Callable[[Int[np.ndarray, "words"]], Int[np.ndarray, "words"]]
"""loop * shards + data shard, rows of all shards that run
or wait, and what `DeviceReport.from_message` takes, all in one array -> what
`Scheduler.exchange` returns, for its rows."""


@dataclasses.dataclass(frozen=True)
class QueryEncoder:
    """What of a text encoder the loop runs on device."""

    graph: nnx.GraphDef
    pad_token_id: int
    query_tokens: int
    dim: int


class _HostReplies(NamedTuple):
    """What the hosts of all data shards answer (see `ExchangeSizes.words`)."""

    chunks: Int[Array, "shards P words"]
    queries: Int[Array, "shards*P Q"]
    marks: Int[Array, "R"]
    asked: Int[Array, ""]
    """How many queries there are, where there are most."""
    max_wait_steps: Int[Array, ""]
    """ABORT where any of them met an error."""


class RolloutPrograms:
    """Builds the programs of one model's graph on one mesh."""

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
        self.rows = self.decode_rows + -(-config.oversubscribed_slots // self.workers)
        self.limits = ExchangeSizes(
            rows=self.rows // self.shards,
            context=config.context,
            wake_threshold=min(config.wake_threshold, self.decode_rows // self.shards),
            prefill_tokens=config.prefill_tokens,
            query_tokens=encoder.query_tokens if encoder else 0,
            max_wait_steps=config.max_wait_steps * (2 if config.oversubscribed_slots else 1),
        )
        self.widths: tuple[int, ...] = (self.decode_rows,)
        """Rows that a decode step may take, most first."""
        self.prefill_chunks: tuple[int, ...] = (self.limits.together,)
        """Pieces that may be prefilled together, most first."""
        self.readers: tuple[int, ...] = ()
        """Rows that may read a block of their past together in a decode step; (): all, as far back as the longest."""
        self.step_tokens = self.decode_rows * (config.draft_tokens + 1) if config.draft_tokens else 0
        """Tokens that a decode step computes, with those that are guessed; 0: nothing is guessed."""
        self.prefill_readers = (1,) if self.one_cpu else ()
        """The same of prefilled pieces."""
        self.compiler_options = compiler_options(self.workers) if self.one_cpu else {}
        self._jitted: weakref.WeakSet = weakref.WeakSet()

    def jit(self, function: Callable, **options: Any) -> Any:
        """`jax.jit` with this mesh's compiler options; `close` lets go of what is compiled."""
        jitted = jax.jit(function, compiler_options=self.compiler_options, **options)
        self._jitted.add(jitted)
        return jitted

    def close(self) -> None:
        """Lets go of all compiled programs; they would be compiled again at the next call."""
        for jitted in list(self._jitted):
            jitted.clear_cache()

    def episode_loop(self, turn_tokens: int, first_accept: int) -> Callable:
        """The jitted program (params, encoder state, key, stop table, number of the loop) -> decode steps, and how many rows
        wrote in each, added up; the host has the episodes."""

        @self.jit
        def episode_loop(
            params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, loop: jax.Array
        ) -> jax.Array:
            params = cast_params(params, nnx.merge(self.graph, params).dtype)
            model = self.model(params)
            sampler = self.sampler(key, table, first_accept)

            def going(state: tuple) -> jax.Array:
                return jnp.any(state[0].status != OFF) & (state[4] != ABORT)

            def body(state: tuple) -> tuple:
                rows, cache, drafts, embeddings, max_wait_steps, steps = state
                with jax.named_scope(DECODE_SCOPE):
                    rows, cache, drafts, more = self._decode(
                        model, rows, cache, drafts, sampler, max_wait_steps
                    )
                answer = self._unpack(self._ask(rows, embeddings, loop))
                with jax.named_scope(PREFILL_SCOPE):
                    prefilling = self._unhoisted(model, params, answer.chunks)
                    rows, cache, drafts = self._prefill(
                        prefilling, rows, cache, drafts, answer.chunks, answer.marks
                    )
                embeddings = self._embed(encoder_state, answer.queries, answer.asked, embeddings)
                return rows, cache, drafts, embeddings, answer.max_wait_steps, steps + more

            start = (
                *self._start(model, turn_tokens),
                jnp.int32(self.limits.max_wait_steps),
                jnp.zeros(2, jnp.int32),
            )
            return jax.lax.while_loop(going, body, start)[-1]

        return episode_loop

    def reference_loop(self, turn_tokens: int, first_accept: int) -> Callable:
        """The same, driven from the host step by step."""

        @functools.partial(self.jit, donate_argnums=2)
        def decode_step(
            params: PyTree,
            rows: DecodeState,
            cache: KVCache,
            drafts: NgramDrafts,
            key: Key,
            table: jax.Array,
            max_wait_steps: jax.Array,
        ) -> tuple:
            sampler = self.sampler(key, table, first_accept)
            return self._decode(self.model(params), rows, cache, drafts, sampler, max_wait_steps)

        @functools.partial(self.jit, donate_argnums=2)
        def prefill_step(
            params: PyTree,
            rows: DecodeState,
            cache: KVCache,
            drafts: NgramDrafts,
            chunks: jax.Array,
            marks: jax.Array,
        ) -> tuple:
            return self._prefill(self.model(params), rows, cache, drafts, chunks, marks)

        @self.jit
        def start(params: PyTree) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
            return self._start(nnx.merge(self.graph, params), turn_tokens)

        embed = self.jit(self._embed)

        def drive(params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, loop: int) -> jax.Array:
            rows, cache, drafts, embeddings = start(params)
            max_wait_steps, steps = jnp.int32(self.limits.max_wait_steps), jnp.zeros(2, jnp.int32)
            while np.any(np.asarray(rows.status) != OFF) and max_wait_steps != ABORT:
                rows, cache, drafts, more = decode_step(
                    params, rows, cache, drafts, key, table, max_wait_steps
                )
                steps += more
                active, words = jnp.sum(rows.status <= PAUSED), []
                for shard in range(self.shards):
                    own = jax.tree.map(
                        lambda part, shard=shard: jnp.split(part, self.shards)[shard], (rows, embeddings)
                    )
                    report = _report(jnp.int32(loop * self.shards + shard), active, *own)
                    words.append(self.host_callback(np.asarray(report)))
                answer = self._unpack(jnp.asarray(np.stack(words)))
                rows, cache, drafts = prefill_step(params, rows, cache, drafts, answer.chunks, answer.marks)
                embeddings = embed(encoder_state, answer.queries, answer.asked, embeddings)
                max_wait_steps = answer.max_wait_steps
            return steps

        return drive

    def describe(self) -> str:
        """The shapes that a loop computes in its model, in words."""

        def each(counts: Sequence[int | str]) -> str:
            return ", ".join(map(str, counts))

        limits = self.limits
        steps = f"{each(self.widths)} rows"
        if self.step_tokens:
            steps = each(
                [f"{width} rows x {tokens_per_row(self.step_tokens, width)} tokens" for width in self.widths]
            )
        if self.readers:
            steps += f", whose past is read {BLOCK} tokens of {each(self.readers)} rows at a time"
        return (
            f"{self.workers} rollout loops of {self.rows} rows x {limits.context} tokens: steps of {steps}; pieces of "
            f"{limits.piece} tokens, prefilled {each(self.prefill_chunks)} together on each of {self.shards} data shards"
        )

    def cache(self, slots: int, dtype: DTypeLike) -> KVCache:
        """An empty one for a loop's rows."""
        return KVCache.create(
            self.decoder_config,
            self.rows,
            slots,
            dtype,
            slots_last=self.on_cpu,
            cpu_kernel=self.uses_cpu_attention(dtype),
            threads=available_cores() if self.one_cpu and self.workers == 1 else 1,
        )

    def uses_cpu_attention(self, dtype: DTypeLike) -> bool:
        """Whether the cache is read by `rrl.models.cpu.layers`."""
        return self.on_cpu and can_attend(dtype, self.decoder_config.head_dim)

    def uses_cpu_layers(self, dtype: DTypeLike) -> bool:
        """Whether `rrl.models.cpu.layers` computes the layers: then what is not there takes no time in them."""
        return self.one_cpu and self.uses_cpu_attention(dtype) and can_compute(self.decoder_config, dtype)

    def _start(self, model: Decoder, turn_tokens: int) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
        rows = DecodeState.create(self.rows, turn_tokens)
        cache = self.cache(self.config.context, model.dtype)
        width = self.encoder.dim if self.encoder else 0
        embeddings = jnp.zeros((self.shards * self.limits.wake_threshold, width), jnp.float32)
        return rows, cache, NgramDrafts.create(self.shards), embeddings

    def model(self, params: PyTree) -> Decoder:
        """The decoder of these parameters, as a jitted program generates with it. To be made before the program's loop: on one
        CPU adapters are added to the kernels, and a tied table is turned, once for all tokens; each loop holds its own copies."""
        model = nnx.merge(self.graph, params)
        if self.uses_cpu_layers(model.dtype):
            model = merge_lora(model)
        if self.one_cpu and model.config.tie_embeddings:
            model.transposed_embedding = model.embedding[...].T
        return model

    def _unhoisted(self, model: Decoder, params: PyTree, chunks: jax.Array) -> Decoder:
        """The model of these parameters, bound to something that changes from turn to turn.

        Prefilling gathers them from the devices that share them; left alone, XLA cuts them up for that before the loop, once
        for all turns, and the cuts of all layers take four times their room.
        """
        if self.mesh.size == 1:
            return model
        return nnx.merge(self.graph, jax.lax.optimization_barrier((params, chunks))[0])

    def sampler(self, key: Key, table: jax.Array, first_accept: int) -> Sampler:
        return Sampler(key, table, self.eos, first_accept, self.config.top_p, self.config.sample_top_k)

    def _decode(
        self,
        model: Decoder,
        rows: DecodeState,
        cache: KVCache,
        drafts: NgramDrafts,
        sampler: Sampler,
        max_wait_steps: jax.Array,
    ) -> tuple[DecodeState, KVCache, NgramDrafts, jax.Array]:
        return decode(
            model,
            rows,
            cache,
            drafts,
            sampler,
            context=self.config.context,
            enough=self.limits.wake_threshold * self.shards,
            max_wait_steps=max_wait_steps,
            widths=self.widths,
            readers=self.readers,
            step_tokens=self.step_tokens,
        )

    def _prefill(
        self,
        model: Decoder,
        rows: DecodeState,
        cache: KVCache,
        drafts: NgramDrafts,
        chunks: jax.Array,
        marks: jax.Array,
    ) -> tuple[DecodeState, KVCache, NgramDrafts]:
        return prefill(
            model,
            rows,
            cache,
            drafts,
            chunks,
            marks,
            context=self.config.context,
            together=self.prefill_chunks,
            copies=self.limits.copies,
            readers=self.prefill_readers,
            learns=self.step_tokens > 0,
        )

    def _embed(
        self, encoder_state: PyTree, queries: jax.Array, asked: jax.Array, before: jax.Array
    ) -> jax.Array:
        """Embeddings of the queries, of which there are `asked`; otherwise what was there `before`."""
        if (query_encoder := self.encoder) is None:
            return before
        encoder = nnx.merge(query_encoder.graph, encoder_state)

        def embed(queries: jax.Array) -> jax.Array:
            return encoder.embed(queries, queries != query_encoder.pad_token_id)

        if not self.one_cpu:
            return jax.lax.cond(asked > 0, lambda: embed(queries), lambda: before)
        some = math.gcd(len(queries), QUERIES_PER_ENCODE)

        def embed_some(turn: jax.Array, embeddings: jax.Array) -> jax.Array:
            found = embed(jax.lax.dynamic_slice_in_dim(queries, turn * some, some))
            return jax.lax.dynamic_update_slice_in_dim(embeddings, found, turn * some, axis=0)

        return jax.lax.fori_loop(0, (asked + some - 1) // some, embed_some, before)

    def _unpack(self, words: jax.Array) -> "_HostReplies":
        """Splits the hosts' answers [shards, words]; rows get their global numbers."""
        limits = self.limits
        chunk_words = limits.pieces * (HEADER + limits.piece)
        query_words = limits.wake_threshold * limits.query_tokens
        chunks = words[:, :chunk_words].reshape(self.shards, limits.pieces, -1)
        first_row = (jnp.arange(self.shards, dtype=jnp.int32) * limits.rows)[:, None]
        row, source = (chunks[..., PrefillChunk._fields.index(name)] for name in ("row", "source"))
        row = jnp.where(row < limits.rows, row + first_row, self.rows)
        chunks = chunks.at[..., PrefillChunk._fields.index("row")].set(row)
        chunks = chunks.at[..., PrefillChunk._fields.index("source")].set(source + first_row)
        queries = words[:, chunk_words : chunk_words + query_words]
        return _HostReplies(
            chunks,
            queries.reshape(self.shards * limits.wake_threshold, limits.query_tokens),
            marks=words[:, chunk_words + query_words : -2].reshape(-1),
            asked=jnp.max(words[:, -2]),
            max_wait_steps=jnp.min(words[:, -1]),
        )

    def _ask(self, rows: DecodeState, embeddings: jax.Array, loop: jax.Array) -> jax.Array:
        """Calls every data shard's host once; tensor ranks other than 0 get the answer by a sum."""
        width = self.limits.words

        def per_device(
            loop: jax.Array, active: jax.Array, rows: DecodeState, embeddings: jax.Array
        ) -> jax.Array:
            report = _report(loop * self.shards + jax.lax.axis_index(ROW_AXES), active, rows, embeddings)

            def ask() -> jax.Array:
                shape = jax.ShapeDtypeStruct((width,), jnp.int32)
                return io_callback(self.host_callback, shape, report, ordered=False)

            first = jax.lax.axis_index("tensor") == 0
            words = jax.lax.cond(first, ask, lambda: jnp.zeros(width, jnp.int32))
            return jax.lax.psum(words, "tensor")[None]

        spec = PartitionSpec(ROW_AXES)
        mapped = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), spec, spec),
            out_specs=spec,
            check_vma=False,
        )
        return mapped(loop, jnp.sum(rows.status <= PAUSED), rows, embeddings)


def _report(
    place: jax.Array, active: jax.Array, rows: DecodeState, embeddings: jax.Array
) -> Int[Array, "words"]:
    """What a data shard's host is told (see `HostCallback`)."""
    floats = (
        jax.lax.bitcast_convert_type(part, jnp.int32) for part in (rows.logps, rows.sampled_logps, embeddings)
    )
    logps, sampled, vectors = floats
    parts = (place, active, rows.status, rows.stop, rows.ids, logps, sampled, rows.length, vectors)
    return jnp.concatenate([part.reshape(-1) for part in parts])
