"""Sampling of tokens. A sample depends on the request and the position, never on the rest of the batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

_GREEDY_BELOW = 1e-6
"""Temperatures below this count as greedy. Dividing the logits by a temperature near 0 would overflow."""
SUM_BLOCK = 128
"""Size of the blocks of the vocabulary whose probabilities are summed first."""


def row_keys(base: Key[Array, ""], seed: Int[Array, "B"], position: Int[Array, "B"]) -> Key[Array, "B"]:
    """Return one key per row: fold_in(fold_in(base, seed), position)."""
    return jax.vmap(lambda s, p: jax.random.fold_in(jax.random.fold_in(base, s), p))(seed, position)


def uniform(keys: Key[Array, "B"]) -> Float[Array, "B"]:
    """Return a uniform number in [0, 1) per key."""
    return jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)


def is_greedy(temperature: Float[Array, "B"]) -> Bool[Array, "B"]:
    """Return which temperatures mean greedy decoding."""
    return temperature < _GREEDY_BELOW


def truncate(logits: Float[Array, "B V"], *, top_p: float = 1.0, top_k: int = 0) -> Float[Array, "B V"]:
    """Set the logits outside the top k tokens, or outside the smallest set with mass `top_p`, to -inf."""
    if top_k:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(probabilities < _top_p_threshold(probabilities, top_p), -jnp.inf, logits)
    return logits


def _top_p_threshold(probabilities: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """Return a threshold: the tokens of at least this probability are the fewest that have a mass of `top_p` or more.

    Binary search over the bits of a float32: non-negative floats are ordered like their bits. (Sorting the vocabulary for each
    token would cost more than all layers of a small model.) The search tries the bits of the threshold from the highest on, and
    keeps a bit if the selected mass still reaches `top_p`. `count_enough` is the number of tokens that the best threshold so far
    selects, `count_too_few` that of the lowest threshold known to be too high. The search ends when they differ by at most 1
    in each row: all further bits select the same tokens.
    """

    def cond(state: tuple[Array, ...]) -> Bool[Array, ""]:
        bit, _, count_enough, count_too_few = state
        return (bit >= 0) & jnp.any(count_enough - count_too_few > 1)

    def try_bit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        bit, bits, count_enough, count_too_few = state
        higher = bits | (jnp.int32(1) << bit)
        selected = probabilities >= jax.lax.bitcast_convert_type(higher, jnp.float32)
        mass, count = _mass_and_count(probabilities, selected)
        enough = mass >= top_p
        return (
            bit - 1,
            jnp.where(enough, higher, bits),
            jnp.where(enough, count, count_enough),
            jnp.where(enough, count_too_few, count),
        )

    # Bit 29 is the highest bit of a probability: 1.0 is 0x3F800000.
    zeros = jnp.zeros((probabilities.shape[0], 1), jnp.int32)
    start = jnp.int32(29), zeros, jnp.full_like(zeros, probabilities.shape[1]), zeros
    return jax.lax.bitcast_convert_type(jax.lax.while_loop(cond, try_bit, start)[1], jnp.float32)


def _mass_and_count(
    probabilities: Float[Array, "B V"], selected: Bool[Array, "B V"]
) -> tuple[Float[Array, "B 1"], Int[Array, "B 1"]]:
    """Return the mass and the number of the selected tokens, in one reduction.

    On a CPU, two separate reductions take eight times as long.
    """
    parts = jnp.where(selected, probabilities, 0.0), selected.astype(jnp.int32)
    start = jnp.zeros((), probabilities.dtype), jnp.int32(0)
    mass, count = jax.lax.reduce(
        parts, start, lambda one, other: (one[0] + other[0], one[1] + other[1]), (1,)
    )
    return mass[:, None], count[:, None]


def _argmax(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Return the index of the largest logit, the first of equal ones. On a CPU, jnp.argmax takes ten times as long."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # No logit of a row with NaN equals its maximum: the result is the last token.
    last = jnp.int32(logits.shape[-1] - 1)
    return jnp.min(jnp.where(logits == best, tokens, last), axis=-1)


def _inverse_cdf(probabilities: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Return the token at which the cumulative distribution reaches each uniform number; never one of probability 0.

    Finds the block of tokens, then the token in it: on a CPU, one cumulative sum over the vocabulary takes ten times as long.
    """
    batch, size = probabilities.shape
    blocks = jnp.pad(probabilities, ((0, 0), (0, -size % SUM_BLOCK))).reshape(batch, -1, SUM_BLOCK)
    sums = blocks.sum(axis=-1)
    start = jnp.zeros((batch, 1), sums.dtype)
    target = uniform[:, None] * jnp.cumsum(sums, axis=-1)[:, -1:]

    def last_reached(weights: Array, start: Array) -> tuple[Array, Array]:
        """Return (i, begins[i]) for the last index i with weights[i] > 0 and begins[i] <= target, where
        begins[i] = start + sum(weights[:i])."""
        begins = jnp.concatenate([start, start + jnp.cumsum(weights, axis=-1)[:, :-1]], axis=-1)
        indices = jnp.arange(weights.shape[1], dtype=jnp.int32)
        index = jnp.max(jnp.where((weights > 0) & (begins <= target), indices, 0), axis=-1, keepdims=True)
        return index, jnp.take_along_axis(begins, index, axis=-1)

    block, begin = last_reached(sums, start)
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * SUM_BLOCK + last_reached(inside, begin)[0])[:, 0]


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, "B"],
    temperature: Float[Array, "B"],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Sample one token per row by inverting the cumulative distribution, with one random number per row for any V.

    Args:
      logits: logits of the next token.
      keys: one key per row.
      temperature: 0 is greedy.
      top_p: mass of nucleus sampling; 1 is off.
      top_k: number of most likely tokens to sample from; 0 is off.

    Returns:
      ids, their log-probabilities under the full distribution (temperature 1, not truncated), and under the distribution from
      which they were sampled (0 for greedy rows).
    """
    greedy = is_greedy(temperature)
    best = _argmax(logits)

    def draw() -> tuple[Array, Array]:
        scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
        scaled = jax.nn.log_softmax(truncate(scaled, top_p=top_p, top_k=top_k), axis=-1)
        drawn = _inverse_cdf(jnp.exp(scaled), uniform(keys))
        ids = jnp.where(greedy, best, drawn)
        sampled_logps = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
        return ids, jnp.where(greedy, 0.0, sampled_logps)

    # Greedy evaluations skip the draw, which is most of the sampling cost of a small model.
    ids, sampled_logps = jax.lax.cond(jnp.all(greedy), lambda: (best, jnp.zeros_like(logits[:, 0])), draw)
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids[:, None], axis=-1)[:, 0]
    return ids, logps, sampled_logps
