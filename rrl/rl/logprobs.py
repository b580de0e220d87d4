"""Log-probabilities of target tokens, computed in chunks of positions to save memory. Read `token_logprobs` first.

In each row the positions that predict a target are moved to the front. The output head then runs over chunks of positions
and skips chunks without a target. If all logits [B, T, V] would take more than `MAX_SAVED_LOGIT_BYTES`, they never exist at
once: the backward pass recomputes them chunk by chunk and sums the head's gradient in place. Supervised training and
reinforcement learning both use this module.
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

MAX_SAVED_LOGIT_BYTES = 512 * 2**20
"""Logits of a batch up to this size are saved for the backward pass; larger ones are recomputed."""
MAX_CHUNK_LOGIT_BYTES = 320 * 2**20
"""Largest size of one chunk's logits on a device: 512 positions with a vocabulary of 152k tokens."""
MAX_CHUNK_POSITIONS = 2048
"""Largest number of positions in a chunk; more are not faster."""


class LanguageModel(Protocol):
    """The methods of a decoder that `token_logprobs` uses."""

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
    """Scores of each target token; 0 (False) on all other tokens."""

    logp: Float[Array, "B T"]
    """Natural log-probability of the token given the tokens before it."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy in nats of the distribution that the token is drawn from."""
    greedy: Bool[Array, "B T"] | None = None
    """True if the token is the most probable one."""


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
    """Runs the decoder over packed rows and scores the target tokens (`batch.loss_mask`).

    Args:
        decoder: returns hidden states [B, T, D]; its `unembed` returns logits [..., V].
        batch: rows [B, T].
        chunk: number of positions, over all rows, whose logits are computed at a time; None: `chunk_positions`.
        entropy: also compute the entropy (differentiable).
        greedy: also return whether the target is the argmax.
        temperature: divides the logits.
        remat: recompute logits in the backward pass; None: if [B, T, V] in float32 exceeds `MAX_SAVED_LOGIT_BYTES`.

    Returns:
        Scores [B, T] aligned with `batch.tokens`: entry t belongs to token t. Token 0 of a row is never a target.
    """
    hidden = decoder(
        batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids, branches=batch.branches
    )
    rows, length = batch.tokens.shape
    vocabulary = jax.eval_shape(decoder.unembed, hidden[:1, :1]).shape[-1]
    if remat is None:
        remat = 4 * rows * length * vocabulary > MAX_SAVED_LOGIT_BYTES
    width = _columns_per_chunk(rows, length, vocabulary, chunk)
    chunks = _Chunks.of(batch.tokens, batch.loss_mask, width)
    # `custom_vjp` cannot differentiate with respect to arrays in a closure, so the head's weights become arguments.
    head_function, weights = jax.closure_convert(decoder.unembed, hidden[:, :width])
    head = _Head(head_function, entropy, greedy, temperature)
    scores = (_forward_remat if remat else _forward)(head, chunks, hidden, weights)
    # Undo the sort of `_Chunks`, and shift by one from the predicting position to the target.
    inverse = chunks.inverse()

    def unsort(x: Array) -> Array:
        placed = jnp.take_along_axis(x.swapaxes(0, 1).reshape(rows, -1), inverse, axis=1)
        return jnp.pad(placed, ((0, 0), (1, 0)))

    return TokenScores(**{name: unsort(x) for name, x in scores.items() if name != "logsumexp"})


