"""The device's side of an episode batch: decoding until rows pause, and feeding rows what the host answers.

Pure functions over `DecodeState` and a KV cache; the jitted loop and the host-driven reference loop share them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from rrl.models.cache import KVCache
from rrl.models.cpu.layers import cpu_draw
from rrl.models.decoder import MAX_DECODE_TOKENS, Decoder
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.rollout.drafts import NgramDrafts, following, windows
from rrl.rollout.exchange import (
    BLOCKED,
    DECODING,
    HEADER,
    NO_TOKEN,
    PAUSED,
    RECENT,
    STOP_CONTEXT,
    STOP_EOS,
    STOP_NOT_FINITE,
    STOP_TURN,
    PrefillChunk,
)
from rrl.rollout.sampling import is_greedy, row_keys, sample, uniform


class DecodeState(NamedTuple):
    """State of every row; R rows, at most A tokens a turn."""

    status: Int[Array, "R"]
    """DECODING, PAUSED, BLOCKED or OFF."""
    stop: Int[Array, "R"]
    """Why the row pauses: index of the stop string, or a STOP_* code."""
    position: Int[Array, "R"]
    """Position of `pending`: the slot it will be written to."""
    recent: Int[Array, "R RECENT"]
    """The last tokens of what was fed or sampled; the very last, `pending`, is not yet in the cache."""
    tag: Int[Array, "R"]
    """State of the stop automaton within this turn."""
    request: Int[Array, "R"]
    offset: Int[Array, "R"]
    """Tokens of the trajectory before this context: where its position 0 is."""
    limit: Int[Array, "R"]
    """Most tokens of a turn, at most A."""
    temperature: Float[Array, "R"]
    ids: Int[Array, "R A"]
    """What the policy wrote in this turn, with both log-probabilities."""
    logps: Float[Array, "R A"]
    sampled_logps: Float[Array, "R A"]
    length: Int[Array, "R"]

    @property
    def pending(self) -> Int[Array, "R"]:
        """The last token."""
        return self.recent[:, -1]

    @staticmethod
    def create(rows: int, turn_tokens: int) -> "DecodeState":
        """All rows wait for their first prompt."""
        zeros = jnp.zeros(rows, jnp.int32)
        turn = (rows, turn_tokens)
        return DecodeState(
            status=jnp.full(rows, PAUSED, jnp.int32),
            stop=zeros,
            position=zeros,
            recent=jnp.full((rows, RECENT), NO_TOKEN, jnp.int32),
            tag=zeros,
            request=zeros,
            offset=zeros,
            limit=zeros,
            temperature=jnp.zeros(rows, jnp.float32),
            ids=jnp.zeros(turn, jnp.int32),
            logps=jnp.zeros(turn, jnp.float32),
            sampled_logps=jnp.zeros(turn, jnp.float32),
            length=zeros,
        )


class Sampler(NamedTuple):
    """What sampling needs besides the logits; `first_accept`, `top_p`, `top_k` are static."""

    key: Key[Array, ""]
    table: Int[Array, "states V"]
    eos: Int[np.ndarray, "E"]
    first_accept: int
    top_p: float
    top_k: int


class SampledTokens(NamedTuple):
    """A token for each of P rows, with its log-probability under the full distribution and as sampled."""

    ids: Int[Array, "P"]
    logps: Float[Array, "P"]
    sampled_logps: Float[Array, "P"]


def sample_tokens(
    model: Decoder, rows: DecodeState, hidden: Float[Array, "P T D"], sampler: Sampler, cache: KVCache
) -> list[SampledTokens]:
    """T tokens for each of P rows, each as if those before it were the row's. They are drawn together, so that the bits of one
    do not depend on its place among them; by `rrl.models.cpu.layers`, where that computed the layers over this cache."""
    count, time, width = hidden.shape
    positions = (rows.offset + rows.position)[:, None] + jnp.arange(1, time + 1)
    keys = row_keys(sampler.key, jnp.repeat(rows.request, time), positions.ravel())
    temperature, table = jnp.repeat(rows.temperature, time), model.sampling_table(cache)
    kept: dict[str, Any] = {"top_p": sampler.top_p, "top_k": sampler.top_k}
    if table is None:
        drawn = sample(model.unembed(hidden).reshape(count * time, -1), keys, temperature, **kept)
    else:
        greedy, hidden = is_greedy(temperature), hidden.reshape(count * time, width)
        asked = uniform(keys), jnp.where(greedy, 0.0, temperature)
        drawn = cpu_draw(hidden, table, *asked, **kept, threads=cache.threads)
    ids, full, as_sampled = (part.reshape(count, time) for part in drawn)
    return [SampledTokens(ids[:, place], full[:, place], as_sampled[:, place]) for place in range(time)]


def append_tokens(
    rows: DecodeState,
    drawn: SampledTokens,
    mask: Bool[Array, "P"],
    sampler: Sampler,
    context: int,
    which: Int[Array, "P"] | None = None,
) -> DecodeState:
    """Appends the tokens of those of P rows that are in `mask` to their turn, and pauses those that must stop.

    A token without a finite log-probability is not appended, and stops its row: its logits are no distribution, since one of
    them is NaN or +inf, or all are -inf.

    `which` rows these are; None: the p-th is row p, and P = R.
    """
    count, turn_tokens = rows.ids.shape
    of = rows if which is None else _select(rows, which)
    ids = drawn.ids
    finite = jnp.isfinite(drawn.logps) & jnp.isfinite(drawn.sampled_logps)
    column = jnp.where(mask & finite, of.length, turn_tokens)
    index = (jnp.arange(count) if which is None else which, column)
    tag = jnp.where(finite, sampler.table[of.tag, ids], of.tag)
    length = of.length + finite
    position = of.position + finite
    recent = jnp.where(finite[:, None], following(of.recent, ids), of.recent)
    is_eos = jnp.any(ids[:, None] == sampler.eos[None, :], axis=-1)
    accepted = tag >= sampler.first_accept
    full_turn, full_context = length >= of.limit, position + 1 >= context
    stops = ~finite | accepted | is_eos | full_turn | full_context
    stop = jnp.select(
        [~finite, accepted, is_eos, full_turn],
        [STOP_NOT_FINITE, tag - sampler.first_accept, STOP_EOS, STOP_TURN],
        STOP_CONTEXT,
    )

    def chosen(new: Array, old: Array) -> Array:
        if which is None:
            return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        return old.at[jnp.where(mask, which, count)].set(new, mode="drop")

    return rows._replace(
        status=chosen(jnp.where(stops, PAUSED, DECODING), rows.status),
        stop=chosen(stop, rows.stop),
        position=chosen(position, rows.position),
        recent=chosen(recent, rows.recent),
        tag=chosen(tag, rows.tag),
        ids=rows.ids.at[index].set(ids, mode="drop"),
        logps=rows.logps.at[index].set(drawn.logps, mode="drop"),
        sampled_logps=rows.sampled_logps.at[index].set(drawn.sampled_logps, mode="drop"),
        length=chosen(length, rows.length),
    )


def decode(
    model: Decoder,
    rows: DecodeState,
    cache: KVCache,
    drafts: NgramDrafts,
    sampler: Sampler,
    *,
    context: int,
    enough: int,
    max_wait_steps: int | Int[Array, ""],
    widths: Sequence[int],
    readers: Sequence[int] = (),
    step_tokens: int = 0,
) -> tuple[DecodeState, KVCache, NgramDrafts, Int[Array, "2"]]:
    """Decodes until `enough` rows wait, or some have waited or been held for `max_wait_steps` (0: not at all), or no row runs.

    A step takes as many rows as the narrowest of `widths` that has room for all that run, or the widest, which is their
    first, where none has; the same number on each device that has rows. Of them `readers` read their past together, those of
    these numbers that are not more (see `Decoder.extend`). Of each row it computes `tokens_per_row`: the next, and what `drafts`
    guesses behind it. It writes as many as were guessed right, and one more. Returns also how many steps it took, and how many
    rows wrote in each, added up.
    """

    def going(state: tuple[DecodeState, KVCache, NgramDrafts, Array], narrower: int) -> Array:
        rows, *_, (steps, _) = state
        waiting = jnp.sum(rows.status == PAUSED)
        nobody = jnp.all((rows.status != PAUSED) & (rows.status != BLOCKED)) & (max_wait_steps > 0)
        too_many = jnp.sum(rows.status == DECODING) > narrower
        return too_many & (nobody | ((waiting < enough) & (steps < max_wait_steps)))

    def step(
        state: tuple[DecodeState, KVCache, NgramDrafts, Array], width: int
    ) -> tuple[DecodeState, KVCache, NgramDrafts, Array]:
        rows, cache, drafts, counts = state
        which = None if width == len(rows.status) else shortest(rows, width)
        of = rows if which is None else _select(rows, which)
        running, guesses = of.status == DECODING, tokens_per_row(step_tokens, width) - 1
        tokens = of.pending[:, None]
        if guesses:
            tokens = jnp.concatenate([tokens, drafts.propose(of.recent, guesses)], axis=1)
        slots = of.position[:, None] + jnp.arange(guesses + 1)
        hidden, cache = model.extend(
            tokens,
            positions=jnp.where(running[:, None], slots, context),
            cache=cache,
            rows=which,
            readers=tuple(count for count in readers if count <= width),
        )
        accepted, wrote = running, []
        for place, drawn in enumerate(sample_tokens(model, of, hidden, sampler, cache)):
            rows, before = append_tokens(rows, drawn, accepted, sampler, context, which), of
            of = rows if which is None else _select(rows, which)
            wrote.append((before.recent, of.pending, accepted & (of.length > before.length)))
            if place < guesses:
                accepted = accepted & (of.status == DECODING) & (of.pending == tokens[:, place + 1])
        if guesses:
            drafts = drafts.update(*(jnp.stack(part, axis=1) for part in zip(*wrote, strict=True)))
        return rows, cache, drafts, counts + jnp.stack([1, jnp.sum(running)])

    # One after the other: nothing begins to run meanwhile, and a choice within one loop would copy the cache.
    state = rows, cache, drafts, jnp.zeros(2, jnp.int32)
    for width, narrower in zip(widths, (*widths[1:], 0), strict=True):
        state = jax.lax.while_loop(
            functools.partial(going, narrower=narrower), functools.partial(step, width=width), state
        )
    return state


def tokens_per_row(step_tokens: int, width: int) -> int:
    """How many a decode step of `width` rows computes: together `step_tokens`, but one at least and MAX_DECODE_TOKENS at most."""
    return min(max(step_tokens // width, 1), MAX_DECODE_TOKENS)


def shortest(rows: DecodeState, count: int) -> Int[Array, "count"]:
    """The rows that decode next, where not all do: those that run and have come least far, so that once no more requests come all
    end at about the same time; until then the longest wait for those that follow. Where rows are split over devices, each takes
    as many of its own."""

    def on_one(status: Array, length: Array, count: int) -> Array:
        return jnp.argsort(jnp.where(status == DECODING, length, jnp.iinfo(length.dtype).max))[:count]

    length = rows.offset + rows.position
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return on_one(rows.status, length, count)
    shards = data_shards(mesh)

    def of_shard(status: Array, length: Array) -> Array:
        return on_one(status, length, count // shards) + jax.lax.axis_index(ROW_AXES) * len(status)

    spec = PartitionSpec(ROW_AXES)
    return jax.shard_map(of_shard, in_specs=(spec, spec), out_specs=spec, check_vma=False)(
        rows.status, length
    )


def _select(rows: DecodeState, which: Int[Array, "P"]) -> DecodeState:
    """The state of some rows, but for what they wrote."""
    wrote = {"ids", "logps", "sampled_logps"}
    return rows._replace(**{name: part[which] for name, part in rows._asdict().items() if name not in wrote})


def prefill(
    model: Decoder,
    rows: DecodeState,
    cache: KVCache,
    drafts: NgramDrafts,
    chunks: Int[Array, "shards P words"],
    marks: Int[Array, "R"],
    *,
    context: int,
    together: Sequence[int],
    copies: int,
    readers: Sequence[int] = (),
    learns: bool = False,
) -> tuple[DecodeState, KVCache, NgramDrafts]:
    """Does what the host sent (`rrl.rollout.exchange.PrefillChunk`): copies prefixes, prefills tokens, begins turns, marks rows.

    Row numbers are global, R is no row. Of a shard's P pieces at most `copies` copy a prefix, before all are prefilled or, where
    that is what they copy, after; those with tokens come first.
    Of them are prefilled `together` at a time: as many as the first of these, as long as there are, then the second, and so on;
    the last are made up with pieces that have none. Each divides the one before it, and the first P. What begins a turn is left
    pending, so that its logits come from decoding whether its past was prefilled here or copied. Where the
    drafts are to learn, they learn what stands in each piece.
    """
    count, shards = rows.status.shape[0], chunks.shape[0]
    entry = PrefillChunk(*(chunks[..., i].reshape(-1) for i in range(HEADER)))
    first = jnp.argsort(chunks[..., PrefillChunk._fields.index("copied")] == 0, axis=1)[:, :copies]
    copied = PrefillChunk(
        *(jnp.take_along_axis(chunks[..., i], first, axis=1).reshape(-1) for i in range(HEADER))
    )
    cache = cache.copy_rows(copied.source, copied.row, jnp.maximum(copied.copied, 0), copied.kept)
    busy = jnp.max(jnp.sum(chunks[..., PrefillChunk._fields.index("length")] > 0, axis=1))

    def prefill(state: tuple[Array, KVCache, NgramDrafts], count: int) -> tuple[Array, KVCache, NgramDrafts]:
        done, cache, drafts = state
        part = jax.lax.dynamic_slice_in_dim(chunks, done, count, axis=1).reshape(shards * count, -1)
        row, start, length = (part[:, i] for i in range(3))
        tokens = part[:, HEADER:]
        offsets = jnp.arange(tokens.shape[1])[None, :]
        valid = offsets < length[:, None]
        slots = jnp.where(valid, start[:, None] + offsets, context)
        if learns:
            none = jnp.full((len(row), RECENT), NO_TOKEN, jnp.int32)
            drafts = drafts.update(windows(none, tokens), tokens, valid)
        cache = model.prefill(tokens, positions=slots, cache=cache, rows=row, readers=readers)
        return done + count, cache, drafts

    # One after the other: a choice among them would copy the cache.
    state = jnp.int32(0), cache, drafts
    for pieces in together:
        least = 1 if pieces == together[-1] else pieces
        state = jax.lax.while_loop(
            lambda state, least=least: busy - state[0] >= least,
            functools.partial(prefill, count=pieces),
            state,
        )
    _, cache, drafts = state
    cache = cache.copy_rows(copied.source, copied.row, jnp.maximum(-copied.copied, 0), copied.kept)
    target = jnp.where(entry.begin > 0, entry.row, count)

    def put(old: Array, new: Array | int) -> Array:
        return old.at[target].set(new, mode="drop")

    rows = rows._replace(
        status=put(jnp.where(marks > 0, marks - 1, rows.status), DECODING),
        position=put(rows.position, entry.start + entry.length),
        recent=put(rows.recent, jnp.stack(entry[-RECENT:], axis=-1)),
        tag=put(rows.tag, entry.tag),
        request=put(rows.request, entry.request),
        offset=put(rows.offset, entry.offset),
        limit=put(rows.limit, entry.limit),
        temperature=put(
            rows.temperature, jax.lax.bitcast_convert_type(entry.temperature.astype(jnp.int32), jnp.float32)
        ),
        length=put(rows.length, 0),
    )
    return rows, cache, drafts
