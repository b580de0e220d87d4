"""The jitted programs of the rollout: the episode loop, which calls the schedulers from inside, and a host-driven reference loop.

They depend on sizes, a model's graph and a host callback, but on no tokenizer, environment or parameters. So they can also be
compiled ahead of time for devices that are not present (`rrl.plan.capacity`). Read `RolloutPrograms.episode_loop` first.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from rrl.errors import UserError
from rrl.models.cache import BLOCK, KVCache, layer_blocks
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, cast_params
from rrl.parallel.mesh import data_shards
from rrl.rollout.backend import Backend, StepShapes
from rrl.rollout.config import EngineConfig
from rrl.rollout.decode_state import DecodeState, RolloutState
from rrl.rollout.decoding import DecodeSettings, Sampler, decode, tokens_per_row
from rrl.rollout.drafts import NgramDrafts
from rrl.rollout.exchange import ABORT, OFF, PAUSED, ExchangeSizes
from rrl.rollout.host_calls import HostCallback, HostReplies, call_schedulers, pack_report, unpack_replies
from rrl.rollout.prefilling import PrefillSettings, prefill
from rrl.rollout.query_encoder import QueryEncoder

log = logging.getLogger(__name__)

DECODE_SCOPE, PREFILL_SCOPE = "decode_rows", "prefill_rows"
"""Names of the loop's two halves in a compiled program."""


class LoopState(NamedTuple):
    """What the episode loop carries from one exchange to the next."""

    rollout: RolloutState
    embeddings: Float[Array, "queries E"]
    """Embeddings of the queries of the last reply, for the next report."""
    max_wait_steps: Int[Array, ""]
    """Maximum number of decode steps while any slot is paused or blocked; ABORT after an error of a scheduler."""
    counts: Int[Array, "2"]
    """Number of decode steps, and number of rows that wrote, summed over the steps."""


