"""How many rows a decode step may take on one CPU, how many may read on, how many pieces are prefilled together; and whether
tokens may be guessed.

Only so many at a time as give each row the bits that it has among all, or its tokens would depend on how fast searches are: from
some shapes on, XLA cuts a product up in another way. So this is tried, with the steps that run.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Key, PyTree

from rrl.models.cache import BLOCK, KVCache
from rrl.models.decoder import LORA_B, computed
from rrl.parallel.runtime import cores_here
from rrl.rollout.device import Rows, decode_until, feed
from rrl.rollout.drafts import Drafts, windows
from rrl.rollout.exchange import HEADER, NO_TOKEN, OFF, RECENT, RUN, Feed

if TYPE_CHECKING:
    from rrl.rollout.loop import Programs

Sizes = tuple[int, ...]

NARROWED, MULTIPLE, PIECES = 16, 8, 2
"""A loop of so many rows tries steps of half as many, a quarter and so on, each a multiple of the second number, and likewise
fewer pieces to prefill, the third at least: XLA leaves out the loop over a single one, and then sums in another way."""

TRIED = 32
"""Tokens that each row writes for it. Where a normaliser is summed in another way, the last bit of some twenty-fifth to tenth of
the log-probabilities differs: of the 512 of eight rows, some twenty at least."""


class Found(NamedTuple):
    """Sizes of a loop that give all rows the bits that they have among all; each most first."""

    widths: Sizes
    """Rows that a decode step may take."""
    readers: Sizes
    """Rows that may read a block of their past together."""
    together: Sizes
    """Pieces that may be prefilled together."""
    step_tokens: int
    """Tokens that a decode step may compute: 0, where those behind a right guess have other bits than those behind none."""


def same_bits(programs: "Programs", params: PyTree) -> Found:
    """Tries all sizes."""
    dtype = nnx.merge(programs.graph, params).dtype
    params = _adapted(computed(params, dtype))
    pieces = [programs.limits.together]
    while not programs.in_kernel(dtype) and pieces[-1] > PIECES and not pieces[-1] % 2:
        pieces.append(pieces[-1] // 2)
    with concurrent.futures.ThreadPoolExecutor(cores_here(), "rrl-sizes") as pool:
        reading = [pool.submit(_read, programs, params, count) for count in pieces if pieces[1:]]
        step_tokens = programs.step_tokens
        found = _steps(programs, params, step_tokens, pool)
        if found is None:
            step_tokens = 0
            found = _steps(programs, params, step_tokens, pool)
        read = [reader.result() for reader in reading]
    assert found is not None, "steps without guesses differ from themselves"
    alike = _alike(read) if read else [True]
    together = tuple(count for count, is_alike in zip(pieces, alike, strict=True) if is_alike)
    return Found(*found, together, step_tokens)


def _steps(
    programs: "Programs", params: PyTree, step_tokens: int, pool: concurrent.futures.Executor
) -> tuple[Sizes, Sizes] | None:
    """Widths and readers; None where bits depend on what was guessed."""
    sizes = [programs.decode_rows]
    while sizes[-1] >= NARROWED and not sizes[-1] % (2 * MULTIPLE):
        sizes.append(sizes[-1] // 2)
    steps: list[tuple[int, Sizes]] = [(programs.decode_rows, ())]
    if programs.reads_compiled(nnx.merge(programs.graph, params).dtype):
        steps += [(size, ()) for size in sizes[1:]]
    else:
        steps += [(size, tuple(sizes[place:])) for place, size in enumerate(sizes) if sizes[1:]]
    writing = [pool.submit(_writer, programs, params, step_tokens, *step) for step in steps]
    first = writing[0].result()(None)
    wrote = [writer.result()(first[0]) for writer in writing]
    _, guessed, *_ = alike = _alike([first, *wrote])
    same = [step for step, is_alike in zip(steps, alike[1:], strict=True) if is_alike]
    widths = tuple(dict.fromkeys(width for width, _ in same))
    readers = next((readers for width, readers in same if width == programs.decode_rows and readers), ())
    return (widths, readers) if guessed else None


def _writer(
    programs: "Programs", params: PyTree, step_tokens: int, width: int, readers: tuple[int, ...]
) -> Callable[[np.ndarray | None], tuple[np.ndarray, ...]]:
    """Compiles what returns that which the first `width` rows write in steps that take no others: ids and both log-probabilities.
    Half of them need a second block of their past, a quarter a third, and so on. It is given what rows are guessed to write."""
    count, past = programs.rows, min(4 * BLOCK, programs.config.context)
    turn = min(TRIED, past)
    cache, draw = _made_up(programs, params, past), np.random.default_rng(0)
    number = np.arange(count) + 1
    blocks = np.log2(number & -number)
    rows = Rows.create(count, turn)._replace(
        status=jnp.where(np.arange(count) < width, RUN, OFF),
        position=jnp.asarray(
            np.clip(BLOCK * blocks + draw.integers(0, BLOCK, count), 0, past - turn), jnp.int32
        ),
        recent=jnp.asarray(draw.integers(0, programs.decoder_config.vocab_size, (count, RECENT)), jnp.int32),
        request=jnp.arange(count, dtype=jnp.int32),
        limit=jnp.full(count, turn, jnp.int32),
        temperature=jnp.linspace(0.5, 1.5, count, dtype=jnp.float32),
    )
    table = jnp.zeros((1, programs.decoder_config.vocab_size), jnp.int32)
    guesses = jnp.zeros((count, turn), jnp.int32)

    @programs.jit
    def wrote(
        params: PyTree, rows: Rows, cache: KVCache, key: Key, guesses: jax.Array
    ) -> tuple[jax.Array, ...]:
        drafts, known = Drafts.create(programs.shards), jnp.broadcast_to(guesses[:, :1] >= 0, guesses.shape)
        done, *_ = decode_until(
            programs.model(params),
            rows,
            cache,
            drafts.learn(windows(rows.recent, guesses), guesses, known),
            programs.sampler(key, table, first_accept=1),
            context=past,
            enough=count,
            patience=turn,
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
            done = compiled(params, rows, cache, key, jnp.asarray(there))
        return tuple(np.asarray(part)[:width] for part in done)

    return run


def _read(programs: "Programs", params: PyTree, count: int) -> tuple[np.ndarray, ...]:
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
    entries = Feed(row, start, size, *[np.zeros_like(row)] * (HEADER - 3))
    words = np.stack(np.broadcast_arrays(*entries), axis=-1)
    tokens = draw.integers(0, programs.decoder_config.vocab_size, (pieces, size))
    feeds = np.concatenate([words, tokens], axis=-1)[None].astype(np.int32)
    rows, marks = Rows.create(programs.rows, 1), np.zeros(programs.rows, np.int32)

    @programs.jit
    def read(params: PyTree, rows: Rows, cache: KVCache, feeds: jax.Array, marks: jax.Array) -> KVCache:
        return feed(
            programs.model(params),
            rows,
            cache,
            Drafts.create(programs.shards),
            feeds,
            marks,
            context=past,
            together=(count,),
            copies=1,
            readers=programs.alone,
        )[1]

    with jax.set_mesh(programs.mesh):
        cache = read(params, rows, _made_up(programs, params, past), jnp.asarray(feeds), jnp.asarray(marks))
    return np.asarray(cache.k), np.asarray(cache.v)


def _made_up(programs: "Programs", params: PyTree, slots: int) -> KVCache:
    """A cache full of numbers, the same whenever it is asked for."""
    dtype = nnx.merge(programs.graph, params).dtype
    cache = programs.cache(slots, dtype)
    draw = np.random.default_rng(0)
    k, v = (jnp.asarray(draw.standard_normal(part.shape, np.float32), dtype) for part in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def _alike(made: Sequence[tuple[np.ndarray, ...]]) -> list[bool]:
    """Which of these are the first, or the beginning of it."""
    return [
        all(np.array_equal(few, every[: len(few)]) for few, every in zip(some, made[0], strict=True))
        for some in made
    ]


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