def chunk_positions(vocabulary: int, devices: int = 1) -> int:
    """Number of positions in a chunk, over all rows.

    It is the largest multiple of 128 whose logits fit in `MAX_CHUNK_LOGIT_BYTES` per device, from 128 to
    `MAX_CHUNK_POSITIONS`.

    Args:
        vocabulary: V.
        devices: number of devices among which the logits are split, by rows or by vocabulary.
    """
    fitting = MAX_CHUNK_LOGIT_BYTES * devices // (4 * vocabulary)
    return min(MAX_CHUNK_POSITIONS, max(128, fitting // 128 * 128))


def _columns_per_chunk(rows: int, length: int, vocabulary: int, chunk: int | None) -> int:
    """Number of columns of a chunk; `chunk` is its number of positions over all rows (None: `chunk_positions`)."""
    if chunk is None:
        mesh = jax.sharding.get_abstract_mesh()
        chunk = chunk_positions(vocabulary, 1 if mesh.empty else math.prod(mesh.shape.values()))
        # At least two chunks, so that the second is skipped if targets are few.
        chunk = min(chunk, rows * (length // 2))
    return min(max(1, chunk // rows), length - 1)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The output head as a function from hidden states to scores; all fields are static."""

    unembed: Callable[..., Array]
    """(hidden states, *weights) -> logits."""
    entropy: bool
    greedy: bool
    temperature: float

    def logits(self, states: Float[Array, "B c D"], *weights: Array) -> Float[Array, "B c V"]:
        return self.unembed(states, *weights).astype(jnp.float32) / self.temperature

    def scores(
        self, states: Float[Array, "B c D"], targets: Int[Array, "B c"], weights: Sequence[Array]
    ) -> dict[str, Array]:
        """Scores by name, and the "logsumexp" of the logits."""
        logits = self.logits(states, *weights)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        logsumexp = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        out = {"logp": picked - logsumexp, "logsumexp": logsumexp}
        if self.entropy:
            out["entropy"] = logsumexp - (jnp.exp(logits - logsumexp[..., None]) * logits).sum(-1)
        if self.greedy:
            out["greedy"] = logits.argmax(-1) == targets
        return out

    def zeros(self, targets: Int[Array, "B c"]) -> dict[str, Array]:
        """The scores of a chunk without a target."""
        zero = jnp.zeros(targets.shape, jnp.float32)
        out = {"logp": zero, "logsumexp": zero}
        return (
            out | ({"entropy": zero} if self.entropy else {}) | ({"greedy": zero > 0} if self.greedy else {})
        )

    def logits_gradient(
        self,
        logits: Float[Array, "B c V"],
        targets: Int[Array, "B c"],
        scores: dict[str, Array],
        grads: dict[str, Array],
    ) -> Float[Array, "B c V"]:
        """Gradient of the logits, given the scores and their gradients.

        With logits l, p = softmax(l), its entropy H and the one-hot target e_y:
        d logp_y / dl = e_y - p and dH / dl = -p (log p + H).
        """
        logp = logits - scores["logsumexp"][..., None]
        gradient = -grads["logp"][..., None]
        if self.entropy:
            gradient = gradient - grads["entropy"][..., None] * (logp + scores["entropy"][..., None])
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        return jnp.exp(logp) * gradient + jnp.where(is_target, grads["logp"][..., None], 0.0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "loss_mask", "columns"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class _Chunks:
    """The columns of each chunk, with the tokens and targets of all rows. Columns that predict a target come first."""

    tokens: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    columns: Int[Array, "chunks B c"]
    """Columns of each chunk, in each row; the token after each column is scored. A row's last column predicts nothing and
    serves as padding."""

    @classmethod
    def of(cls, tokens: Int[Array, "B T"], loss_mask: Bool[Array, "B T"], width: int) -> "_Chunks":
        """Sorts the columns of each row and divides them into chunks of `width` columns."""
        rows, length = tokens.shape
        count = -(-(length - 1) // width)
        # Each row is sorted by itself, so that rows stay on their device if the batch is sharded.
        order = jnp.argsort(~loss_mask[:, 1:], axis=1, stable=True)
        order = jnp.pad(order, ((0, 0), (0, count * width - (length - 1))), constant_values=length - 1)
        return cls(tokens, loss_mask, order.reshape(rows, count, width).swapaxes(0, 1))

    def inputs_and_targets(
        self, columns: Int[Array, "B c"]
    ) -> tuple[Int[Array, "B c"], Int[Array, "B c"], Bool[Array, "B c"]]:
        """For one chunk: columns of its hidden states, the tokens after them, and which of these tokens are targets."""
        length = self.tokens.shape[1]
        next_columns = jnp.minimum(columns + 1, length - 1)
        is_target = jnp.take_along_axis(self.loss_mask, next_columns, axis=1) & (columns < length - 1)
        return (
            jnp.minimum(columns, length - 2),  # padding reads any column, since it is never a target
            jnp.take_along_axis(self.tokens, next_columns, axis=1),
            is_target,
        )

    def inverse(self) -> Int[Array, "B T-1"]:
        """Index of each column in the concatenated `columns` of all chunks, which undoes the sort of `of`."""
        rows, length = self.tokens.shape
        return jnp.argsort(self.columns.swapaxes(0, 1).reshape(rows, -1)[:, : length - 1], axis=1)


def _forward(
    head: _Head, chunks: _Chunks, hidden: Float[Array, "B T D"], weights: Sequence[Array]
) -> dict[str, Shaped[Array, "chunks B c"]]:
    """Scores of all chunks, computed one chunk at a time."""

    def one_chunk(chunk_columns: Int[Array, "B c"]) -> dict[str, Array]:
        columns, targets, is_target = chunks.inputs_and_targets(chunk_columns)
        states = jnp.take_along_axis(hidden, columns[..., None], axis=1)
        out = jax.lax.cond(
            is_target.any(),
            lambda states: head.scores(states, targets, weights),
            lambda states: head.zeros(targets),
            states,
        )
        return {name: jnp.where(is_target, x, False if name == "greedy" else 0.0) for name, x in out.items()}

    if len(chunks.columns) == 1:
        return jax.tree.map(lambda x: x[None], one_chunk(chunks.columns[0]))
    return jax.lax.map(one_chunk, chunks.columns)


_forward_remat = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""`_forward` with a backward pass that recomputes the logits, one chunk at a time."""


def _forward_residuals(
    head: _Head, chunks: _Chunks, hidden: Float[Array, "B T D"], weights: Sequence[Array]
) -> tuple[dict[str, Array], tuple[Any, ...]]:
    out = _forward(head, chunks, hidden, weights)
    return out, (chunks, hidden, weights, out)


def _backward(
    head: _Head, residuals: tuple[Any, ...], grads: dict[str, Array]
) -> tuple[None, Float[Array, "B T D"], Sequence[Array]]:
    chunks, hidden, weights, out = residuals
    differentiable = [name for name in ("logp", "entropy") if name in out]

    def one_chunk(
        weight_grads: tuple[Array, ...], chunk: tuple[Array, dict[str, Array], dict[str, Array]]
    ) -> tuple[tuple[Array, ...], Float[Array, "B c D"]]:
        chunk_columns, out, grads = chunk
        columns, targets, is_target = chunks.inputs_and_targets(chunk_columns)
        states = jnp.take_along_axis(hidden, columns[..., None], axis=1)
        grads = {name: jnp.where(is_target, grad, 0.0) for name, grad in grads.items()}

        def add(weight_grads: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
            logits, pullback = jax.vjp(head.logits, states, *weights)
            state_grad, *chunk_grads = pullback(head.logits_gradient(logits, targets, out, grads))
            return tuple(old + new for old, new in zip(weight_grads, chunk_grads, strict=True)), state_grad

        return jax.lax.cond(is_target.any(), add, lambda sums: (sums, jnp.zeros_like(states)), weight_grads)

    inputs = chunks.columns, out, {name: grads[name] for name in differentiable}
    weight_grads, state_grads = jax.lax.scan(one_chunk, tuple(jnp.zeros_like(w) for w in weights), inputs)
    rows, _, model_width = hidden.shape
    flat = state_grads.swapaxes(0, 1).reshape(rows, -1, model_width)
    placed = jnp.take_along_axis(flat, chunks.inverse()[..., None], axis=1)
    return None, jnp.pad(placed, ((0, 0), (0, 1), (0, 0))), list(weight_grads)


_forward_remat.defvjp(_forward_residuals, _backward)