class RolloutPrograms:
    """Builds the programs of one model graph on one mesh."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        decoder_config: DecoderConfig,
        config: EngineConfig,
        mesh: Mesh,
        backend: Backend,
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
          backend: how to use these devices (`rrl.rollout.backends.select_backend`).
          eos: end-of-sequence token ids.
          host_callback: called from inside the loop.
          encoder: embeds queries. None: the retriever needs no embeddings.

        Raises:
          UserError: the rows or slots do not fit the mesh, or `sample_top_k` exceeds the vocabulary.
        """
        self.graph, self.decoder_config, self.config = graph, decoder_config, config
        self.mesh, self.backend, self.eos = mesh, backend, eos
        self.host_callback, self.encoder = host_callback, encoder
        self.shards = data_shards(mesh)
        _check_sizes(config, decoder_config, self.shards)
        self.workers = backend.workers
        self.decode_rows = config.rows // self.workers
        """Rows of a decode step of one worker."""
        self.slots = self.decode_rows + -(-config.oversubscribed_slots // self.workers)
        """Slots of one worker."""
        window_slots = BLOCK * min(layer_blocks(decoder_config, config.context))
        self.sizes = ExchangeSizes(
            slots=self.slots // self.shards,
            context=config.context,
            wake_threshold=min(config.wake_threshold, self.decode_rows // self.shards),
            prefill_tokens=config.prefill_tokens,
            query_tokens=encoder.query_tokens if encoder else 0,
            max_wait_steps=config.max_wait_steps * (2 if config.oversubscribed_slots else 1),
            window=(decoder_config.sliding_window or 0) if window_slots < config.context else 0,
            window_slots=window_slots,
        )
        self.shapes = StepShapes(
            widths=(self.decode_rows,),
            attention_batches=(),
            chunk_counts=(self.sizes.chunks_per_prefill,),
            step_tokens=self.decode_rows * (config.draft_tokens + 1) if config.draft_tokens else 0,
        )
        """Shapes of the steps: the largest ones. The engine replaces them by those of `rrl.rollout.backends.find_shapes` before a
        loop is built."""
        self._jitted: weakref.WeakSet = weakref.WeakSet()

    @property
    def decode_settings(self) -> DecodeSettings:
        """The settings of `decode`."""
        return DecodeSettings(
            context=self.config.context,
            wake_threshold=self.sizes.wake_threshold * self.shards,
            widths=self.shapes.widths,
            attention_batches=self.shapes.attention_batches,
            step_tokens=self.shapes.step_tokens,
        )

    @property
    def prefill_settings(self) -> PrefillSettings:
        """The settings of `prefill`."""
        return PrefillSettings(
            context=self.config.context,
            chunk_counts=self.shapes.chunk_counts,
            max_copies=self.sizes.max_copies,
            attention_batches=self.backend.prefill_attention_batches,
            learn_drafts=self.shapes.step_tokens > 0,
        )

    def jit(self, function: Callable, **options: Any) -> Any:
        """Return `jax.jit` of a function with this mesh's compiler options. `close` frees what is compiled."""
        jitted = jax.jit(function, compiler_options=dict(self.backend.compiler_options), **options)
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
          (params, encoder state, key, stop table, worker) -> (number of decode steps, number of rows that
          wrote, summed over the steps). The schedulers hold the episodes.
        """

        @self.jit
        def episode_loop(
            params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, worker: jax.Array
        ) -> jax.Array:
            params = cast_params(params, nnx.merge(self.graph, params).dtype)
            model = self.model(params)
            sampler = self.sampler(key, table, first_accept)

            def cond(loop: LoopState) -> jax.Array:
                return jnp.any(loop.rollout.slots.status != OFF) & (loop.max_wait_steps != ABORT)

            def body(loop: LoopState) -> LoopState:
                with jax.named_scope(DECODE_SCOPE):
                    state, counts = decode(
                        model, loop.rollout, sampler, self.decode_settings, loop.max_wait_steps
                    )
                replies = call_schedulers(
                    self.host_callback, self.mesh, self.sizes, worker, state.slots, loop.embeddings
                )
                with jax.named_scope(PREFILL_SCOPE):
                    prefill_model = self._prefill_model(model, params, replies.chunks)
                    state = prefill(
                        prefill_model, state, replies.chunks, replies.statuses, self.prefill_settings
                    )
                embeddings = self._embed(encoder_state, replies.queries, replies.query_count, loop.embeddings)
                return LoopState(state, embeddings, replies.max_wait_steps, loop.counts + counts)

            return jax.lax.while_loop(cond, body, self._initial(model, turn_tokens)).counts

        return episode_loop

    def reference_loop(self, turn_tokens: int, first_accept: int) -> Callable:
        """Return the loop of `episode_loop`, driven from Python with jitted steps. Tests compare the two."""

        @functools.partial(self.jit, donate_argnums=2)
        def decode_steps(
            params: PyTree,
            slots: DecodeState,
            cache: KVCache,
            drafts: NgramDrafts,
            key: Key,
            table: jax.Array,
            max_wait_steps: jax.Array,
        ) -> tuple[RolloutState, jax.Array]:
            sampler, state = self.sampler(key, table, first_accept), RolloutState(slots, cache, drafts)
            return decode(self.model(params), state, sampler, self.decode_settings, max_wait_steps)

        @functools.partial(self.jit, donate_argnums=2)
        def prefill_step(
            params: PyTree, slots: DecodeState, cache: KVCache, drafts: NgramDrafts, replies: HostReplies
        ) -> RolloutState:
            state = RolloutState(slots, cache, drafts)
            return prefill(self.model(params), state, replies.chunks, replies.statuses, self.prefill_settings)

        @self.jit
        def start(params: PyTree) -> LoopState:
            return self._initial(nnx.merge(self.graph, params), turn_tokens)

        embed = self.jit(self._embed)

        def reference_loop(
            params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array, worker: int
        ) -> jax.Array:
            state, embeddings, max_wait_steps, counts = start(params)
            while np.any(np.asarray(state.slots.status) != OFF) and max_wait_steps != ABORT:
                state, new_counts = decode_steps(params, *state, key, table, max_wait_steps)
                counts += new_counts
                replies = self._call_from_python(worker, state.slots, embeddings)
                state = prefill_step(params, *state, replies)
                embeddings = embed(encoder_state, replies.queries, replies.query_count, embeddings)
                max_wait_steps = replies.max_wait_steps
            return counts

        return reference_loop

    def _call_from_python(self, worker: int, state: DecodeState, embeddings: jax.Array) -> HostReplies:
        """Do the work of `call_schedulers` outside of jit: call the scheduler of one data shard after the other."""
        active, messages = jnp.sum(state.status <= PAUSED), []
        for shard in range(self.shards):
            of_shard = jax.tree.map(
                lambda part, shard=shard: jnp.split(part, self.shards)[shard], (state, embeddings)
            )
            message = pack_report(jnp.int32(worker * self.shards + shard), active, *of_shard)
            messages.append(self.host_callback(np.asarray(message)))
        return unpack_replies(jnp.asarray(np.stack(messages)), self.sizes)

    def describe(self) -> str:
        """Return the shapes of the loop for the log."""

        def listed(counts: Sequence[int | str]) -> str:
            return ", ".join(map(str, counts))

        widths, attention_batches, chunk_counts, step_tokens = self.shapes
        steps = f"{listed(widths)} rows"
        if step_tokens:
            steps = listed(
                [f"{width} rows x {tokens_per_row(step_tokens, width)} tokens" for width in widths]
            )
        if attention_batches:
            steps += (
                f", which read cache blocks of {BLOCK} tokens for {listed(attention_batches)} rows together"
            )
        chunks = f"{listed(chunk_counts)} chunks x {self.sizes.chunk_tokens} tokens"
        return (
            f"{self.workers} rollout workers, each with {self.slots} slots x {self.sizes.context} tokens: decode steps of "
            f"{steps}; prefills of {chunks} on each of {self.shards} data shards"
        )

    def cache(self, positions: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache for the slots of one worker, with `positions` tokens each."""
        return KVCache.create(
            self.decoder_config,
            self.slots,
            positions,
            dtype,
            slots_last=self.backend.slots_last,
            kernels=self.backend.kernels(dtype),
        )

    def model(self, params: PyTree) -> Decoder:
        """Return the decoder with these parameters, prepared for generation. Call it before the program's loop."""
        return self.backend.prepare(nnx.merge(self.graph, params))

    def sampler(self, key: Key, table: jax.Array, first_accept: int) -> Sampler:
        """Return the inputs of sampling."""
        return Sampler(key, table, self.eos, first_accept, self.config.top_p, self.config.sample_top_k)

    def _initial(self, model: Decoder, turn_tokens: int) -> LoopState:
        """Return the state at the start of a loop. All slots are free, and their caches are empty."""
        slots = DecodeState.create(self.slots, turn_tokens)
        cache = self.cache(self.config.context, model.dtype)
        width = self.encoder.dim if self.encoder else 0
        embeddings = jnp.zeros((self.shards * self.sizes.wake_threshold, width), jnp.float32)
        state = RolloutState(slots, cache, NgramDrafts.create(self.shards))
        return LoopState(state, embeddings, jnp.int32(self.sizes.max_wait_steps), jnp.zeros(2, jnp.int32))

    def _prefill_model(self, model: Decoder, params: PyTree, chunks: jax.Array) -> Decoder:
        """Return the model for prefilling. On several devices, XLA must not gather its parameters before the loop.

        Prefilling all-gathers sharded parameters. Without the barrier, XLA would do so for all layers once, before the loop. That
        takes several times the memory of the sharded parameters. With the barrier, the gathered parameters depend on `chunks`,
        which only the loop computes.
        """
        if self.mesh.size == 1:
            return model
        return nnx.merge(self.graph, jax.lax.optimization_barrier((params, chunks))[0])

    def _embed(
        self, encoder_state: PyTree, queries: jax.Array, count: jax.Array, previous: jax.Array
    ) -> Float[Array, "queries E"]:
        """As `QueryEncoder.embed`; without an encoder, return `previous`."""
        if self.encoder is None:
            return previous
        return self.encoder.embed(
            encoder_state, queries, count, previous, in_batches=self.backend.embeds_in_batches
        )


def _check_sizes(config: EngineConfig, decoder_config: DecoderConfig, shards: int) -> None:
    for name in ("rows", "oversubscribed_slots"):
        if (count := getattr(config, name)) % shards:
            raise UserError(
                f"rollout.{name}={count} must be a multiple of data x fsdp = {shards} shards of the mesh"
            )
    if config.sample_top_k > decoder_config.vocab_size:
        raise UserError(
            f"rollout.sample_top_k={config.sample_top_k} must be at most {decoder_config.vocab_size}, the model's "
            "vocab_size; 0 is off"
        )
