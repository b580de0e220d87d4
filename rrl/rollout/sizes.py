"""How many rows a decode step may take on one CPU, how many may read on, how many pieces are prefilled together.

Only so many at a time as give each row the bits that it has among all, or its tokens would depend on how fast searches are: from
some shapes on, XLA cuts a product up in another way. So this is tried, with the steps that run.
"""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Key, PyTree

from rrl.models.cache import BLOCK, KVCache
from rrl.models.decoder import LORA_B, computed
from rrl.parallel.runtime import cores_here
from rrl.rollout.device import Rows, decode_until, feed
from rrl.rollout.exchange import HEADER, OFF, RUN, Feed

if TYPE_CHECKING:
    from rrl.rollout.loop import Programs

Sizes = tuple[int, ...]

NARROWED, MULTIPLE, PIECES = 16, 8, 2
"""A loop of so many rows tries steps of half as many, a quarter and so on, each a multiple of the second number, and likewise
fewer pieces to prefill, the third at least: XLA leaves out the loop over a single one, and then sums in another way."""

TRIED = 32
"""Tokens that each row writes for it. Where a normaliser is summed in another way, the last bit of some twenty-fifth to tenth of
the log-probabilities differs: of the 512 of eight rows, some twenty at least."""


def same_bits(programs: "Programs", params: PyTree) -> tuple[Sizes, Sizes, Sizes]:
    """Rows that a decode step may take, rows that may read a block of their past together, pieces that may be prefilled together;
    each most first."""
    params = _adapted(computed(params, nnx.merge(programs.graph, params).dtype))
    sizes, pieces = [programs.decode_rows], [programs.limits.together]
    while not sizes[-1] % (2 * MULTIPLE):
        sizes.append(sizes[-1] // 2)
    while pieces[-1] > PIECES and not pieces[-1] % 2:
        pieces.append(pieces[-1] // 2)
    steps: list[tuple[int, Sizes]] = [(programs.decode_rows, ())]
    steps += [(size, tuple(sizes[place:])) for place, size in enumerate(sizes) if sizes[1:]]
    with concurrent.futures.ThreadPoolExecutor(cores_here(), "rrl-sizes") as pool:
        wrote = pool.map(lambda step: _wrote(programs, params, *step), steps)
        read = pool.map(lambda count: _read(programs, params, count), pieces)
    same = [step for step, alike in zip(steps, _alike(list(wrote)), strict=True) if alike]
    widths = tuple(dict.fromkeys(width for width, _ in same))
    readers = next((readers for width, readers in same if width == programs.decode_rows and readers), ())
    together = tuple(count for count, alike in zip(pieces, _alike(list(read)), strict=True) if alike)
    return widths, readers, together


def _wrote(
    programs: "Programs", params: PyTree, width: int, readers: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """What the first `width` rows write in some steps that take no others: ids and both log-probabilities. Half of them need
    a second block of their past, a quarter a third, and so on."""
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
        pending=jnp.asarray(draw.integers(0, programs.decoder_config.vocab_size, count), jnp.int32),
        request=jnp.arange(count, dtype=jnp.int32),
        limit=jnp.full(count, turn, jnp.int32),
        temperature=jnp.linspace(0.5, 1.5, count, dtype=jnp.float32),
    )
    table = jnp.zeros((1, programs.decoder_config.vocab_size), jnp.int32)

    @programs.jit
    def wrote(params: PyTree, rows: Rows, cache: KVCache, key: Key) -> tuple[jax.Array, ...]:
        done, *_ = decode_until(
            nnx.merge(programs.graph, params),
            rows,
            cache,
            programs.sampler(key, table, first_accept=1),
            context=past,
            enough=count,
            patience=turn,
            widths=(width,),
            readers=readers,
        )
        return done.ids, done.logps, done.sampled_logps

    with jax.set_mesh(programs.mesh):
        return tuple(np.asarray(part)[:width] for part in wrote(params, rows, cache, jax.random.key(0)))


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
        model = nnx.merge(programs.graph, params)
        return feed(
            model,
            rows,
            cache,
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
    cache = KVCache.create(programs.decoder_config, programs.rows, slots, dtype, slots_last=programs.on_cpu)
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
