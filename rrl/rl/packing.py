"""Packing: places short sequences into few long rows on the host. Read `pack_trajectories` first.

`pack` places sequences into rows of one length (first-fit decreasing), `pack_buckets` into batches of a few row lengths, and
`pack_trajectories` does so with the contexts of trajectories. Each result has a method `unpack`, which turns per-token outputs
of shape [B, T] into one array per sequence or trajectory.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from rrl.data.trajectory import POLICY, Trajectory
from rrl.errors import UserError
from rrl.rl.batch import Batch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.prefix_tree import PrefixTree, prefix_trees


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed rows, and the place of each sequence."""

    batch: Batch
    """NumPy arrays [B, T]."""
    row: Int[np.ndarray, "N"]
    """Row of each sequence; -1 if it was dropped."""
    start: Int[np.ndarray, "N"]
    """First column of each sequence."""

    def unpack(self, values: Shaped[np.ndarray, "B T"], lengths: Sequence[int]) -> list[np.ndarray]:
        """Per-token values of each sequence, in the order of `pack`'s input. Requires that no sequence was dropped."""
        return [
            values[row, start : start + length]
            for row, start, length in zip(self.row, self.start, lengths, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Batches of a few shapes, and the place of each sequence."""

    batches: list[Batch]
    """NumPy arrays [B, T]."""
    batch_index: Int[np.ndarray, "N"]
    """Index of each sequence's batch; -1 if the sequence is longer than every row length."""
    row: Int[np.ndarray, "N"]
    """Row of each sequence in its batch."""
    start: Int[np.ndarray, "N"]
    """First column of each sequence."""

    def unpack(self, values: Sequence[Shaped[np.ndarray, "B T"]], lengths: Sequence[int]) -> list[np.ndarray]:
        """Per-token values of each sequence, in the order of `pack_buckets`' input, from the values of all batches.

        Requires that every sequence has a batch.
        """
        places = zip(self.batch_index, self.row, self.start, lengths, strict=True)
        return [values[batch][row, start : start + length] for batch, row, start, length in places]


@dataclasses.dataclass(frozen=True)
class PackedTrajectories:
    """Trajectories in packed rows, and where each of their tokens is."""

    buckets: Buckets
    sequences: list[PrefixTree]
    """The packed sequences, in the order in which they were given to `pack_buckets`."""

    @property
    def batches(self) -> list[Batch]:
        """The packed rows, as microbatches of NumPy arrays [B, T]."""
        return self.buckets.batches

    def unpack(
        self, values: Sequence[Float[np.ndarray, "B T"]], trajectories: Sequence[Trajectory]
    ) -> list[Float[np.ndarray, "T"]]:
        """Per-token values of each trajectory, from the outputs of all batches.

        Contexts that share tokens read the shared values from the trunk of their tree.
        """
        sizes = [len(t.tokens) for t in trajectories]
        flat = np.zeros(sum(sizes), np.float32)
        parts = self.buckets.unpack(values, [len(tree.column_token_indices) for tree in self.sequences])
        for tree, part in zip(self.sequences, parts, strict=True):
            flat[tree.context_token_indices] = part[tree.context_columns]
        return np.split(flat, np.cumsum(sizes, dtype=int))[:-1]


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    config: ObjectiveConfig,
    shards: int = 1,
    extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
) -> PackedTrajectories:
    """Packs trajectories into microbatches; the policy's tokens are the targets.

    Args:
      trajectories: the trajectories to pack.
      config: row lengths, tokens per microbatch, and whether prefixes are shared.
      shards: number of devices over which the rows of a batch are split.
      extras: per-token arrays of each trajectory, by name; they become `Batch.extras`.

    Raises:
      UserError: a context is longer than the longest row.
    """
    longest = max((context.stop - context.start for t in trajectories for context in t.contexts), default=0)
    if longest > config.row_lengths[-1]:
        raise UserError(
            f"a context of {longest} tokens is longer than the longest of objective.row_lengths={config.row_lengths}"
        )
    sequences = packed_sequences(trajectories, config)

    def per_sequence(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = np.concatenate([*values]) if trajectories else np.empty(0)
        return [flat[tree.column_token_indices] for tree in sequences]

    buckets = pack_buckets(
        per_sequence([t.tokens for t in trajectories]),
        per_sequence([t.roles == POLICY for t in trajectories]),
        config.row_lengths,
        [config.rows_per_microbatch(length, shards) for length in config.row_lengths],
        positions=[tree.positions for tree in sequences],
        branches=[tree.branches for tree in sequences] if config.share_prefixes else None,
        extras={name: per_sequence(values) for name, values in (extras or {}).items()},
    )
    return PackedTrajectories(buckets, sequences)


def packed_sequences(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> list[PrefixTree]:
    """The sequences to pack: one per context, or with `config.share_prefixes` one per prefix tree.

    A context is a prompt and the tokens that follow it until the next prompt. A trajectory has one context, or several if
    its recipe builds a new prompt for each step (`Trajectory.contexts`).
    """
    if config.share_prefixes:
        return prefix_trees(trajectories, config.row_lengths[-1])
    sizes = [len(t.tokens) for t in trajectories]
    return [
        PrefixTree.of_context(end - size + context.start, end - size + context.stop)
        for trajectory, size, end in zip(trajectories, sizes, np.cumsum(sizes), strict=True)
        for context in trajectory.contexts
    ]


def pack_buckets(
    tokens: Sequence[Int[np.ndarray, "T"]],
    loss_mask: Sequence[Bool[np.ndarray, "T"]],
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    positions: Sequence[Int[np.ndarray, "T"]] | None = None,
    branches: Sequence[Int[np.ndarray, "T"]] | None = None,
    extras: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> Buckets:
    """Packs sequences into batches of shape [rows[i], lengths[i]].

    Each sequence goes to the shortest length that holds it. Sequences that do not fill a batch of that length move to the
    next length, so that only batches of the last length have padding rows.

    Args:
        tokens: the sequences.
        loss_mask: see `pack`.
        lengths: row lengths, increasing.
        rows: number of rows of a batch, for each length.
        positions, branches, extras: see `pack`.
    """
    sizes = np.array([len(t) for t in tokens])
    batches: list[Batch] = []
    batch_index, row, start = (np.full(len(tokens), -1, np.int64) for _ in range(3))
    pending = np.zeros(0, np.int64)  # indices of the sequences to place next
    for bucket, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        shorter = lengths[bucket - 1] if bucket else 0
        pending = np.append(pending, np.flatnonzero((sizes > shorter) & (sizes <= length)))
        packed = pack(
            _select(tokens, pending),
            _select(loss_mask, pending),
            length,
            multiple=count,
            positions=None if positions is None else _select(positions, pending),
            branches=None if branches is None else _select(branches, pending),
            extras={name: _select(parts, pending) for name, parts in (extras or {}).items()},
        )
        used_rows = int(packed.row.max(initial=-1)) + 1
        # Only full batches are taken; the last length also takes a batch that is partly padding.
        taken = used_rows // count if bucket < len(lengths) - 1 else -(-used_rows // count)
        is_placed = packed.row < taken * count
        placed = pending[is_placed]
        batch_index[placed] = len(batches) + packed.row[is_placed] // count
        row[placed], start[placed] = packed.row[is_placed] % count, packed.start[is_placed]
        for index in range(taken):
            span = slice(index * count, (index + 1) * count)
            batches.append(jax.tree.map(lambda x, span=span: x[span], packed.batch))
        pending = pending[~is_placed]
    return Buckets(batches, batch_index, row, start)


def pack(
    tokens: Sequence[Int[np.ndarray, "T"]],
    loss_mask: Sequence[Bool[np.ndarray, "T"]],
    row_length: int,
    *,
    positions: Sequence[Int[np.ndarray, "T"]] | None = None,
    branches: Sequence[Int[np.ndarray, "T"]] | None = None,
    extras: Mapping[str, Sequence[np.ndarray]] | None = None,
    multiple: int = 1,
    too_long: str = "error",
) -> Packed:
    """Packs sequences into rows of one length; padding is 0.

    The first token of a sequence is never a target, because no token predicts it.

    Args:
        tokens: the sequences.
        loss_mask: True on tokens that are targets of the loss.
        row_length: T.
        positions: position of each token in its sequence; None: 0, 1, 2, ...
        branches: branch of each token (`Batch.branches`); None: no sequence has branches.
        extras: per-token arrays of each sequence, by name.
        multiple: the number of rows B is rounded up to a multiple of this, so that few shapes are compiled or rows divide
            over devices.
        too_long: what happens to a sequence longer than a row: "error", "cut" (its end is lost) or "drop".

    Raises:
        UserError: a sequence is longer than a row (with `too_long="error"`).
    """
    all_lengths = np.array([len(t) for t in tokens], np.int64)
    retained = _retained(all_lengths, row_length, too_long)
    lengths = np.minimum(all_lengths, row_length)[retained]
    rows, starts, used_rows = first_fit_decreasing(lengths, row_length)
    shape = (max(1, -(-used_rows // multiple)) * multiple, row_length)
    # For the concatenated tokens of all packed sequences: index in the sequence, and index in the flattened rows.
    index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.repeat(rows * row_length + starts, lengths) + index

    def scatter(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        out = np.zeros(shape, dtype)
        out.reshape(-1)[place] = values
        return out

    def to_rows(parts: Sequence[np.ndarray], dtype: DTypeLike | None = None) -> np.ndarray:
        cut = [part[:length] for part, length in zip(_select(parts, retained), lengths.tolist(), strict=True)]
        values = np.concatenate(cut) if cut else np.zeros(0, np.float32)
        return scatter(values, dtype or values.dtype)

    index_in_sequence = scatter(index, np.int32)
    batch = Batch(
        tokens=to_rows(tokens, np.int32),
        positions=index_in_sequence if positions is None else to_rows(positions, np.int32),
        segment_ids=scatter(np.repeat(_number_in_row(rows, starts), lengths), np.int32),
        loss_mask=to_rows(loss_mask, np.bool_) & (index_in_sequence > 0),
        extras={name: to_rows(parts) for name, parts in (extras or {}).items()},
        branches=None if branches is None else to_rows(branches, np.int32),
    )
    row, start = np.full(len(tokens), -1, np.int64), np.zeros(len(tokens), np.int64)
    row[retained], start[retained] = rows, starts
    return Packed(batch, row, start)


def first_fit_decreasing(
    lengths: Int[np.ndarray, "N"], row_length: int
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"], int]:
    """Places items into rows, longest first, each into the first row with enough room.

    Args:
        lengths: length of each item.
        row_length: length of a row.

    Returns:
        Row of each item, first column of each item, and number of rows. The number does not depend on the items' order.
    """
    order = np.argsort(-lengths, kind="stable")
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    # A segment tree finds the row in logarithmic time. Each leaf is a row, and each node has the largest room of its rows.
    size = 1 << max(0, int(len(lengths) - 1).bit_length())
    room = [row_length] * (2 * size)
    used = 0
    for item in order.tolist():
        length, node = int(lengths[item]), 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        rows[item], starts[item] = node - size, row_length - room[node]
        used = max(used, node - size + 1)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows, starts, used


def _retained(lengths: Int[np.ndarray, "N"], row_length: int, too_long: str) -> Int[np.ndarray, "n"]:
    """Indices of the sequences to pack. Raises UserError if a sequence is too long and `too_long` is "error"."""
    if too_long not in ("error", "cut", "drop"):
        raise UserError(f"too_long={too_long!r} is unknown; choose error, cut or drop.")
    if too_long == "error" and len(lengths) and lengths.max() > row_length:
        raise UserError(
            f"sequence {int(lengths.argmax())} has {int(lengths.max())} tokens, more than row_length={row_length}; raise "
            f"row_length, or choose too_long=cut or too_long=drop."
        )
    return np.flatnonzero(lengths <= row_length) if too_long == "drop" else np.arange(len(lengths))


def _select(parts: Sequence[np.ndarray], indices: Int[np.ndarray, "n"]) -> list[np.ndarray]:
    return [parts[i] for i in indices.tolist()]


def _number_in_row(rows: Int[np.ndarray, "N"], starts: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Numbers the sequences of each row from 1, from left to right."""
    left_to_right = np.lexsort((starts, rows))
    is_first = np.diff(rows[left_to_right], prepend=-1) != 0
    index = np.arange(len(rows))
    numbers = np.zeros(len(rows), np.int32)
    numbers[left_to_right] = index - np.maximum.accumulate(np.where(is_first, index, 0)) + 1
    return numbers
