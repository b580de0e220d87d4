"""The shape probe: finds array shapes on one CPU that give bitwise the same results as the largest shape.

A decode step with fewer rows, or a prefill with fewer chunks, is faster. But for some shapes XLA splits a matrix product in
another way, which changes last bits: then a row's tokens would depend on how many rows run beside it, and so on the speed of
searches. The probe runs the real decode and prefill steps over the model's first layers, once per candidate shape, and compares
bits. It also checks that draft tokens change no bits. Read `configure_shapes`, then `probe_shapes`.
"""

import concurrent.futures
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Key, PyTree

from rrl.models.cache import BLOCK, KVCache
from rrl.models.decoder import LORA_B, cast_params
from rrl.parallel.runtime import available_cores
from rrl.rollout.cpu.probe_cache import cache_key, load, store
from rrl.rollout.device import DecodeState, decode, prefill
from rrl.rollout.drafts import NgramDrafts, preceding_tokens
from rrl.rollout.exchange import DECODING, HEADER, NO_TOKEN, OFF, RECENT, PrefillChunk
from rrl.rollout.loop import RolloutPrograms

log = logging.getLogger(__name__)

Counts = tuple[int, ...]
T = TypeVar("T")

MIN_PROBED_ROWS, ROW_MULTIPLE = 16, 8
"""If a worker has at least MIN_PROBED_ROWS rows, the candidates are a half of them, a quarter, and so on, as long as they are
multiples of ROW_MULTIPLE."""

MIN_CHUNKS = 2
"""Minimum number of chunks of a candidate: for a single one XLA omits the batch loop and sums in another order."""

PROBE_TOKENS = 32
"""Tokens that each row writes in a probe. If a softmax is summed in another order, the last bit of 4 % to 10 % of the
log-probabilities differs. Eight rows give 8 x 32 tokens x 2 log-probabilities = 512, of which about 20 or more differ."""

PROBE_LAYERS = 4
"""The probe uses this many of the first layers. All layers have the same shapes, so XLA splits their products in the same way."""

PROBE_SECONDS = 60.0
"""Time limit: no further candidate is probed after it. The skipped shapes are not used, which costs speed but changes no bits.
Draft tokens could change bits, so they are always probed."""


class ProbeResult(NamedTuple):
    """Shapes that give every row the same bits as the largest shape; each field largest first."""

    widths: Counts
    """Batch sizes of a decode step: how many rows it may compute."""
    readers: Counts
    """Numbers of rows whose attention may read a block of the KV cache together (`rrl.models.attention.cache_attention`):
    long rows read further blocks in smaller batches."""
    chunk_counts: Counts
    """Numbers of chunks that are prefilled together."""
    step_tokens: int
    """Tokens of a decode step, including draft tokens. 0: drafts change bits, and must not be used."""


def configure_shapes(programs: RolloutPrograms, params: PyTree) -> None:
    """Set the shapes of the programs on one CPU. Call it before building loops.

    Nothing is probed if the weights dominate the time of a step, except for draft tokens. If draft tokens change bits, they
    are disabled with a warning.
    """
    fewer_rows = programs.decode_rows >= MIN_PROBED_ROWS and not programs.weights_dominate
    if programs.one_cpu and (fewer_rows or programs.step_tokens):
        result = probe_shapes(programs, params)
        programs.widths, programs.readers, programs.chunk_counts, programs.step_tokens = result
    if programs.config.draft_tokens and not programs.step_tokens:
        log.warning(
            "rollout.draft_tokens=%d is ignored: on this processor correct drafts would change the bits of later tokens",
            programs.config.draft_tokens,
        )


def probe_shapes(programs: RolloutPrograms, params: PyTree) -> ProbeResult:
    """Return the shapes that change no bits, from the cache (`rrl.rollout.cpu.probe_cache`) or by probing all candidates.

    If the weights dominate (`workers.weights_dominate`), only draft tokens are probed: fewer rows or chunks save no time. A
    result that was cut short by the time limit is not stored: the next engine probes again, faster if there is a compilation
    cache.
    """
    dtype = nnx.merge(programs.graph, params).dtype
    rows, chunks = _row_candidates(programs), _chunk_candidates(programs, dtype)
    key = cache_key(programs, params)
    if (stored := _validated(load(key), rows, chunks, programs.step_tokens)) is not None:
        return stored
    deadline = _Deadline(PROBE_SECONDS)
    result = _probe(*_first_layers(programs, params), rows, chunks, deadline)
    if deadline.missed:
        log.info("the shape probe stopped after %g s; result: %s", PROBE_SECONDS, result)
    else:
        store(key, result._asdict())
    return result


