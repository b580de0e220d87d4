"""The device's side of an episode batch: decoding until rows pause, and feeding rows what the host answers.

Pure functions over `Rows` and a KV cache; the jitted loop and the host-driven reference loop share them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from rrl.models.cache import KVCache
from rrl.models.decoder import Decoder
from rrl.rollout.host import HEADER, OFF, RUN, STOP_CONTEXT, STOP_EOS, STOP_TURN, WAIT
from rrl.rollout.sampling import row_keys, sample


class Rows(NamedTuple):
    """State of every row; R rows, at most A tokens a turn."""

    status: Int[Array, "R"]
    """RUN, WAIT or OFF."""
    stop: Int[Array, "R"]
    """Why the row pauses: index of the stop string, or a STOP_* code."""
    position: Int[Array, "R"]
    """Position of `pending`: the slot it will be written to."""
    pending: Int[Array, "R"]
    """The last sampled token; not yet in the cache."""
    tag: Int[Array, "R"]
    """State of the stop automaton within this turn."""
    request: Int[Array, "R"]
    temperature: Float[Array, "R"]
    ids: Int[Array, "R A"]
    """What the policy wrote in this turn, with both log-probabilities."""
    logps: Float[Array, "R A"]
    sampled_logps: Float[Array, "R A"]
    length: Int[Array, "R"]

    @staticmethod
    def create(rows: int, turn_tokens: int) -> "Rows":
        """All rows wait for their first prompt."""
        zeros = jnp.zeros(rows, jnp.int32)
        turn = (rows, turn_tokens)
        return Rows(
            status=jnp.full(rows, WAIT, jnp.int32),
            stop=zeros,
            position=zeros,
            pending=zeros,
            tag=zeros,
            request=zeros,
            temperature=jnp.ones(rows, jnp.float32),
            ids=jnp.zeros(turn, jnp.int32),
            logps=jnp.zeros(turn, jnp.float32),
            sampled_logps=jnp.zeros(turn, jnp.float32),
            length=zeros,
        )


class Sampler(NamedTuple):
    """What sampling needs besides the logits; `first_accept`, `top_p`, `top_k` are static."""

    key: Key[Array, ""]
    table: Int[Array, "states V"]
    eos: Int[Array, "E"]
    first_accept: int
    top_p: float
    top_k: int


def emit(
    rows: Rows, logits: Float[Array, "R V"], mask: Bool[Array, "R"], sampler: Sampler, context: int
) -> Rows:
    """Samples one token for the rows in `mask`, appends it to their turn, and pauses those that must stop."""
    keys = row_keys(sampler.key, rows.request, rows.position + 1)
    ids, full, drawn = sample(logits, keys, rows.temperature, top_p=sampler.top_p, top_k=sampler.top_k)
    turn_tokens = rows.ids.shape[1]
    column = jnp.where(mask, rows.length, turn_tokens)
    index = (jnp.arange(rows.length.shape[0]), column)
    tag = sampler.table[rows.tag, ids]
    length = rows.length + 1
    position = rows.position + 1
    is_eos = jnp.any(ids[:, None] == sampler.eos[None, :], axis=-1)
    accepted = tag >= sampler.first_accept
    full_turn, full_context = length >= turn_tokens, position + 1 >= context
    stops = accepted | is_eos | full_turn | full_context
    stop = jnp.select(
        [accepted, is_eos, full_turn], [tag - sampler.first_accept, STOP_EOS, STOP_TURN], STOP_CONTEXT
    )

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(mask, new, old)

    return rows._replace(
        status=chosen(jnp.where(stops, WAIT, RUN), rows.status),
        stop=chosen(stop, rows.stop),
        position=chosen(position, rows.position),
        pending=chosen(ids, rows.pending),
        tag=chosen(tag, rows.tag),
        ids=rows.ids.at[index].set(ids, mode="drop"),
        logps=rows.logps.at[index].set(full, mode="drop"),
        sampled_logps=rows.sampled_logps.at[index].set(drawn, mode="drop"),
        length=chosen(length, rows.length),
    )


def decode_until(
    model: Decoder, rows: Rows, cache: KVCache, sampler: Sampler, *, context: int, enough: int, patience: int
) -> tuple[Rows, KVCache]:
    """Decodes until `enough` rows wait, or some have waited for `patience` steps, or no row runs."""

    def going(state: tuple[Rows, KVCache, Array]) -> Array:
        rows, _, steps = state
        waiting = jnp.sum(rows.status == WAIT)
        wanted = (waiting == 0) | ((waiting < enough) & (steps < patience))
        return jnp.any(rows.status == RUN) & wanted

    def step(state: tuple[Rows, KVCache, Array]) -> tuple[Rows, KVCache, Array]:
        rows, cache, steps = state
        running = rows.status == RUN
        slots = jnp.where(running, rows.position, context)
        hidden, cache = model.extend(rows.pending[:, None], positions=slots[:, None], cache=cache)
        return emit(rows, model.unembed(hidden[:, 0]), running, sampler, context), cache, steps + 1

    rows, cache, _ = jax.lax.while_loop(going, step, (rows, cache, jnp.int32(0)))
    return rows, cache


def feed(
    model: Decoder,
    rows: Rows,
    cache: KVCache,
    feeds: Int[Array, "P words"],
    off: Bool[Array, "R"],
    sampler: Sampler,
    *,
    context: int,
) -> tuple[Rows, KVCache]:
    """Prefills what the host sent and samples the first token of the turns that begin.

    `feeds[p]` is (row, start, length, begin, request, temperature bits, tokens ...), with global row numbers; a row
    number of R is no row.
    """
    count = rows.status.shape[0]
    row, start, length, begin, request = (feeds[:, i] for i in range(5))
    temperature = jax.lax.bitcast_convert_type(feeds[:, 5], jnp.float32)
    tokens = feeds[:, HEADER:]
    offsets = jnp.arange(tokens.shape[1])[None, :]
    slots = jnp.where(offsets < length[:, None], start[:, None] + offsets, context)
    hidden, cache = model.extend(tokens, positions=slots, cache=cache, rows=row)
    last = jnp.maximum(length - 1, 0)
    logits = model.unembed(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    target = jnp.where(begin > 0, row, count)

    def put(old: Array, new: Array | int) -> Array:
        return old.at[target].set(new, mode="drop")

    rows = rows._replace(
        position=put(rows.position, start + last),
        tag=put(rows.tag, 0),
        request=put(rows.request, request),
        temperature=put(rows.temperature, temperature),
        length=put(rows.length, 0),
    )
    begun = put(jnp.zeros(count, bool), True)
    row_logits = jnp.zeros((count, logits.shape[-1]), logits.dtype).at[target].set(logits, mode="drop")
    rows = emit(rows, row_logits, begun, sampler, context)
    return rows._replace(status=jnp.where(off, OFF, rows.status)), cache
