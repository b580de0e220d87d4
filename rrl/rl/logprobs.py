"""Log-probabilities of target tokens without ever holding logits of the whole batch.

Only targets pay for the head: in each row the positions that predict a target are moved to the front, and the head runs over
chunks of them; chunks without a target are skipped. The chunks' logits are recomputed in the backward pass where keeping them
would cost more memory than `KEEP_BYTES`. Used by supervised training and by reinforcement learning alike.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rrl.rl.batch import Batch

KEEP_BYTES = 512 * 2**20
"""Logits of a batch up to this size are kept for the backward pass."""


class LanguageModel(Protocol):
    """What the log-probabilities need of a decoder."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
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
    chunk: int = 2048,
    entropy: bool = False,
    greedy: bool = False,
    temperature: float = 1.0,
    remat: bool | None = None,
) -> TokenScores:
    """Runs the decoder over packed rows and scores the tokens whose `batch.loss` is True.

    Args:
        decoder: gives hidden states [B, T, D] and, from them, logits [..., V].
        batch: rows [B, T].
        chunk: number of positions, over all rows, whose logits exist at a time.
        entropy: also compute the entropy (differentiable).
        greedy: also tell whether the target is the argmax.
        temperature: divides the logits.
        remat: recompute logits in the backward pass; None: when [B, T, V] in float32 exceeds `KEEP_BYTES`.

    Returns:
        Scores of shape [B, T] aligned with `batch.tokens`: entry t is about token t.
    """
    hidden = decoder(batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids)
    return score_targets(
        decoder.unembed,
        hidden,
        batch.tokens,
        batch.loss,
        chunk=chunk,
        entropy=entropy,
        greedy=greedy,
        temperature=temperature,
        remat=remat,
    )


def score_targets(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss: Bool[Array, "B T"],
    *,
    chunk: int = 2048,
    entropy: bool = False,
    greedy: bool = False,
    temperature: float = 1.0,
    remat: bool | None = None,
) -> TokenScores:
    """As `token_logprobs`, from hidden states that are already there. Token 0 of a row is never a target."""
    rows, length = tokens.shape
    wanted = loss[:, 1:]
    vocabulary = jax.eval_shape(unembed, hidden[:1, :1]).shape[-1]
    if remat is None:
        remat = 4 * rows * length * vocabulary > KEEP_BYTES
    width = min(max(1, chunk // rows), length - 1)
    chunks = -(-(length - 1) // width)
    # Compacting each row by itself keeps rows where they are when the batch is sharded over devices.
    order = jnp.argsort(~wanted, axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (0, chunks * width - (length - 1))), constant_values=length - 1)
    slots = order.reshape(rows, chunks, width).swapaxes(0, 1)

    def head(states: Float[Array, "B c D"], targets: Int[Array, "B c"]) -> dict[str, Array]:
        logits = unembed(states).astype(jnp.float32) / temperature
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        norm = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        out = {"logp": picked - norm}
        if entropy:
            out["entropy"] = norm - (jnp.exp(logits - norm[..., None]) * logits).sum(-1)
        if greedy:
            out["greedy"] = logits.argmax(-1) == targets
        return out

    def nothing(states: Float[Array, "B c D"], targets: Int[Array, "B c"]) -> dict[str, Array]:
        zero = jnp.zeros(targets.shape, jnp.float32)
        return (
            {"logp": zero} | ({"entropy": zero} if entropy else {}) | ({"greedy": zero > 0} if greedy else {})
        )

    def one_chunk(at: Int[Array, "B c"]) -> dict[str, Array]:
        states = jnp.take_along_axis(hidden, jnp.minimum(at, length - 2)[..., None], axis=1)
        at_target = jnp.minimum(at + 1, length - 1)
        targets = jnp.take_along_axis(tokens, at_target, axis=1)
        real = jnp.take_along_axis(loss, at_target, axis=1) & (at < length - 1)
        out = jax.lax.cond(real.any(), head, nothing, states, targets)
        return {
            name: jnp.where(real, value, False if name == "greedy" else 0.0) for name, value in out.items()
        }

    if remat:
        one_chunk = jax.checkpoint(one_chunk)
    if chunks == 1:
        stacked = jax.tree.map(lambda x: x[None], one_chunk(slots[0]))
    else:
        stacked = jax.lax.map(one_chunk, slots)
    # Back to the places they came from: the inverse permutation, shifted by one from predictor to target.
    inverse = jnp.argsort(order[:, : length - 1], axis=1)

    def unsort(x: Array) -> Array:
        flat = x.swapaxes(0, 1).reshape(rows, chunks * width)
        placed = jnp.take_along_axis(flat, inverse, axis=1)
        return jnp.pad(placed, ((0, 0), (1, 0)))

    return TokenScores(**{name: unsort(x) for name, x in stacked.items()})
