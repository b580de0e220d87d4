"""The device's half of the rollout: decode until slots pause, then prefill what the scheduler sends.

Pure functions of a `DecodeState` and a KV cache. The jitted episode loop and the host-driven reference loop use the same
functions. Read `decode`, then `prefill`.

A slot holds one episode in flight; slot i uses row i of the KV cache. A decode step computes a batch of slots, whose entries are
called rows below.
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
from rrl.rollout.drafts import NgramDrafts, preceding_tokens, shift_in
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
    """State of all slots; A is the maximum number of tokens of a turn."""

    status: Int[Array, "slots"]
    """DECODING, PAUSED, BLOCKED or OFF."""
    stop: Int[Array, "slots"]
    """Why the slot paused: index of the stop string, or a STOP_* code."""
    position: Int[Array, "slots"]
    """Cache position at which `pending` will be written."""
    recent: Int[Array, "slots RECENT"]
    """The last tokens that were prefilled or sampled. The last of them, `pending`, is not in the cache yet."""
    stop_state: Int[Array, "slots"]
    """State of the stop automaton within this turn."""
    seed: Int[Array, "slots"]
    """Seed of the request, folded into the sampling key."""
    offset: Int[Array, "slots"]
    """Tokens of the trajectory before this context."""
    turn_limit: Int[Array, "slots"]
    """Maximum tokens of this turn, at most A."""
    temperature: Float[Array, "slots"]
    ids: Int[Array, "slots A"]
    """Tokens that the policy wrote in this turn."""
    logps: Float[Array, "slots A"]
    """Their log-probabilities under the full distribution."""
    sampled_logps: Float[Array, "slots A"]
    """Their log-probabilities under the distribution that was sampled."""
    length: Int[Array, "slots"]
    """Number of these tokens."""

    @property
    def pending(self) -> Int[Array, "slots"]:
        """The last token, whose successor is sampled next."""
        return self.recent[:, -1]

    @staticmethod
    def create(slots: int, turn_tokens: int) -> "DecodeState":
        """Return the initial state: all slots are paused and wait for their first prompt."""
        zeros = jnp.zeros(slots, jnp.int32)
        turn = (slots, turn_tokens)
        return DecodeState(
            status=jnp.full(slots, PAUSED, jnp.int32),
            stop=zeros,
            position=zeros,
            recent=jnp.full((slots, RECENT), NO_TOKEN, jnp.int32),
            stop_state=zeros,
            seed=zeros,
            offset=zeros,
            turn_limit=zeros,
            temperature=jnp.zeros(slots, jnp.float32),
            ids=jnp.zeros(turn, jnp.int32),
            logps=jnp.zeros(turn, jnp.float32),
            sampled_logps=jnp.zeros(turn, jnp.float32),
            length=zeros,
        )


class Sampler(NamedTuple):
    """Inputs of sampling besides the logits. `first_accept`, `top_p` and `top_k` are static."""

    key: Key[Array, ""]
    table: Int[Array, "states V"]
    """Transitions of the stop automaton (`rrl.rollout.automaton`)."""
    eos: Int[np.ndarray, "E"]
    """End-of-sequence token ids."""
    first_accept: int
    """First accepting state of the stop automaton."""
    top_p: float
    top_k: int
    """0 is off."""


class SampledTokens(NamedTuple):
    """One sampled token per row, with its log-probability under the full distribution and under the sampled one."""

    ids: Int[Array, "rows"]
    logps: Float[Array, "rows"]
    sampled_logps: Float[Array, "rows"]


def sample_tokens(
    model: Decoder, state: DecodeState, hidden: Float[Array, "rows T D"], sampler: Sampler, cache: KVCache
) -> list[SampledTokens]:
    """Sample T successive tokens per row, each as if the ones before it had been appended.

    All are sampled in one call, so that the bits of a token do not depend on its index. The CPU kernel
    (`rrl.models.cpu.layers`) samples if it computed the layers over this cache.
    """
    count, time, width = hidden.shape
    positions = (state.offset + state.position)[:, None] + jnp.arange(1, time + 1)
    keys = row_keys(sampler.key, jnp.repeat(state.seed, time), positions.ravel())
    temperature, table = jnp.repeat(state.temperature, time), model.sampling_table(cache)
    truncation: dict[str, Any] = {"top_p": sampler.top_p, "top_k": sampler.top_k}
    if table is None:
        logits = model.unembed(hidden).reshape(count * time, -1)
        sampled = sample(logits, keys, temperature, **truncation)
    else:
        greedy, hidden = is_greedy(temperature), hidden.reshape(count * time, width)
        inputs = uniform(keys), jnp.where(greedy, 0.0, temperature)
        sampled = cpu_draw(hidden, table, *inputs, **truncation, threads=cache.threads)
    ids, full, as_sampled = (part.reshape(count, time) for part in sampled)
    return [SampledTokens(ids[:, index], full[:, index], as_sampled[:, index]) for index in range(time)]


def append_tokens(
    state: DecodeState,
    sampled: SampledTokens,
    mask: Bool[Array, "rows"],
    sampler: Sampler,
    context: int,
    slots: Int[Array, "rows"] | None = None,
) -> DecodeState:
    """Append one token per row to its turn, and pause the slots whose turn ends.

    If a token's log-probability is not finite, the token is not appended and its slot pauses. Its logits contain NaN or +inf,
    or all are -inf.

    Args:
      state: state of all slots.
      sampled: one token per row.
      mask: rows whose token is appended.
      sampler: holds the stop automaton and the end-of-sequence tokens.
      context: maximum length of a context.
      slots: slot of each row. None: row i is slot i, for all slots.
    """
    count, turn_tokens = state.ids.shape
    rows = state if slots is None else _select(state, slots)
    ids = sampled.ids
    finite = jnp.isfinite(sampled.logps) & jnp.isfinite(sampled.sampled_logps)
    column = jnp.where(mask & finite, rows.length, turn_tokens)
    index = (jnp.arange(count) if slots is None else slots, column)
    stop_state = jnp.where(finite, sampler.table[rows.stop_state, ids], rows.stop_state)
    length = rows.length + finite
    position = rows.position + finite
    recent = jnp.where(finite[:, None], shift_in(rows.recent, ids), rows.recent)
    is_eos = jnp.any(ids[:, None] == sampler.eos[None, :], axis=-1)
    accepted = stop_state >= sampler.first_accept
    full_turn, full_context = length >= rows.turn_limit, position + 1 >= context
    stops = ~finite | accepted | is_eos | full_turn | full_context
    stop = jnp.select(
        [~finite, accepted, is_eos, full_turn],
        [STOP_NOT_FINITE, stop_state - sampler.first_accept, STOP_EOS, STOP_TURN],
        STOP_CONTEXT,
    )

    def masked(new: Array, old: Array) -> Array:
        if slots is None:
            return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        return old.at[jnp.where(mask, slots, count)].set(new, mode="drop")

    return state._replace(
        status=masked(jnp.where(stops, PAUSED, DECODING), state.status),
        stop=masked(stop, state.stop),
        position=masked(position, state.position),
        recent=masked(recent, state.recent),
        stop_state=masked(stop_state, state.stop_state),
        ids=state.ids.at[index].set(ids, mode="drop"),
        logps=state.logps.at[index].set(sampled.logps, mode="drop"),
        sampled_logps=state.sampled_logps.at[index].set(sampled.sampled_logps, mode="drop"),
        length=masked(length, state.length),
    )


def decode(
    model: Decoder,
    state: DecodeState,
    cache: KVCache,
    drafts: NgramDrafts,
    sampler: Sampler,
    *,
    context: int,
    wake_threshold: int,
    max_wait_steps: int | Int[Array, ""],
    widths: Sequence[int],
    readers: Sequence[int] = (),
    step_tokens: int = 0,
) -> tuple[DecodeState, KVCache, NgramDrafts, Int[Array, "2"]]:
    """Decode until the scheduler is needed.

    Decoding ends if no slot decodes, if `wake_threshold` slots are paused, or after `max_wait_steps` steps if any slot is
    paused or blocked. Each step computes `tokens_per_row` tokens per row: `pending`, and the draft tokens after it. It writes
    the correctly drafted tokens and one more.

    Args:
      model: the policy.
      state: state of all slots.
      cache: KV cache of all slots.
      drafts: proposes the draft tokens.
      sampler: inputs of sampling.
      context: maximum length of a context.
      wake_threshold: number of paused slots, over all data shards.
      max_wait_steps: maximum number of decode steps while any slot is paused or blocked. 0: decode no step.
      widths: allowed numbers of rows of a step, largest first. A step has the smallest number that holds all decoding slots,
        or the largest if none does; the rows are split evenly over the devices.
      readers: allowed numbers of rows whose attention reads a block of the KV cache together, largest first (see
        `rrl.models.attention.cache_attention`). (): all rows read as many blocks as the longest one.
      step_tokens: tokens of a step, including drafts; 0: no drafts.

    Returns:
      state, cache, drafts, and (number of steps, sum of the numbers of rows that wrote in each step).
    """

    def cond(carry: tuple[DecodeState, KVCache, NgramDrafts, Array], next_width: int) -> Array:
        state, *_, (steps, _) = carry
        paused = jnp.sum(state.status == PAUSED)
        none_waits = jnp.all((state.status != PAUSED) & (state.status != BLOCKED))
        unlimited = none_waits & (max_wait_steps > 0)
        needs_this_width = jnp.sum(state.status == DECODING) > next_width
        return needs_this_width & (unlimited | ((paused < wake_threshold) & (steps < max_wait_steps)))

    def step(
        carry: tuple[DecodeState, KVCache, NgramDrafts, Array], width: int
    ) -> tuple[DecodeState, KVCache, NgramDrafts, Array]:
        state, cache, drafts, counts = carry
        slots = None if width == len(state.status) else shortest(state, width)
        rows = state if slots is None else _select(state, slots)
        decoding, draft_tokens = rows.status == DECODING, tokens_per_row(step_tokens, width) - 1
        tokens = rows.pending[:, None]
        if draft_tokens:
            tokens = jnp.concatenate([tokens, drafts.propose(rows.recent, draft_tokens)], axis=1)
        positions = rows.position[:, None] + jnp.arange(draft_tokens + 1)
        hidden, cache = model.extend(
            tokens,
            positions=jnp.where(decoding[:, None], positions, context),
            cache=cache,
            rows=slots,
            readers=tuple(count for count in readers if count <= width),
        )
        accepted, written = decoding, []
        for index, sampled in enumerate(sample_tokens(model, rows, hidden, sampler, cache)):
            state, before = append_tokens(state, sampled, accepted, sampler, context, slots), rows
            rows = state if slots is None else _select(state, slots)
            written.append((before.recent, rows.pending, accepted & (rows.length > before.length)))
            if index < draft_tokens:
                accepted = accepted & (rows.status == DECODING) & (rows.pending == tokens[:, index + 1])
        if draft_tokens:
            drafts = drafts.update(*(jnp.stack(part, axis=1) for part in zip(*written, strict=True)))
        return state, cache, drafts, counts + jnp.stack([1, jnp.sum(decoding)])

    # One loop per width, largest first: the number of decoding slots only falls, and a branch inside one loop would copy the
    # cache.
    carry = state, cache, drafts, jnp.zeros(2, jnp.int32)
    for width, next_width in zip(widths, (*widths[1:], 0), strict=True):
        carry = jax.lax.while_loop(
            functools.partial(cond, next_width=next_width), functools.partial(step, width=width), carry
        )
    return carry


def tokens_per_row(step_tokens: int, width: int) -> int:
    """Return the tokens per row of a decode step of `width` rows: `step_tokens` in total, but 1 to MAX_DECODE_TOKENS per row."""
    return min(max(step_tokens // width, 1), MAX_DECODE_TOKENS)


def shortest(state: DecodeState, count: int) -> Int[Array, "count"]:
    """Return the `count` slots of the next decode step: those that decode and have the shortest trajectories.

    While requests are left, the longest trajectories wait. After the last request has started, the shorter ones catch up, so
    that all slots end at about the same time. If slots are sharded over devices, each device selects the same number of its
    own slots.
    """

    def on_one_device(status: Array, length: Array, count: int) -> Array:
        return jnp.argsort(jnp.where(status == DECODING, length, jnp.iinfo(length.dtype).max))[:count]

    length = state.offset + state.position
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return on_one_device(state.status, length, count)
    shards = data_shards(mesh)

    def on_shard(status: Array, length: Array) -> Array:
        return on_one_device(status, length, count // shards) + jax.lax.axis_index(ROW_AXES) * len(status)

    spec = PartitionSpec(ROW_AXES)
    return jax.shard_map(on_shard, in_specs=(spec, spec), out_specs=spec, check_vma=False)(
        state.status, length
    )


def _select(state: DecodeState, slots: Int[Array, "rows"]) -> DecodeState:
    """Return the state of some slots as rows, without the tokens of their turns."""
    turns = {"ids", "logps", "sampled_logps"}
    return state._replace(
        **{name: part[slots] for name, part in state._asdict().items() if name not in turns}
    )


def prefill(
    model: Decoder,
    state: DecodeState,
    cache: KVCache,
    drafts: NgramDrafts,
    chunks: Int[Array, "shards chunks chunk_length"],
    statuses: Int[Array, "slots"],
    *,
    context: int,
    chunk_counts: Sequence[int],
    copies: int,
    readers: Sequence[int] = (),
    learn_drafts: bool = False,
) -> tuple[DecodeState, KVCache, NgramDrafts]:
    """Apply a scheduler's reply: copy prefixes, prefill chunks, begin turns, set statuses.

    The last token of a turn's prompt stays pending: its logits come from a decode step, whether its past was prefilled here
    or copied.

    Args:
      model: the policy.
      state: state of all slots.
      cache: KV cache of all slots.
      drafts: the draft tables.
      chunks: headers (`rrl.rollout.exchange.PrefillChunk`), each followed by its tokens. Chunks with tokens come before empty
        ones. Slot numbers count over all shards. An unused chunk has the number of slots as its slot.
      statuses: new status of each slot + 1; 0: unchanged.
      context: maximum length of a context.
      chunk_counts: allowed numbers of chunks that are prefilled together, largest first. Each divides the one before it, and
        the first divides the number of chunks. Each is used as long as at least that many chunks are left. The smallest
        prefills the rest, padded with empty chunks.
      copies: maximum number of chunks of a shard that copy a prefix, before or after prefilling.
      readers: as in `decode`.
      learn_drafts: whether to update the draft tables with the chunks' tokens.
    """
    slot_count, shards = state.status.shape[0], chunks.shape[0]
    header = PrefillChunk(*(chunks[..., i].reshape(-1) for i in range(HEADER)))
    copying = jnp.argsort(chunks[..., PrefillChunk._fields.index("copied")] == 0, axis=1)[:, :copies]
    copy_headers = PrefillChunk(
        *(jnp.take_along_axis(chunks[..., i], copying, axis=1).reshape(-1) for i in range(HEADER))
    )
    cache = cache.copy_rows(
        copy_headers.source, copy_headers.slot, jnp.maximum(copy_headers.copied, 0), copy_headers.own
    )
    filled = jnp.max(jnp.sum(chunks[..., PrefillChunk._fields.index("length")] > 0, axis=1))

    def prefill_some(
        carry: tuple[Array, KVCache, NgramDrafts], count: int
    ) -> tuple[Array, KVCache, NgramDrafts]:
        done, cache, drafts = carry
        part = jax.lax.dynamic_slice_in_dim(chunks, done, count, axis=1).reshape(shards * count, -1)
        slot, start, length = (part[:, i] for i in range(3))
        tokens = part[:, HEADER:]
        offsets = jnp.arange(tokens.shape[1])[None, :]
        valid = offsets < length[:, None]
        positions = jnp.where(valid, start[:, None] + offsets, context)
        if learn_drafts:
            before = jnp.full((len(slot), RECENT), NO_TOKEN, jnp.int32)
            drafts = drafts.update(preceding_tokens(before, tokens), tokens, valid)
        cache = model.prefill(tokens, positions=positions, cache=cache, rows=slot, readers=readers)
        return done + count, cache, drafts

    # One loop per number of chunks: a branch inside one loop would copy the cache.
    carry = jnp.int32(0), cache, drafts
    for chunk_count in chunk_counts:
        min_chunks = 1 if chunk_count == chunk_counts[-1] else chunk_count
        carry = jax.lax.while_loop(
            lambda carry, min_chunks=min_chunks: filled - carry[0] >= min_chunks,
            functools.partial(prefill_some, count=chunk_count),
            carry,
        )
    _, cache, drafts = carry
    cache = cache.copy_rows(
        copy_headers.source, copy_headers.slot, jnp.maximum(-copy_headers.copied, 0), copy_headers.own
    )
    target = jnp.where(header.begins_turn > 0, header.slot, slot_count)

    def put(old: Array, new: Array | int) -> Array:
        return old.at[target].set(new, mode="drop")

    state = state._replace(
        status=put(jnp.where(statuses > 0, statuses - 1, state.status), DECODING),
        position=put(state.position, header.start + header.length),
        recent=put(state.recent, jnp.stack(header[-RECENT:], axis=-1)),
        stop_state=put(state.stop_state, header.stop_state),
        seed=put(state.seed, header.seed),
        offset=put(state.offset, header.offset),
        turn_limit=put(state.turn_limit, header.turn_limit),
        temperature=put(
            state.temperature,
            jax.lax.bitcast_convert_type(header.temperature.astype(jnp.int32), jnp.float32),
        ),
        length=put(state.length, 0),
    )
    return state, cache, drafts
