"""Log-probabilities of target tokens without ever holding logits of the whole batch.

Only targets pay for the head: in each row the positions that predict a target are moved to the front, and the head runs over
chunks of them; chunks without a target are skipped. The chunks' logits are recomputed in the backward pass where keeping them
would cost more memory than `KEEP_BYTES`: there the head's gradient is summed in place, chunk by chunk, and a chunk without a
target does not touch it. Used by supervised training and by reinforcement learning alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from rrl.rl.batch import Batch

KEEP_BYTES = 512 * 2**20
"""Logits of a batch up to this size are kept for the backward pass."""
CHUNK_BYTES = 320 * 2**20
"""Logits of a chunk up to this size exist at a time: 512 positions of 152k words."""
MOST_POSITIONS = 2048
"""More of them in a chunk are no faster."""


class LanguageModel(Protocol):
    """What the log-probabilities need of a decoder."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        branches: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]: ...

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]: ...


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """What the model says of each target token; 0 (False) where a token is no target."""

    logp: Float[Array, "B T"]
    """Natural log of the token's probability given the tokens before it."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the distribution that the token is drawn from."""
    greedy: Bool[Array, "B T"] | None = None
    """True where the token is the most probable one."""


def token_logprobs(
    decoder: LanguageModel,
    batch: Batch,
    *,
    chunk: int | None = None,
    entropy: bool = False,
    greedy: bool = False,
    temperature: float = 1.0,
    remat: bool | None = None,
) -> TokenScores:
    """Runs the decoder over packed rows and scores the tokens whose `batch.loss_mask` is True.

    Args:
        decoder: gives hidden states [B, T, D] and, from them, logits [..., V].
        batch: rows [B, T].
        chunk: number of positions, over all rows, whose logits exist at a time; None: see `chunk_positions`.
        entropy: also compute the entropy (differentiable).
        greedy: also tell whether the target is the argmax.
        temperature: divides the logits.
        remat: recompute logits in the backward pass; None: when [B, T, V] in float32 exceeds `KEEP_BYTES`.

    Returns:
        Scores of shape [B, T] aligned with `batch.tokens`: entry t is about token t.
    """
    hidden = decoder(
        batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids, branches=batch.branches
    )
    return score_targets(
        decoder.unembed,
        hidden,
        batch.tokens,
        batch.loss_mask,
        chunk=chunk,
        entropy=entropy,
        greedy=greedy,
        temperature=temperature,
        remat=remat,
    )


