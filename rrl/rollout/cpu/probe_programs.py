"""The programs that the shape probe runs: decoding and prefilling of random slots over a model's first layers."""

import copy
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, Key, PyTree

from rrl.models.cache import BLOCK, KVCache
from rrl.models.decoder import LORA_B, cast_params
from rrl.rollout.decode_state import DecodeState, RolloutState
from rrl.rollout.decoding import decode
from rrl.rollout.drafts import NgramDrafts, preceding_tokens
from rrl.rollout.exchange import DECODING, HEADER_LENGTH, NO_TOKEN, OFF, RECENT_TOKENS, PrefillChunk
from rrl.rollout.prefilling import prefill
from rrl.rollout.programs import RolloutPrograms

T = TypeVar("T")

PROBE_TOKENS = 32
"""Tokens that each row writes in a probe. If a softmax is summed in another order, the last bit of 4 % to 10 % of the
log-probabilities differs. Eight rows give 8 x 32 tokens x 2 log-probabilities = 512, of which about 20 or more differ: enough to
detect the other order."""

PROBE_LAYERS = 4
"""The probe uses this many of the first layers. All layers have the same shapes, so XLA splits their products in the same way."""


class DecodeOutput(NamedTuple):
    """What each of the first `width` slots wrote."""

    ids: Int[np.ndarray, "width turn"]
    logps: Float[np.ndarray, "width turn"]
    sampled_logps: Float[np.ndarray, "width turn"]


def compile_decode(
    programs: RolloutPrograms,
    params: PyTree,
    step_tokens: int,
    width: int,
    attention_batches: tuple[int, ...],
) -> Callable[[Int[np.ndarray, "width turn"] | None], DecodeOutput]:
    """Compile the decoding of the first `width` slots, with exactly `width` rows per step.

    Returns:
      a function from the draft tokens of each slot (None: no drafts) to what the slots wrote.
    """
    count, context = programs.slots, min(4 * BLOCK, programs.config.context)
    turn_tokens = min(PROBE_TOKENS, context)
    slots = _in_one_program(programs, lambda: _decoding_slots(programs, width, context, turn_tokens))
    cache = _random_cache(programs, params, context)
    table = np.zeros((1, programs.decoder_config.vocab_size), np.int32)
    settings = dataclasses.replace(
        programs.decode_settings,
        context=context,
        wake_threshold=count,
        widths=(width,),
        attention_batches=attention_batches,
        step_tokens=step_tokens,
    )

    @programs.jit
    def decoded(
        params: PyTree, slots: DecodeState, cache: KVCache, key: Key, drafted: jax.Array
    ) -> tuple[jax.Array, ...]:
        known = jnp.broadcast_to(drafted[:, :1] >= 0, drafted.shape)
        drafts = NgramDrafts.create(programs.shards).update(
            preceding_tokens(slots.recent, drafted), drafted, known
        )
        sampler = programs.sampler(key, jnp.asarray(table), first_accept=1)
        state = RolloutState(slots, cache, drafts)
        (done, *_), _ = decode(programs.model(params), state, sampler, settings, turn_tokens)
        return done.ids, done.logps, done.sampled_logps

    key = jax.random.key(0)
    no_drafts = np.full((count, turn_tokens), NO_TOKEN, np.int32)
    with jax.set_mesh(programs.mesh):
        compiled = decoded.lower(params, slots, cache, key, no_drafts).compile()

    def run(drafted: Int[np.ndarray, "width turn"] | None) -> DecodeOutput:
        padded = no_drafts.copy()
        if drafted is not None:
            padded[: len(drafted)] = drafted
        with jax.set_mesh(programs.mesh):
            done = compiled(params, slots, cache, key, padded)
        return DecodeOutput(*(np.asarray(part)[:width] for part in done))

    return run


def _decoding_slots(programs: RolloutPrograms, width: int, context: int, turn_tokens: int) -> DecodeState:
    """Return slots of which the first `width` decode, with random last tokens, and with different temperatures and lengths.

    Half of all slots begin their turn in the first cache block, a quarter in the second, and so on.
    """
    count = programs.slots
    rng = np.random.default_rng(0)
    number = np.arange(count) + 1
    blocks = np.log2(number & -number)  # trailing zero bits: 0 for half of the slots, 1 for a quarter
    position = BLOCK * blocks + rng.integers(0, BLOCK, count)
    position = np.clip(position, 0, context - turn_tokens).astype(np.int32)
    recent = rng.integers(0, programs.decoder_config.vocab_size, (count, RECENT_TOKENS)).astype(np.int32)
    return DecodeState.create(count, turn_tokens)._replace(
        status=jnp.where(jnp.arange(count) < width, DECODING, OFF),
        position=jnp.asarray(position),
        recent=jnp.asarray(recent),
        seed=jnp.arange(count, dtype=jnp.int32),
        turn_limit=jnp.full(count, turn_tokens, jnp.int32),
        temperature=jnp.linspace(0.5, 1.5, count, dtype=jnp.float32),
    )


