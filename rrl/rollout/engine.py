"""The rollout engine: one jitted loop decodes, asks the host, and prefills its answers into the live KV cache.

Rows that pause wait while the others decode; a finished row takes the next request from the queue. The host is called
through `io_callback` inside a fully manual `shard_map`, so that every data shard asks its own host. `run_reference`
drives the same jitted steps from Python: it is what the loop is tested against.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Key, PyTree
from transformers import PreTrainedTokenizerBase

from rrl.data.tokenizer import check_tokenizer, token_bytes
from rrl.errors import UserError, at_least
from rrl.models.cache import KVCache
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import ROW_AXES, make_mesh
from rrl.retrieval.retriever import Retriever
from rrl.rollout.automaton import compile_stops
from rrl.rollout.device import Rows, Sampler, decode_until, feed
from rrl.rollout.host import HEADER, OFF, Host, Limits, Request, Turns, pack_width
from rrl.rollout.protocol import Environment
from rrl.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and sampling of an engine; all static, so that one program serves a whole run."""

    rows: int = 64
    """Episodes in flight, over all data shards."""
    context: int = 8192
    """Most tokens of a trajectory."""
    feeds: int = 16
    """Rows prefilled together, per data shard; also how many paused rows interrupt decoding."""
    feed_tokens: int = 256
    """Tokens prefilled at a time; longer texts go in chunks."""
    patience: int = 16
    """Decode steps that a paused row waits at most while others run."""
    top_k: int = 3
    """Passages a search returns."""
    top_p: float = 1.0
    sample_top_k: int = 0
    """Sampling among the k likeliest tokens; 0 is off."""

    def __post_init__(self) -> None:
        at_least(1, self, "rows", "context", "feeds", "feed_tokens", "patience", "top_k")
        at_least(0, self, "sample_top_k")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie above 0 and not above 1")


@dataclasses.dataclass(slots=True)
class RolloutStats:
    """What a run of the engine cost."""

    seconds: float = 0.0
    retrieval_seconds: float = 0.0
    policy_tokens: int = 0
    searches_failed: int = 0