def chunk_positions(vocabulary: int, shares: int = 1) -> int:
    """Positions, over all rows, whose logits exist at a time: `MOST_POSITIONS`, or what `CHUNK_BYTES` hold in whole 128s where
    each device has one of so many shares of them (its rows, its part of the vocabulary)."""
    held = CHUNK_BYTES * shares // (4 * vocabulary)
    return min(MOST_POSITIONS, max(128, held // 128 * 128))


@dataclasses.dataclass(frozen=True)
class _Head:
    """From the hidden states of a chunk to its scores: what is asked for, as static values."""

    unembed: Callable[..., Array]
    """(hidden states, weights...) -> logits."""
    entropy: bool
    greedy: bool
    temperature: float

    def logits(self, states: Float[Array, "B c D"], *weights: Array) -> Float[Array, "B c V"]:
        return self.unembed(states, *weights).astype(jnp.float32) / self.temperature

    def scores(
        self, states: Float[Array, "B c D"], targets: Int[Array, "B c"], weights: Sequence[Array]
    ) -> dict[str, Array]:
        """By name, with "norm", the log of the sum of the logits' exponentials."""
        logits = self.logits(states, *weights)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        norm = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        out = {"logp": picked - norm, "norm": norm}
        if self.entropy:
            out["entropy"] = norm - (jnp.exp(logits - norm[..., None]) * logits).sum(-1)
        if self.greedy:
            out["greedy"] = logits.argmax(-1) == targets
        return out

    def nothing(self, targets: Int[Array, "B c"]) -> dict[str, Array]:
        """The scores of no target."""
        zero = jnp.zeros(targets.shape, jnp.float32)
        out = {"logp": zero, "norm": zero}
        return (
            out | ({"entropy": zero} if self.entropy else {}) | ({"greedy": zero > 0} if self.greedy else {})
        )

    def slope(
        self,
        logits: Float[Array, "B c V"],
        targets: Int[Array, "B c"],
        kept: dict[str, Array],
        grads: dict[str, Array],
    ) -> Float[Array, "B c V"]:
        """The gradient of the logits, given those of the scores: with p = softmax(l) and H its entropy,
        d logp_y / dl = [y] - p and dH / dl = -p (log p + H)."""
        logp = logits - kept["norm"][..., None]
        slope = -grads["logp"][..., None]
        if self.entropy:
            slope = slope - grads["entropy"][..., None] * (logp + kept["entropy"][..., None])
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        return jnp.exp(logp) * slope + jnp.where(chosen, grads["logp"][..., None], 0.0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "loss_mask", "slots"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Which positions each chunk is about."""

    tokens: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    slots: Int[Array, "chunks B c"]
    """Positions that predict; the last one of a row stands for none."""

    def at(self, slots: Int[Array, "B c"]) -> tuple[Int[Array, "B c"], Int[Array, "B c"], Bool[Array, "B c"]]:
        """Where a chunk's states are, its targets, and which of these are real."""
        length = self.tokens.shape[1]
        targets = jnp.minimum(slots + 1, length - 1)
        real = jnp.take_along_axis(self.loss_mask, targets, axis=1) & (slots < length - 1)
        return jnp.minimum(slots, length - 2), jnp.take_along_axis(self.tokens, targets, axis=1), real

    def inverse(self) -> Int[Array, "B T-1"]:
        """The place of each predicting position among the chunks' slots."""
        rows, length = self.tokens.shape
        return jnp.argsort(self.slots.swapaxes(0, 1).reshape(rows, -1)[:, : length - 1], axis=1)


def _forward(
    head: _Head, chunks: _Chunks, hidden: Float[Array, "B T D"], weights: Sequence[Array]
) -> dict[str, Shaped[Array, "chunks B c"]]:
    """The scores of all chunks, one chunk at a time."""

    def one_chunk(slots: Int[Array, "B c"]) -> dict[str, Array]:
        at, targets, real = chunks.at(slots)
        states = jnp.take_along_axis(hidden, at[..., None], axis=1)
        out = jax.lax.cond(
            real.any(),
            lambda states: head.scores(states, targets, weights),
            lambda states: head.nothing(targets),
            states,
        )
        return {name: jnp.where(real, x, False if name == "greedy" else 0.0) for name, x in out.items()}

    if len(chunks.slots) == 1:
        return jax.tree.map(lambda x: x[None], one_chunk(chunks.slots[0]))
    return jax.lax.map(one_chunk, chunks.slots)


_recomputed = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""`_forward` whose backward pass has the logits of one chunk at a time too."""


def _kept(
    head: _Head, chunks: _Chunks, hidden: Float[Array, "B T D"], weights: Sequence[Array]
) -> tuple[dict[str, Array], tuple[Any, ...]]:
    out = _forward(head, chunks, hidden, weights)
    return out, (chunks, hidden, weights, out)


def _backward(
    head: _Head, kept: tuple[Any, ...], grads: dict[str, Array]
) -> tuple[None, Float[Array, "B T D"], Sequence[Array]]:
    chunks, hidden, weights, out = kept
    wanted = [name for name in ("logp", "entropy") if name in out]

    def one_chunk(
        found: tuple[Array, ...], chunk: tuple[Array, dict[str, Array], dict[str, Array]]
    ) -> tuple[tuple[Array, ...], Float[Array, "B c D"]]:
        slots, out, grads = chunk
        at, targets, real = chunks.at(slots)
        states = jnp.take_along_axis(hidden, at[..., None], axis=1)
        grads = {name: jnp.where(real, grad, 0.0) for name, grad in grads.items()}

        def learn(found: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
            logits, pull = jax.vjp(head.logits, states, *weights)
            slope, *more = pull(head.slope(logits, targets, out, grads))
            return tuple(old + new for old, new in zip(found, more, strict=True)), slope

        return jax.lax.cond(real.any(), learn, lambda found: (found, jnp.zeros_like(states)), found)

    given = chunks.slots, out, {name: grads[name] for name in wanted}
    found, slopes = jax.lax.scan(one_chunk, tuple(jnp.zeros_like(w) for w in weights), given)
    rows, _, width = hidden.shape
    flat = slopes.swapaxes(0, 1).reshape(rows, -1, width)
    placed = jnp.take_along_axis(flat, chunks.inverse()[..., None], axis=1)
    return None, jnp.pad(placed, ((0, 0), (0, 1), (0, 0))), list(found)


_recomputed.defvjp(_kept, _backward)


def score_targets(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    chunk: int | None = None,
    entropy: bool = False,
    greedy: bool = False,
    temperature: float = 1.0,
    remat: bool | None = None,
) -> TokenScores:
    """As `token_logprobs`, from hidden states that are already there. Token 0 of a row is never a target."""
    rows, length = tokens.shape
    vocabulary = jax.eval_shape(unembed, hidden[:1, :1]).shape[-1]
    if remat is None:
        remat = 4 * rows * length * vocabulary > KEEP_BYTES
    if chunk is None:
        mesh = jax.sharding.get_abstract_mesh()
        chunk = chunk_positions(vocabulary, 1 if mesh.empty else math.prod(mesh.shape.values()))
        chunk = min(chunk, rows * (length // 2))  # at least two, one of which few targets leave out
    width = min(max(1, chunk // rows), length - 1)
    number = -(-(length - 1) // width)
    # Compacting each row by itself keeps rows where they are when the batch is sharded over devices.
    order = jnp.argsort(~loss_mask[:, 1:], axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, number * width - (length - 1))), constant_values=length - 1)
    chunks = _Chunks(tokens, loss_mask, order.reshape(rows, number, width).swapaxes(0, 1))
    apply, weights = jax.closure_convert(unembed, hidden[:, :width])
    head = _Head(apply, entropy, greedy, temperature)
    stacked = (_recomputed if remat else _forward)(head, chunks, hidden, weights)
    # Back to the places they came from: the inverse permutation, shifted by one from predictor to target.
    inverse = chunks.inverse()

    def unsort(x: Array) -> Array:
        flat = x.swapaxes(0, 1).reshape(rows, number * width)
        placed = jnp.take_along_axis(flat, inverse, axis=1)
        return jnp.pad(placed, ((0, 0), (1, 0)))

    return TokenScores(**{name: unsort(x) for name, x in stacked.items() if name != "norm"})
