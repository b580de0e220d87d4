"""How many rows a decode step may take on one CPU, how many may read on, how many pieces are prefilled together; and whether
tokens may be guessed. Read `probe_shapes` first.

Only so many at a time as give each row the bits that it has among all, or its tokens would depend on how fast searches are: from
some shapes on, XLA cuts a product up in another way. So this is tried, with the steps that run, over the model's first layers.
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
from rrl.rollout.drafts import NgramDrafts, windows
from rrl.rollout.exchange import DECODING, HEADER, NO_TOKEN, OFF, RECENT, PrefillChunk
from rrl.rollout.loop import RolloutPrograms

log = logging.getLogger(__name__)

Sizes = tuple[int, ...]
Made = TypeVar("Made")

NARROWED, MULTIPLE, PIECES = 16, 8, 2
"""A loop of so many rows tries steps of half as many, a quarter and so on, each a multiple of the second number, and likewise
fewer pieces to prefill, the third at least: XLA leaves out the loop over a single one, and then sums in another way."""

PROBE_TOKENS = 32
"""Tokens that each row writes for it. Where a normaliser is summed in another way, the last bit of some twenty-fifth to tenth of
the log-probabilities differs: of the 512 of eight rows, some twenty at least."""

PROBE_LAYERS = 4
"""Sizes are tried over so many layers, the first: all have the same shapes, so that XLA cuts the products of all alike."""

PROBE_SECONDS = 60.0
"""After so long no further size is tried. This changes the time that a rollout takes, but no bit: all sizes that are found give
the same bits. Guesses, on which bits may depend, are always tried, however long it takes."""


class ProbeResult(NamedTuple):
    """Sizes of a loop that give all rows the bits that they have among all; each most first."""

    widths: Sizes
    """Rows that a decode step may take."""
    readers: Sizes
    """Rows that may read a block of their past together."""
    together: Sizes
    """Pieces that may be prefilled together."""
    step_tokens: int
    """Tokens that a decode step may compute: 0, where those behind a right guess have other bits than those behind none."""


def configure_shapes(programs: RolloutPrograms, params: PyTree) -> None:
    """Lets decode steps take fewer rows while few run, and prefills fewer pieces where few are left, on one CPU, where what
    is not there takes time too (in `rrl.models.cpu.layers`, only what follows the layers), unless weights dominate. Leaves
    draft tokens out, with a warning, where bits depend on them. Call it before building loops."""
    narrower = programs.decode_rows >= NARROWED and not programs.weights_dominate
    if programs.one_cpu and (narrower or programs.step_tokens):
        found = probe_shapes(programs, params)
        programs.widths, programs.readers, programs.prefill_chunks, programs.step_tokens = found
    if programs.config.draft_tokens and not programs.step_tokens:
        log.warning(
            "rollout.draft_tokens=%d is left out: on this processor the bits behind a right guess would differ",
            programs.config.draft_tokens,
        )


def probe_shapes(programs: RolloutPrograms, params: PyTree) -> ProbeResult:
    """Tries all sizes, unless it is remembered what was found for these programs on this machine (`rrl.rollout.cpu.probe_cache`).

    If the weights dominate (`workers.weights_dominate`), only draft tokens are tried: fewer rows or chunks save no time.
    What was found before the time was up is not remembered, so that the next engine tries more; its trials take less time where
    there is a compilation cache.
    """
    dtype = nnx.merge(programs.graph, params).dtype
    rows, pieces = _row_counts(programs), _piece_counts(programs, dtype)
    key = cache_key(programs, params)
    if (known := _validated(load(key), rows, pieces, programs.step_tokens)) is not None:
        return known
    deadline = _Deadline(PROBE_SECONDS)
    found = _probe(*_first_layers(programs, params), rows, pieces, deadline)
    if deadline.missed:
        log.info("after %g s no further row counts were tried; found %s", PROBE_SECONDS, found)
    else:
        store(key, found._asdict())
    return found


class _Deadline:
    """The end of the time in which sizes are tried."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.missed = False
        """Whether a trial was left out because it came too late."""

    def left(self) -> bool:
        """Whether there is time for another trial."""
        late = time.monotonic() >= self._end
        self.missed = self.missed or late
        return not late