class Engine:
    """Runs episodes of one decoder. Parameters are an argument of `run`, so that training needs no copy."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        retriever: Retriever | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.retriever = retriever
        self.mesh = mesh or make_mesh(data=1, devices=jax.devices()[:1])
        self.shards = int(np.prod([self.mesh.shape[axis] for axis in ROW_AXES]))
        if config.rows % self.shards:
            raise UserError(
                f"engine rows = {config.rows} must be a multiple of the {self.shards} data shards"
            )
        self.decoder_config = decoder.config
        self.graph, _ = nnx.split(decoder)
        check_tokenizer(tokenizer, decoder.config)
        self.bytes = token_bytes(tokenizer)
        self.bytes += [b""] * (decoder.config.vocab_size - len(self.bytes))
        self.eos = jnp.asarray(_eos_ids(tokenizer), jnp.int32)
        encoder = retriever.encoder if retriever is not None and retriever.needs_embeddings else None
        self.encoder_graph: Any = None
        self.encoder_state: Any = None
        if encoder is not None:
            self.encoder_graph, self.encoder_state = nnx.split(encoder)
        text_encoder = retriever.text_encoder if retriever is not None and encoder is not None else None
        query_tokens = text_encoder.settings.query_tokens if text_encoder else 0
        self.embedding_dim = text_encoder.dim if text_encoder else 0
        self.query_pad = text_encoder.tokenizer.pad_token_id if text_encoder else 0
        self.limits = Limits(
            rows=config.rows // self.shards,
            context=config.context,
            feeds=min(config.feeds, config.rows // self.shards),
            feed_tokens=config.feed_tokens,
            query_tokens=query_tokens,
        )
        self.stats = RolloutStats()
        self._hosts: list[Host] = []
        self._told: set[type] = set()
        self._programs: dict[Any, Callable] = {}

    # -- public ------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, no special tokens added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids, from their bytes; special tokens are left out."""
        return b"".join(self.bytes[int(i)] for i in ids).decode(errors="replace")

    def run(
        self,
        params: PyTree,
        requests: Sequence[Request],
        environment: Environment,
        key: Key,
        *,
        retriever: Retriever | None = None,
        on_finish: Callable[[int], None] = lambda done: None,
        reference: bool = False,
    ) -> list[Trajectory]:
        """Runs every request to its end; trajectories come back in the order of `requests`.

        `params` is the decoder's state (`nnx.state(decoder)`). `retriever` stands in for the engine's own (another
        corpus behind the same encoder). `reference` runs the host-driven loop. Raises what the environment raised, and
        UserError for a prompt that does not fit the context.
        """
        self._check(requests)
        start = time.perf_counter()
        done = 0

        def finished(index: int, trajectory: Trajectory) -> None:
            nonlocal done
            done += 1
            on_finish(done)

        indexed = list(enumerate(requests))
        self._hosts = [
            Host(
                indexed[shard :: self.shards],
                environment,
                self.limits,
                encode=self.encode,
                decode=self.decode,
                retriever=retriever or self.retriever,
                top_k=self.config.top_k,
                on_finish=finished,
                told=self._told,
            )
            for shard in range(self.shards)
        ]
        automaton = compile_stops(environment.stops, self.bytes)
        signature = (environment.turn_tokens, automaton.first_accept, reference)
        if signature not in self._programs:
            build = self._reference_program if reference else self._loop_program
            self._programs[signature] = build(environment.turn_tokens, automaton.first_accept)
        table = jnp.asarray(automaton.table)
        with jax.set_mesh(self.mesh):
            jax.block_until_ready(self._programs[signature](params, self.encoder_state, key, table))
        for host in self._hosts:
            if host.error is not None:
                raise host.error
        results = {index: value for host in self._hosts for index, value in host.finished.items()}
        trajectories = [results[index] for index in range(len(requests))]
        self.stats = RolloutStats(
            seconds=time.perf_counter() - start,
            retrieval_seconds=max(host.retrieval_seconds for host in self._hosts),
            policy_tokens=sum(trajectory.policy_tokens for trajectory in trajectories),
            searches_failed=sum(host.searches_failed for host in self._hosts),
        )
        return trajectories

    # -- programs ----------------------------------------------------------------------------------------------------

    def _loop_program(self, turn_tokens: int, first_accept: int) -> Callable:
        @jax.jit
        def episode_loop(params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array) -> jax.Array:
            model = nnx.merge(self.graph, params)
            sampler = self._sampler(key, table, first_accept)

            def going(state: tuple) -> jax.Array:
                return jnp.any(state[0].status != OFF)

            def body(state: tuple) -> tuple:
                rows, cache, embeddings = state
                rows, cache = self._decode(model, rows, cache, sampler)
                feeds, queries, off = self._unpack(self._ask(rows, embeddings))
                rows, cache = feed(model, rows, cache, feeds, off, sampler, context=self.config.context)
                return rows, cache, self._embed(encoder_state, queries)

            rows, cache, embeddings = self._start(model, turn_tokens)
            return jax.lax.while_loop(going, body, (rows, cache, embeddings))[0].status

        return episode_loop

    def _reference_program(self, turn_tokens: int, first_accept: int) -> Callable:
        @functools.partial(jax.jit, donate_argnums=2)
        def decode_step(params: PyTree, rows: Rows, cache: KVCache, key: Key, table: jax.Array) -> tuple:
            sampler = self._sampler(key, table, first_accept)
            return self._decode(nnx.merge(self.graph, params), rows, cache, sampler)

        @functools.partial(jax.jit, donate_argnums=2)
        def feed_step(
            params: PyTree,
            rows: Rows,
            cache: KVCache,
            feeds: jax.Array,
            off: jax.Array,
            key: Key,
            table: jax.Array,
        ) -> tuple:
            sampler = self._sampler(key, table, first_accept)
            model = nnx.merge(self.graph, params)
            return feed(model, rows, cache, feeds, off, sampler, context=self.config.context)

        embed = jax.jit(self._embed)
        per_shard = self.limits.rows

        def drive(params: PyTree, encoder_state: PyTree, key: Key, table: jax.Array) -> jax.Array:
            rows, cache, embeddings = self._start(nnx.merge(self.graph, params), turn_tokens)
            while np.any(np.asarray(rows.status) != OFF):
                rows, cache = decode_step(params, rows, cache, key, table)
                report = [np.asarray(part) for part in _report(rows, embeddings)]
                words = []
                for shard in range(self.shards):
                    turn = [part[shard * per_shard : (shard + 1) * per_shard] for part in report[:-1]]
                    count = self.limits.feeds
                    words.append(self._answer(shard, *turn, report[-1][shard * count : (shard + 1) * count]))
                feeds, queries, off = self._unpack(jnp.asarray(np.stack(words)))
                rows, cache = feed_step(params, rows, cache, feeds, off, key, table)
                embeddings = embed(encoder_state, queries)
            return rows.status

        return drive

    # -- pieces of both loops ----------------------------------------------------------------------------------------

    def _start(self, model: Decoder, turn_tokens: int) -> tuple[Rows, KVCache, jax.Array]:
        rows = Rows.create(self.config.rows, turn_tokens)
        cache = KVCache.create(model.config, self.config.rows, self.config.context, model.dtype)
        return rows, cache, jnp.zeros((self.shards * self.limits.feeds, self.embedding_dim), jnp.float32)

    def _sampler(self, key: Key, table: jax.Array, first_accept: int) -> Sampler:
        return Sampler(key, table, self.eos, first_accept, self.config.top_p, self.config.sample_top_k)

    def _decode(self, model: Decoder, rows: Rows, cache: KVCache, sampler: Sampler) -> tuple[Rows, KVCache]:
        return decode_until(
            model,
            rows,
            cache,
            sampler,
            context=self.config.context,
            enough=self.limits.feeds * self.shards,
            patience=self.config.patience,
        )

    def _embed(self, encoder_state: PyTree, queries: jax.Array) -> jax.Array:
        if self.encoder_graph is None:
            return jnp.zeros((queries.shape[0], 0), jnp.float32)
        encoder = nnx.merge(self.encoder_graph, encoder_state)
        return encoder.embed(queries, queries != self.query_pad)

    def _unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Splits the hosts' answers [shards, words] into feeds (with global row numbers), queries and off."""
        limits = self.limits
        feed_words = limits.feeds * (HEADER + limits.feed_tokens)
        query_words = limits.feeds * limits.query_tokens
        feeds = words[:, :feed_words].reshape(self.shards, limits.feeds, -1)
        first_row = (jnp.arange(self.shards, dtype=jnp.int32) * limits.rows)[:, None]
        row = jnp.where(feeds[..., 0] < limits.rows, feeds[..., 0] + first_row, self.config.rows)
        feeds = feeds.at[..., 0].set(row).reshape(self.shards * limits.feeds, -1)
        queries = words[:, feed_words : feed_words + query_words]
        off = words[:, feed_words + query_words :].reshape(-1) > 0
        return feeds, queries.reshape(self.shards * limits.feeds, limits.query_tokens), off

    def _ask(self, rows: Rows, embeddings: jax.Array) -> jax.Array:
        """Calls every data shard's host once; tensor ranks other than 0 get the answer by a sum."""
        width = pack_width(self.limits)

        def per_device(*report: jax.Array) -> jax.Array:
            shard = jax.lax.axis_index(ROW_AXES)

            def ask() -> jax.Array:
                shape = jax.ShapeDtypeStruct((width,), jnp.int32)
                return io_callback(self._answer, shape, shard, *report, ordered=False)

            first = jax.lax.axis_index("tensor") == 0
            words = jax.lax.cond(first, ask, lambda: jnp.zeros(width, jnp.int32))
            return jax.lax.psum(words, "tensor")[None]

        spec = PartitionSpec(ROW_AXES)
        report = _report(rows, embeddings)
        mapped = jax.shard_map(
            per_device, mesh=self.mesh, in_specs=(spec,) * len(report), out_specs=spec, check_vma=False
        )
        return mapped(*report)

    def _answer(self, shard: Any, *report: Any) -> np.ndarray:
        """The callback: NumPy in, NumPy out."""
        *turn, embeddings = (np.asarray(part) for part in report)
        return self._hosts[int(shard)].exchange(Turns(*turn), embeddings)

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if len(request.prompt) + 2 > self.config.context:
                raise UserError(
                    f"the prompt of question {request.question.id!r} has {len(request.prompt)} tokens, the context "
                    f"holds {self.config.context}: raise rollout.context or shorten the prompt"
                )


def _report(rows: Rows, embeddings: jax.Array) -> tuple[jax.Array, ...]:
    return (rows.status, rows.stop, rows.ids, rows.logps, rows.sampled_logps, rows.length, embeddings)


def _eos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in tokenizer_config.json")
    return [int(tokenizer.eos_token_id)]
