"""Prefilling on the device: apply what a scheduler sends. Copy prefixes, prefill chunks, begin turns. Read `prefill` first."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rrl.models.cache import KVCache
from rrl.models.decoder import Decoder
from rrl.rollout.decode_state import DecodeState, RolloutState
from rrl.rollout.drafts import NgramDrafts, preceding_tokens
from rrl.rollout.exchange import DECODING, HEADER_LENGTH, NO_TOKEN, RECENT_TOKENS, PrefillChunk


@dataclasses.dataclass(frozen=True)
class PrefillSettings:
    """Static settings of `prefill`."""

    context: int
    """Maximum length of a context."""
    chunk_counts: Sequence[int]
    """Allowed numbers of chunks that are prefilled together, largest first. Each divides the one before it, and the first
    divides the number of chunks of a reply."""
    max_copies: int
    """Maximum number of chunks of a data shard that copy a prefix, before or after prefilling."""
    attention_batches: Sequence[int] = ()
    """As in `DecodeSettings`."""
    learn_drafts: bool = False
    """Whether to update the draft tables with the prefilled tokens."""


def prefill(
    model: Decoder,
    state: RolloutState,
    chunks: Int[Array, "shards chunks chunk_length"],
    statuses: Int[Array, "slots"],
    settings: PrefillSettings,
) -> RolloutState:
    """Apply a scheduler's reply: copy prefixes, prefill chunks, begin turns, set statuses.

    The last token before a turn stays pending. So its logits always come from a decode step, whether the tokens before it
    were prefilled here or copied.

    Args:
      model: the policy.
      state: state of all slots.
      chunks: headers (`rrl.rollout.exchange.PrefillChunk`), each followed by its tokens. Chunks with tokens come before empty
        ones. Slot numbers count over all shards. An unused chunk has the number of slots as its slot.
      statuses: new status of each slot + 1; 0: unchanged.
      settings: static settings.
    """
    headers = PrefillChunk.of(chunks)
    # The chunks that copy come first.
    copying = jnp.argsort(headers.copied == 0, axis=1)[:, : settings.max_copies]
    copies = PrefillChunk(*(jnp.take_along_axis(field, copying, axis=1).reshape(-1) for field in headers))
    cache = _copy_prefixes(state.cache, copies, copies.copied)
    cache, drafts = _prefill_chunks(model, cache, state.drafts, chunks, settings)
    cache = _copy_prefixes(cache, copies, -copies.copied)  # a negative number: copy after prefilling
    slots = _begin_turns(state.slots, PrefillChunk(*(field.reshape(-1) for field in headers)), statuses)
    return RolloutState(slots, cache, drafts)


def _copy_prefixes(cache: KVCache, headers: PrefillChunk, count: Int[Array, "copies"]) -> KVCache:
    """Copy `count` cache positions from each chunk's source to its slot; none if `count` is negative."""
    return cache.copy_rows(headers.source, headers.slot, jnp.maximum(count, 0), headers.held)


def _prefill_chunks(
    model: Decoder,
    cache: KVCache,
    drafts: NgramDrafts,
    chunks: Int[Array, "shards chunks chunk_length"],
    settings: PrefillSettings,
) -> tuple[KVCache, NgramDrafts]:
    """Prefill all chunks with tokens: first as many as possible at a time, then fewer.

    The last of `chunk_counts` prefills what is left, padded with empty chunks.
    """
    shards = chunks.shape[0]
    filled_chunks = jnp.max(jnp.sum(PrefillChunk.of(chunks).length > 0, axis=1))

    def prefill_some(
        carry: tuple[Array, KVCache, NgramDrafts], count: int
    ) -> tuple[Array, KVCache, NgramDrafts]:
        done, cache, drafts = carry
        part = jax.lax.dynamic_slice_in_dim(chunks, done, count, axis=1).reshape(shards * count, -1)
        header, tokens = PrefillChunk.of(part), part[:, HEADER_LENGTH:]
        offsets = jnp.arange(tokens.shape[1])[None, :]
        valid = offsets < header.length[:, None]
        positions = jnp.where(valid, header.start[:, None] + offsets, settings.context)
        if settings.learn_drafts:
            # The tokens before a chunk are not sent with it.
            before = jnp.full((len(header.slot), RECENT_TOKENS), NO_TOKEN, jnp.int32)
            drafts = drafts.update(preceding_tokens(before, tokens), tokens, valid)
        cache = model.prefill(
            tokens,
            positions=positions,
            cache=cache,
            rows=header.slot,
            attention_batches=settings.attention_batches,
        )
        return done + count, cache, drafts

    # One loop per number of chunks: a branch inside one loop would copy the cache.
    carry = jnp.int32(0), cache, drafts
    for count in settings.chunk_counts:
        min_chunks = 1 if count == settings.chunk_counts[-1] else count
        carry = jax.lax.while_loop(
            lambda carry, min_chunks=min_chunks: filled_chunks - carry[0] >= min_chunks,
            functools.partial(prefill_some, count=count),
            carry,
        )
    return carry[1:]


def _begin_turns(state: DecodeState, header: PrefillChunk, statuses: Int[Array, "slots"]) -> DecodeState:
    """Set the statuses, and begin a turn in the slot of each chunk with `begins_turn`."""
    target = jnp.where(header.begins_turn > 0, header.slot, len(state.status))  # other chunks: no slot

    def put(old: Array, new: Array | int) -> Array:
        return old.at[target].set(new, mode="drop")

    return state._replace(
        status=put(jnp.where(statuses > 0, statuses - 1, state.status), DECODING),
        position=put(state.position, header.start + header.length),
        recent=put(state.recent, jnp.stack(header[-RECENT_TOKENS:], axis=-1)),
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