def _row_counts(programs: RolloutPrograms) -> list[int]:
    """Of steps, most first."""
    counts = [programs.decode_rows]
    while not programs.weights_dominate and counts[-1] >= NARROWED and not counts[-1] % (2 * MULTIPLE):
        counts.append(counts[-1] // 2)
    return counts


def _piece_counts(programs: RolloutPrograms, dtype: DTypeLike) -> list[int]:
    """Prefilled together, most first."""
    counts, fewer = (
        [programs.limits.together],
        not (programs.weights_dominate or programs.uses_cpu_layers(dtype)),
    )
    while fewer and counts[-1] > PIECES and not counts[-1] % 2:
        counts.append(counts[-1] // 2)
    return counts


def _validated(
    known: Mapping[str, Any] | None, rows: list[int], pieces: list[int], step_tokens: int
) -> ProbeResult | None:
    """What is remembered, if it could have been found: a file may be anything."""
    if known is None or set(known) != set(ProbeResult._fields):
        return None
    chosen = []
    for name, every in (("widths", rows), ("readers", rows), ("together", pieces)):
        counts = known[name]
        if not isinstance(counts, list) or counts != [count for count in every if count in counts]:
            return None
        chosen.append(tuple(count for count in every if count in counts))
    widths, readers, together = chosen
    whole = widths[:1] == (rows[0],) and together[:1] == (pieces[0],)
    if not whole or known["step_tokens"] not in (0, step_tokens):
        return None
    return ProbeResult(widths, readers, together, int(known["step_tokens"]))


def _probe(
    programs: RolloutPrograms, params: PyTree, rows: list[int], pieces: list[int], deadline: _Deadline
) -> ProbeResult:
    """What trials find."""

    def read(count: int) -> tuple[np.ndarray, ...] | None:
        return _read(programs, params, count) if deadline.left() else None

    with concurrent.futures.ThreadPoolExecutor(available_cores(), "rrl-sizes") as pool:
        reading = [pool.submit(read, count) for count in pieces if pieces[1:]]
        step_tokens = programs.step_tokens
        found = _steps(programs, params, rows, step_tokens, pool, deadline)
        if found is None:
            step_tokens = 0
            found = _steps(programs, params, rows, step_tokens, pool, deadline)
        alike = _alike([reader.result() for reader in reading])
    assert found is not None, "steps without guesses differ from themselves"
    fewer = (count for count, is_alike in zip(pieces[1:], alike[1:], strict=True) if is_alike)
    return ProbeResult(*found, (pieces[0], *fewer), step_tokens)


def _steps(
    programs: RolloutPrograms,
    params: PyTree,
    rows: list[int],
    step_tokens: int,
    pool: concurrent.futures.Executor,
    deadline: _Deadline,
) -> tuple[Sizes, Sizes] | None:
    """Widths and readers; None where bits depend on what was guessed."""
    steps: list[tuple[int, Sizes]]
    if programs.uses_cpu_attention(nnx.merge(programs.graph, params).dtype):
        steps = [(count, ()) for count in rows[1:]]
    else:
        steps = [(count, tuple(rows[place:])) for place, count in enumerate(rows) if rows[1:]]
    if not (steps or step_tokens):
        return (rows[0],), ()

    def compiled(width: int, readers: Sizes) -> Callable[[np.ndarray], tuple[np.ndarray, ...]] | None:
        return _writer(programs, params, step_tokens, width, readers) if deadline.left() else None

    every = pool.submit(_writer, programs, params, step_tokens, rows[0], ())
    writers = [pool.submit(compiled, *step) for step in steps]
    first = every.result()(None)
    if step_tokens and not all(_alike([first, every.result()(first[0])])):
        return None
    wrote: list[tuple[np.ndarray, ...] | None] = [first]
    for writer in writers:
        run = writer.result()
        wrote.append(run(first[0]) if run is not None and deadline.left() else None)
    same = [step for step, is_alike in zip(steps, _alike(wrote)[1:], strict=True) if is_alike]
    widths = tuple(dict.fromkeys([rows[0], *(width for width, _ in same)]))
    readers = next((readers for width, readers in same if width == rows[0]), ())
    return widths, readers


def _writer(
    programs: RolloutPrograms, params: PyTree, step_tokens: int, width: int, readers: tuple[int, ...]
) -> Callable[[np.ndarray | None], tuple[np.ndarray, ...]]:
    """Compiles what returns that which the first `width` rows write in steps that take no others: ids and both log-probabilities.
    Half of them need a second block of their past, a quarter a third, and so on. It is given what rows are guessed to write."""
    count, past = programs.rows, min(4 * BLOCK, programs.config.context)
    turn = min(PROBE_TOKENS, past)
    draw = np.random.default_rng(0)
    number = np.arange(count) + 1
    blocks = np.log2(number & -number)
    position = np.clip(BLOCK * blocks + draw.integers(0, BLOCK, count), 0, past - turn).astype(np.int32)
    recent = draw.integers(0, programs.decoder_config.vocab_size, (count, RECENT)).astype(np.int32)

    def at_work() -> DecodeState:
        return DecodeState.create(count, turn)._replace(
            status=jnp.where(jnp.arange(count) < width, DECODING, OFF),
            position=jnp.asarray(position),
            recent=jnp.asarray(recent),
            request=jnp.arange(count, dtype=jnp.int32),
            limit=jnp.full(count, turn, jnp.int32),
            temperature=jnp.linspace(0.5, 1.5, count, dtype=jnp.float32),
        )

    rows, cache = _at_once(programs, at_work), _made_up(programs, params, past)
    table = np.zeros((1, programs.decoder_config.vocab_size), np.int32)
    guesses = np.zeros((count, turn), np.int32)

    @programs.jit
    def wrote(
        params: PyTree, rows: DecodeState, cache: KVCache, key: Key, guesses: jax.Array
    ) -> tuple[jax.Array, ...]:
        drafts, known = (
            NgramDrafts.create(programs.shards),
            jnp.broadcast_to(guesses[:, :1] >= 0, guesses.shape),
        )
        done, *_ = decode(
            programs.model(params),
            rows,
            cache,
            drafts.update(windows(rows.recent, guesses), guesses, known),
            programs.sampler(key, jnp.asarray(table), first_accept=1),
            context=past,
            enough=count,
            max_wait_steps=turn,
            widths=(width,),
            readers=readers,
            step_tokens=step_tokens,
        )
        return done.ids, done.logps, done.sampled_logps

    key = jax.random.key(0)
    with jax.set_mesh(programs.mesh):
        compiled = wrote.lower(params, rows, cache, key, guesses).compile()

    def run(guessed: np.ndarray | None) -> tuple[np.ndarray, ...]:
        there = np.full((count, turn), NO_TOKEN, np.int32)
        if guessed is not None:
            there[: len(guessed)] = guessed
        with jax.set_mesh(programs.mesh):
            done = compiled(params, rows, cache, key, there)
        return tuple(np.asarray(part)[:width] for part in done)

    return run


def _read(programs: RolloutPrograms, params: PyTree, count: int) -> tuple[np.ndarray, ...]:
    """Keys and values after as many pieces as are prefilled together at most have been prefilled `count` at a time."""
    pieces, size, past = (
        programs.limits.together,
        programs.limits.piece,
        min(2 * BLOCK, programs.config.context),
    )
    draw = np.random.default_rng(0)
    number = np.arange(pieces)
    # Two of them at least are one row's, one behind the other.
    others = max(1, min(programs.rows, pieces - 1))
    row = number % others
    start = draw.integers(0, max(1, past - 2 * size), programs.rows)[row] + size * (number // others)
    entries = PrefillChunk(row, start, size, *[np.zeros_like(row)] * (HEADER - 3))
    words = np.stack(np.broadcast_arrays(*entries), axis=-1)
    tokens = draw.integers(0, programs.decoder_config.vocab_size, (pieces, size))
    chunks = np.concatenate([words, tokens], axis=-1)[None].astype(np.int32)
    rows, marks = (
        _at_once(programs, lambda: DecodeState.create(programs.rows, 1)),
        np.zeros(programs.rows, np.int32),
    )

    @programs.jit
    def read(
        params: PyTree, rows: DecodeState, cache: KVCache, chunks: jax.Array, marks: jax.Array
    ) -> KVCache:
        return prefill(
            programs.model(params),
            rows,
            cache,
            NgramDrafts.create(programs.shards),
            chunks,
            marks,
            context=past,
            together=(count,),
            copies=1,
            readers=programs.prefill_readers,
        )[1]

    with jax.set_mesh(programs.mesh):
        cache = read(params, rows, _made_up(programs, params, past), chunks, marks)
    return np.asarray(cache.k), np.asarray(cache.v)


def _made_up(programs: RolloutPrograms, params: PyTree, slots: int) -> KVCache:
    """A cache full of numbers, the same whenever it is asked for."""
    dtype = nnx.merge(programs.graph, params).dtype
    cache = _at_once(programs, lambda: programs.cache(slots, dtype))
    draw = np.random.default_rng(0)
    k, v = (draw.standard_normal(part.shape, np.float32).astype(dtype) for part in (cache.k, cache.v))
    return dataclasses.replace(cache, k=jnp.asarray(k), v=jnp.asarray(v))


def _at_once(programs: RolloutPrograms, make: Callable[[], Made]) -> Made:
    """What this makes, by one program that goes with it: JAX would keep one of each operation and shape."""
    with jax.set_mesh(programs.mesh):
        return programs.jit(make)()


def _alike(made: Sequence[tuple[np.ndarray, ...] | None]) -> list[bool]:
    """Which of these are the first, or the beginning of it; what was not made is not."""
    first = made[0] if made else None
    return [
        some is not None
        and first is not None
        and all(np.array_equal(few, every[: len(few)]) for few, every in zip(some, first, strict=True))
        for some in made
    ]


def _first_layers(programs: RolloutPrograms, params: PyTree) -> tuple[RolloutPrograms, PyTree]:
    """Programs of a model of the first layers, and its parameters as a decoder reads them, with adapters that do something."""
    model = nnx.merge(programs.graph, params)
    if model.config.layers > PROBE_LAYERS:
        model.config = model.layers.config = dataclasses.replace(model.config, layers=PROBE_LAYERS)
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
    return programs, _adapted(cast_params(params, model.dtype))


def _adapted(params: PyTree) -> PyTree:
    """The parameters, with adapters that do something: those that have learned nothing yet are zero."""
    draw = np.random.default_rng(0)
    flat = {
        path: leaf.replace(jnp.asarray(draw.normal(0, 0.02, leaf.shape), leaf[...].dtype))
        if str(path[-1]).endswith(LORA_B)
        else leaf
        for path, leaf in nnx.to_flat_state(params)
    }
    return nnx.from_flat_state(flat)
