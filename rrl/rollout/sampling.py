"""Sampling that depends on the request and the position, never on the batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

_GREEDY = 1e-6
BLOCK = 128
"""Tokens of a vocabulary whose probabilities are summed first, to find the one that is drawn."""


def row_keys(base: Key[Array, ""], request: Int[Array, "B"], position: Int[Array, "B"]) -> Key[Array, "B"]:
    """One key a row: fold_in(fold_in(base, request), position)."""
    return jax.vmap(lambda r, p: jax.random.fold_in(jax.random.fold_in(base, r), p))(request, position)


def uniform(keys: Key[Array, "B"]) -> Float[Array, "B"]:
    """A number in [0, 1) of each key."""
    return jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)


def is_greedy(temperature: Float[Array, "B"]) -> Bool[Array, "B"]:
    """Which are 0, or would make logits overflow."""
    return temperature < _GREEDY


def truncate(logits: Float[Array, "B V"], *, top_p: float = 1.0, top_k: int = 0) -> Float[Array, "B V"]:
    """Sets the logits outside the top k tokens, or outside the smallest set with mass `top_p`, to -inf."""
    if top_k:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(probabilities < _top_p_threshold(probabilities, top_p), -jnp.inf, logits)
    return logits


def _top_p_threshold(probabilities: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """The largest threshold above which the probabilities still sum to `top_p`.

    SearchOutcome bit by bit: floats from 0 on are ordered like their bits. Sorting the vocabulary at each token would cost more
    than all of a small model's layers. It ends when no row has two probabilities left between what is known to keep enough
    and what is known to keep too little: then all further bits choose the same tokens.
    """

    def going(state: tuple[Array, ...]) -> Bool[Array, ""]:
        bit, _, enough, few = state
        return (bit >= 0) & jnp.any(enough - few > 1)

    def try_bit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        bit, bits, enough, few = state
        higher = bits | (jnp.int32(1) << bit)
        kept = probabilities >= jax.lax.bitcast_convert_type(higher, jnp.float32)
        mass, count = _mass_and_count(probabilities, kept)
        fits = mass >= top_p
        return (
            bit - 1,
            jnp.where(fits, higher, bits),
            jnp.where(fits, count, enough),
            jnp.where(fits, few, count),
        )

    # 1.0 is 0x3F800000, so that bit 29 is the highest a probability has.
    none = jnp.zeros((probabilities.shape[0], 1), jnp.int32)
    start = jnp.int32(29), none, jnp.full_like(none, probabilities.shape[1]), none
    return jax.lax.bitcast_convert_type(jax.lax.while_loop(going, try_bit, start)[1], jnp.float32)


def _mass_and_count(
    probabilities: Float[Array, "B V"], kept: Bool[Array, "B V"]
) -> tuple[Float[Array, "B 1"], Int[Array, "B 1"]]:
    """What is kept of each row, in one reduction: two, on a CPU, take eight times as long."""
    parts = jnp.where(kept, probabilities, 0.0), kept.astype(jnp.int32)
    start = jnp.zeros((), probabilities.dtype), jnp.int32(0)
    mass, count = jax.lax.reduce(
        parts, start, lambda one, other: (one[0] + other[0], one[1] + other[1]), (1,)
    )
    return mass[:, None], count[:, None]


def _argmax(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """As jnp.argmax, which takes ten times as long on a CPU."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    places = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # All of a row that has no best, as one of NaN, are passed by: its last token then.
    last = jnp.int32(logits.shape[-1] - 1)
    return jnp.min(jnp.where(logits == best, places, last), axis=-1)


def _inverse_cdf(probabilities: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The token in whose share of the cumulative distribution each number in [0, 1) falls; none of probability 0.

    First the block of tokens, then the token in it: one cumulative sum over all takes ten times as long on a CPU.
    """
    batch, size = probabilities.shape
    blocks = jnp.pad(probabilities, ((0, 0), (0, -size % BLOCK))).reshape(batch, -1, BLOCK)
    sums = blocks.sum(axis=-1)
    start = jnp.zeros((batch, 1), sums.dtype)
    target = uniform[:, None] * jnp.cumsum(sums, axis=-1)[:, -1:]

    def last_begun(weights: Array, start: Array) -> tuple[Array, Array]:
        """The last place with a weight that begins at the target or before, and where it begins."""
        begins = jnp.concatenate([start, start + jnp.cumsum(weights, axis=-1)[:, :-1]], axis=-1)
        places = jnp.arange(weights.shape[1], dtype=jnp.int32)
        place = jnp.max(jnp.where((weights > 0) & (begins <= target), places, 0), axis=-1, keepdims=True)
        return place, jnp.take_along_axis(begins, place, axis=-1)

    block, begin = last_begun(sums, start)
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * BLOCK + last_begun(inside, begin)[0])[:, 0]


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Draws one token a row by inverting the cumulative distribution: one random number a row, whatever V.

    Temperature 0 is greedy. Returns ids, their log-probability under the full distribution (temperature 1, not
    truncated) and under the distribution that was sampled (0 for greedy rows).
    """
    greedy = is_greedy(temperature)
    best = _argmax(logits)

    def draw() -> tuple[Array, Array]:
        scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
        scaled = jax.nn.log_softmax(truncate(scaled, top_p=top_p, top_k=top_k), axis=-1)
        drawn = _inverse_cdf(jnp.exp(scaled), uniform(keys))
        ids = jnp.where(greedy, best, drawn)
        sampled = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
        return ids, jnp.where(greedy, 0.0, sampled)

    # Evaluations draw nothing: most of the cost of a small model's sampling is not theirs.
    ids, sampled = jax.lax.cond(jnp.all(greedy), lambda: (best, jnp.zeros_like(logits[:, 0])), draw)
    full = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids[:, None], axis=-1)[:, 0]
    return ids, full, sampled