def run_prefill(programs: RolloutPrograms, params: PyTree, count: int) -> tuple[np.ndarray, ...]:
    """Return the cache's keys and values after prefilling `chunks_per_prefill` chunks, `count` at a time."""
    context = min(2 * BLOCK, programs.config.context)
    chunks = _random_chunks(programs, context)
    slots = _in_one_program(programs, lambda: DecodeState.create(programs.slots, 1))
    statuses = np.zeros(programs.slots, np.int32)
    settings = dataclasses.replace(
        programs.prefill_settings, context=context, chunk_counts=(count,), max_copies=1, learn_drafts=False
    )

    @programs.jit
    def prefilled(
        params: PyTree, slots: DecodeState, cache: KVCache, chunks: jax.Array, statuses: jax.Array
    ) -> KVCache:
        state = RolloutState(slots, cache, NgramDrafts.create(programs.shards))
        return prefill(programs.model(params), state, chunks, statuses, settings).cache

    with jax.set_mesh(programs.mesh):
        cache = prefilled(params, slots, _random_cache(programs, params, context), chunks, statuses)
    return np.asarray(cache.k), np.asarray(cache.v)


def _random_chunks(programs: RolloutPrograms, context: int) -> Int[np.ndarray, "shards chunks chunk_length"]:
    """Return full chunks of random tokens. At least two of them belong to one slot, one after the other."""
    chunk_count, chunk_tokens = programs.sizes.chunks_per_prefill, programs.sizes.chunk_tokens
    rng = np.random.default_rng(0)
    index = np.arange(chunk_count)
    slot_count = max(1, min(programs.slots, chunk_count - 1))
    slot = index % slot_count
    first_start = rng.integers(0, max(1, context - 2 * chunk_tokens), programs.slots)
    start = first_start[slot] + chunk_tokens * (index // slot_count)
    header = PrefillChunk(slot, start, chunk_tokens, *[np.zeros_like(slot)] * (HEADER_LENGTH - 3))
    headers = np.stack(np.broadcast_arrays(*header), axis=-1)
    tokens = rng.integers(0, programs.decoder_config.vocab_size, (chunk_count, chunk_tokens))
    return np.concatenate([headers, tokens], axis=-1)[None].astype(np.int32)


def _random_cache(programs: RolloutPrograms, params: PyTree, positions: int) -> KVCache:
    """Return a cache of random numbers, the same for every call."""
    dtype = nnx.merge(programs.graph, params).dtype
    cache = _in_one_program(programs, lambda: programs.cache(positions, dtype))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal(part.shape, np.float32).astype(dtype) for part in (cache.k, cache.v))
    return dataclasses.replace(cache, k=jnp.asarray(k), v=jnp.asarray(v))


def _in_one_program(programs: RolloutPrograms, make: Callable[[], T]) -> T:
    """Return the result of `make`, compiled as one program that is freed with `programs`. Without it, JAX would cache one
    program per operation and shape."""
    with jax.set_mesh(programs.mesh):
        return programs.jit(make)()


def first_layers(programs: RolloutPrograms, params: PyTree) -> tuple[RolloutPrograms, PyTree]:
    """Return programs of a model with the first layers only, and its parameters in the compute dtype, with nonzero adapters."""
    model = nnx.merge(programs.graph, params)
    if model.config.layers > PROBE_LAYERS:
        model.config = model.layers.config = model.config.first_layers(PROBE_LAYERS)
        graph, state = nnx.split(model)
        flat = nnx.to_flat_state(state)
        params = nnx.from_flat_state(
            {
                path: leaf.replace(leaf[...][:PROBE_LAYERS]) if path[0] == "layers" else leaf
                for path, leaf in flat
            }
        )
        programs = copy.copy(programs)
        programs.graph, programs.decoder_config = graph, model.config
    return programs, _with_random_adapters(cast_params(params, model.dtype))


def _with_random_adapters(params: PyTree) -> PyTree:
    """Return the parameters with random LoRA B matrices: untrained ones are zero and would hide differences."""
    rng = np.random.default_rng(0)
    flat = {
        path: leaf.replace(jnp.asarray(rng.normal(0, 0.02, leaf.shape), leaf[...].dtype))
        if str(path[-1]).endswith(LORA_B)
        else leaf
        for path, leaf in nnx.to_flat_state(params)
    }
    return nnx.from_flat_state(flat)
