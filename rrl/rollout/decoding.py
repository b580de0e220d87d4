"""Decoding on the device: slots write until the scheduler is needed. Read `decode` first.

Pure functions of a `RolloutState`. The jitted episode loop and the host-driven reference loop use the same functions. A decode
step computes a batch of slots; each row of the batch is one slot.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from rrl.models.cache import KVCache
from rrl.models.decoder import MAX_DECODE_TOKENS, Decoder
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.rollout.decode_state import DecodeState, RolloutState
from rrl.rollout.drafts import shift_in
from rrl.rollout.exchange import (
    BLOCKED,
    DECODING,
    PAUSED,
    STOP_CONTEXT,
    STOP_EOS,
    STOP_NOT_FINITE,
    STOP_TURN,
)
from rrl.rollout.sampling import is_greedy, row_keys, sample, uniform


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """Static settings of `decode`."""

    context: int
    """Maximum length of a context."""
    wake_threshold: int
    """Number of paused slots, over all data shards, that ends decoding."""
    widths: Sequence[int]
    """Allowed numbers of rows of a step, largest first. A step has the smallest number that holds all decoding slots, or the
    largest if none does; the rows are split evenly over the devices."""
    attention_batches: Sequence[int] = ()
    """Allowed batch sizes of attention over one cache block, largest first. The rows form groups of the largest size. A whole
    group reads the first blocks. Only rows with long contexts need later blocks, so the batch shrinks to the smaller sizes
    there (`rrl.models.attention.cache_attention`). (): all rows read as many blocks as the row with the longest context."""
    step_tokens: int = 0
    """Tokens of a step over all rows, including draft tokens. 0: no drafts."""


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
    """One sampled token per row, with two log-probabilities: under the full distribution, and under the distribution from which
    it was sampled (after temperature, top-k and top-p)."""

    ids: Int[Array, "rows"]
    logps: Float[Array, "rows"]
    sampled_logps: Float[Array, "rows"]


def sample_tokens(
    model: Decoder, state: DecodeState, hidden: Float[Array, "rows T D"], sampler: Sampler, cache: KVCache
) -> list[SampledTokens]:
    """Sample one token after each of the T tokens of a row.

    If the samples before sample t equal the draft tokens, sample t is the one that decoding one token per step would give. All
    are sampled in one call, so that the bits of a log-probability do not depend on t. The cache's kernels sample if they
    computed the layers.
    """
    count, time, hidden_size = hidden.shape
    positions = (state.offset + state.position)[:, None] + jnp.arange(1, time + 1)
    keys = row_keys(sampler.key, jnp.repeat(state.seed, time), positions.ravel())
    temperature, unembedding = jnp.repeat(state.temperature, time), model.sampling_table(cache)
    truncation: dict[str, Any] = {"top_p": sampler.top_p, "top_k": sampler.top_k}
    if unembedding is None or cache.kernels is None:
        logits = model.unembed(hidden).reshape(count * time, -1)
        sampled = sample(logits, keys, temperature, **truncation)
    else:
        greedy, hidden = is_greedy(temperature), hidden.reshape(count * time, hidden_size)
        inputs = uniform(keys), jnp.where(greedy, 0.0, temperature)
        sampled = cache.kernels.sample(hidden, unembedding, *inputs, **truncation)
    ids, logps, sampled_logps = (part.reshape(count, time) for part in sampled)
    return [SampledTokens(ids[:, t], logps[:, t], sampled_logps[:, t]) for t in range(time)]


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
    rows = state.rows(slots)
    ids = sampled.ids
    finite = jnp.isfinite(sampled.logps) & jnp.isfinite(sampled.sampled_logps)
    column = jnp.where(mask & finite, rows.length, turn_tokens)
    index = (jnp.arange(count) if slots is None else slots, column)
    stop_state = jnp.where(finite, sampler.table[rows.stop_state, ids], rows.stop_state)
    length = rows.length + finite
    position = rows.position + finite
    recent = jnp.where(finite[:, None], shift_in(rows.recent, ids), rows.recent)
    is_eos = jnp.any(ids[:, None] == sampler.eos[None, :], axis=-1)
    at_stop_string = stop_state >= sampler.first_accept
    full_turn, full_context = length >= rows.turn_limit, position + 1 >= context
    stops = ~finite | at_stop_string | is_eos | full_turn | full_context
    stop = jnp.select(
        [~finite, at_stop_string, is_eos, full_turn],
        [STOP_NOT_FINITE, stop_state - sampler.first_accept, STOP_EOS, STOP_TURN],
        STOP_CONTEXT,
    )

    def masked(new: Array, old: Array) -> Array:
        """Return `old` with the new values of the rows in `mask`, at their slots."""
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
    state: RolloutState,
    sampler: Sampler,
    settings: DecodeSettings,
    max_wait_steps: int | Int[Array, ""],
) -> tuple[RolloutState, Int[Array, "2"]]:
    """Decode until the scheduler is needed.

    Decoding ends if no slot decodes, if `settings.wake_threshold` slots are paused, or after `max_wait_steps` steps if any slot
    is paused or blocked.

    Args:
      model: the policy.
      state: state of all slots.
      sampler: inputs of sampling.
      settings: static settings.
      max_wait_steps: maximum number of decode steps while any slot is paused or blocked. 0: decode no step.

    Returns:
      state, and (number of steps, number of rows that wrote, summed over the steps).
    """

    def cond(carry: tuple[RolloutState, Array], next_width: int) -> Array:
        (slots, *_), (steps, _) = carry
        paused = jnp.sum(slots.status == PAUSED)
        none_waits = jnp.all((slots.status != PAUSED) & (slots.status != BLOCKED))
        # If no slot waits for the scheduler, decode until one does.
        unlimited = none_waits & (max_wait_steps > 0)
        needs_this_width = jnp.sum(slots.status == DECODING) > next_width  # otherwise the next loop continues
        return needs_this_width & (
            unlimited | ((paused < settings.wake_threshold) & (steps < max_wait_steps))
        )

    def step(carry: tuple[RolloutState, Array], width: int) -> tuple[RolloutState, Array]:
        state, counts = carry
        state, decoding = decode_step(model, state, sampler, settings, width)
        return state, counts + jnp.stack([1, decoding])

    # One loop per width, largest first: the number of decoding slots only falls, and a branch inside one loop would copy the
    # cache.
    carry = state, jnp.zeros(2, jnp.int32)
    for width, next_width in zip(settings.widths, (*settings.widths[1:], 0), strict=True):
        carry = jax.lax.while_loop(
            functools.partial(cond, next_width=next_width), functools.partial(step, width=width), carry
        )
    return carry


def decode_step(
    model: Decoder, state: RolloutState, sampler: Sampler, settings: DecodeSettings, width: int
) -> tuple[RolloutState, Int[Array, ""]]:
    """Decode one step of `width` rows. Return the state and the number of rows that decoded.

    The step computes `tokens_per_row` tokens per row: `pending`, and the draft tokens after it. It writes the correctly drafted
    tokens and one more.
    """
    all_slots, cache, drafts = state
    slots = None if width == len(all_slots.status) else shortest(all_slots, width)
    rows = all_slots.rows(slots)
    decoding, draft_tokens = rows.status == DECODING, tokens_per_row(settings.step_tokens, width) - 1
    tokens = rows.pending[:, None]
    if draft_tokens:
        tokens = jnp.concatenate([tokens, drafts.propose(rows.recent, draft_tokens)], axis=1)
    positions = rows.position[:, None] + jnp.arange(draft_tokens + 1)
    hidden, cache = model.extend(
        tokens,
        positions=jnp.where(decoding[:, None], positions, settings.context),
        cache=cache,
        rows=slots,
        attention_batches=tuple(count for count in settings.attention_batches if count <= width),
    )
    # A row writes its samples in order, as long as each equals the draft token at its place.
    writing, written = decoding, []
    for index, sampled in enumerate(sample_tokens(model, rows, hidden, sampler, cache)):
        before = rows
        all_slots = append_tokens(all_slots, sampled, writing, sampler, settings.context, slots)
        rows = all_slots.rows(slots)
        written.append((before.recent, rows.pending, writing & (rows.length > before.length)))
        if index < draft_tokens:
            writing = writing & (rows.status == DECODING) & (rows.pending == tokens[:, index + 1])
    if draft_tokens:
        recent, next_tokens, valid = (jnp.stack(part, axis=1) for part in zip(*written, strict=True))
        drafts = drafts.update(recent, next_tokens, valid)
    return RolloutState(all_slots, cache, drafts), jnp.sum(decoding)


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