class _Deadline:
    """The time limit of a probe."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.missed = False
        """Whether a candidate was skipped."""

    def has_time(self) -> bool:
        """Return whether there is time for another candidate."""
        late = time.monotonic() >= self._end
        self.missed = self.missed or late
        return not late


def _row_candidates(programs: RolloutPrograms) -> list[int]:
    """Return the candidate numbers of rows, largest first."""
    counts = [programs.decode_rows]
    while (
        not programs.weights_dominate
        and counts[-1] >= MIN_PROBED_ROWS
        and not counts[-1] % (2 * ROW_MULTIPLE)
    ):
        counts.append(counts[-1] // 2)
    return counts


def _chunk_candidates(programs: RolloutPrograms, dtype: DTypeLike) -> list[int]:
    """Return the candidate numbers of chunks, largest first."""
    counts = [programs.sizes.chunks_per_prefill]
    fewer = not (programs.weights_dominate or programs.uses_cpu_layers(dtype))
    while fewer and counts[-1] > MIN_CHUNKS and not counts[-1] % 2:
        counts.append(counts[-1] // 2)
    return counts


def _validated(
    stored: Mapping[str, Any] | None, rows: list[int], chunks: list[int], step_tokens: int
) -> ProbeResult | None:
    """Return a stored result if it is a possible result of a probe, else None."""
    if stored is None or set(stored) != set(ProbeResult._fields):
        return None
    valid = []
    for name, candidates in (("widths", rows), ("readers", rows), ("chunk_counts", chunks)):
        counts = stored[name]
        if not isinstance(counts, list) or counts != [count for count in candidates if count in counts]:
            return None
        valid.append(tuple(count for count in candidates if count in counts))
    widths, readers, chunk_counts = valid
    complete = widths[:1] == (rows[0],) and chunk_counts[:1] == (chunks[0],)
    if not complete or stored["step_tokens"] not in (0, step_tokens):
        return None
    return ProbeResult(widths, readers, chunk_counts, int(stored["step_tokens"]))


def _probe(
    programs: RolloutPrograms, params: PyTree, rows: list[int], chunks: list[int], deadline: _Deadline
) -> ProbeResult:
    """Run all candidates and compare bits."""

    def prefilled(count: int) -> tuple[np.ndarray, ...] | None:
        return _prefilled(programs, params, count) if deadline.has_time() else None

    with concurrent.futures.ThreadPoolExecutor(available_cores(), "rrl-probe") as pool:
        # A single candidate needs no comparison.
        prefills = [pool.submit(prefilled, count) for count in chunks if chunks[1:]]
        step_tokens = programs.step_tokens
        decode_result = _probe_decode(programs, params, rows, step_tokens, pool, deadline)
        if decode_result is None:
            step_tokens = 0
            decode_result = _probe_decode(programs, params, rows, step_tokens, pool, deadline)
        same = _same_as_first([prefill.result() for prefill in prefills])
    assert decode_result is not None, "decode steps without drafts are not deterministic"
    fewer = (count for count, is_same in zip(chunks[1:], same[1:], strict=True) if is_same)
    return ProbeResult(*decode_result, (chunks[0], *fewer), step_tokens)


def _probe_decode(
    programs: RolloutPrograms,
    params: PyTree,
    rows: list[int],
    step_tokens: int,
    pool: concurrent.futures.Executor,
    deadline: _Deadline,
) -> tuple[Counts, Counts] | None:
    """Return (widths, readers); None if the drafted tokens change bits."""
    # (width, readers) pairs, compared with (rows[0], ()). The CPU kernel's attention reads the cache row by row and has no
    # `readers`.
    candidates: list[tuple[int, Counts]]
    if programs.uses_cpu_attention(nnx.merge(programs.graph, params).dtype):
        candidates = [(count, ()) for count in rows[1:]]
    else:
        candidates = [(count, tuple(rows[index:])) for index, count in enumerate(rows) if rows[1:]]
    if not (candidates or step_tokens):
        return (rows[0],), ()

    def compiled(width: int, readers: Counts) -> Callable[[np.ndarray], tuple[np.ndarray, ...]] | None:
        return _compile_decode(programs, params, step_tokens, width, readers) if deadline.has_time() else None

    largest = pool.submit(_compile_decode, programs, params, step_tokens, rows[0], ())
    compiling = [pool.submit(compiled, *candidate) for candidate in candidates]
    first = largest.result()(None)
    # The tokens of the first run are the correct drafts of the second one.
    if step_tokens and not all(_same_as_first([first, largest.result()(first[0])])):
        return None
    outputs: list[tuple[np.ndarray, ...] | None] = [first]
    for future in compiling:
        run = future.result()
        outputs.append(run(first[0]) if run is not None and deadline.has_time() else None)
    same = [
        candidate
        for candidate, is_same in zip(candidates, _same_as_first(outputs)[1:], strict=True)
        if is_same
    ]
    widths = tuple(dict.fromkeys([rows[0], *(width for width, _ in same)]))
    readers = next((readers for width, readers in same if width == rows[0]), ())
    return widths, readers


def _compile_decode(
    programs: RolloutPrograms, params: PyTree, step_tokens: int, width: int, readers: tuple[int, ...]
) -> Callable[[np.ndarray | None], tuple[np.ndarray, ...]]:
    """Compile the decoding of the first `width` slots, with exactly `width` rows per step.

    Half of the slots have a past longer than one cache block, a quarter one longer than two blocks, and so on.

    Returns:
      a function from the drafted tokens of each slot (None: no drafts) to ids and both log-probabilities [width, turn].
    """
    count, past = programs.slots, min(4 * BLOCK, programs.config.context)
    turn = min(PROBE_TOKENS, past)
    rng = np.random.default_rng(0)
    number = np.arange(count) + 1
    blocks = np.log2(number & -number)  # trailing zero bits: 0 for half of the slots, 1 for a quarter
    position = np.clip(BLOCK * blocks + rng.integers(0, BLOCK, count), 0, past - turn).astype(np.int32)
    recent = rng.integers(0, programs.decoder_config.vocab_size, (count, RECENT)).astype(np.int32)

    def decoding() -> DecodeState:
        return DecodeState.create(count, turn)._replace(
            status=jnp.where(jnp.arange(count) < width, DECODING, OFF),
            position=jnp.asarray(position),
            recent=jnp.asarray(recent),
            seed=jnp.arange(count, dtype=jnp.int32),
            turn_limit=jnp.full(count, turn, jnp.int32),
            temperature=jnp.linspace(0.5, 1.5, count, dtype=jnp.float32),
        )

    state, cache = _in_one_program(programs, decoding), _random_cache(programs, params, past)
    table = np.zeros((1, programs.decoder_config.vocab_size), np.int32)
    no_drafts = np.zeros((count, turn), np.int32)

    @programs.jit
    def decoded(
        params: PyTree, state: DecodeState, cache: KVCache, key: Key, drafted: jax.Array
    ) -> tuple[jax.Array, ...]:
        drafts, known = (
            NgramDrafts.create(programs.shards),
            jnp.broadcast_to(drafted[:, :1] >= 0, drafted.shape),
        )
        done, *_ = decode(
            programs.model(params),
            state,
            cache,
            drafts.update(preceding_tokens(state.recent, drafted), drafted, known),
            programs.sampler(key, jnp.asarray(table), first_accept=1),
            context=past,
            wake_threshold=count,
            max_wait_steps=turn,
            widths=(width,),
            readers=readers,
            step_tokens=step_tokens,
        )
        return done.ids, done.logps, done.sampled_logps

    key = jax.random.key(0)
    with jax.set_mesh(programs.mesh):
        compiled = decoded.lower(params, state, cache, key, no_drafts).compile()

    def run(drafted: np.ndarray | None) -> tuple[np.ndarray, ...]:
        padded = np.full((count, turn), NO_TOKEN, np.int32)
        if drafted is not None:
            padded[: len(drafted)] = drafted
        with jax.set_mesh(programs.mesh):
            done = compiled(params, state, cache, key, padded)
        return tuple(np.asarray(part)[:width] for part in done)

    return run


def _prefilled(programs: RolloutPrograms, params: PyTree, count: int) -> tuple[np.ndarray, ...]:
    """Return the cache's keys and values after prefilling `chunks_per_prefill` chunks, `count` at a time."""
    chunk_count, size, past = (
        programs.sizes.chunks_per_prefill,
        programs.sizes.chunk_tokens,
        min(2 * BLOCK, programs.config.context),
    )
    rng = np.random.default_rng(0)
    number = np.arange(chunk_count)
    # At least two chunks belong to one slot, one after the other.
    slot_count = max(1, min(programs.slots, chunk_count - 1))
    slot = number % slot_count
    start = rng.integers(0, max(1, past - 2 * size), programs.slots)[slot] + size * (number // slot_count)
    header = PrefillChunk(slot, start, size, *[np.zeros_like(slot)] * (HEADER - 3))
    headers = np.stack(np.broadcast_arrays(*header), axis=-1)
    tokens = rng.integers(0, programs.decoder_config.vocab_size, (chunk_count, size))
    chunks = np.concatenate([headers, tokens], axis=-1)[None].astype(np.int32)
    state = _in_one_program(programs, lambda: DecodeState.create(programs.slots, 1))
    statuses = np.zeros(programs.slots, np.int32)

    @programs.jit
    def prefilled(
        params: PyTree, state: DecodeState, cache: KVCache, chunks: jax.Array, statuses: jax.Array
    ) -> KVCache:
        return prefill(
            programs.model(params),
            state,
            cache,
            NgramDrafts.create(programs.shards),
            chunks,
            statuses,
            context=past,
            chunk_counts=(count,),
            copies=1,
            readers=programs.prefill_readers,
        )[1]

    with jax.set_mesh(programs.mesh):
        cache = prefilled(params, state, _random_cache(programs, params, past), chunks, statuses)
    return np.asarray(cache.k), np.asarray(cache.v)


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


def _same_as_first(outputs: Sequence[tuple[np.ndarray, ...] | None]) -> list[bool]:
    """Return which outputs equal the first rows of the first output. None never does."""
    first = outputs[0] if outputs else None
    return [
        output is not None
        and first is not None
        and all(np.array_equal(part, whole[: len(part)]) for part, whole in zip(output, first, strict=True))
        for output in outputs
    ]


def _first_layers(programs: RolloutPrograms, params: PyTree) -> tuple[RolloutPrograms, PyTree]:
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
