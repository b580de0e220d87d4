"""Packing: places many short sequences into few long rows on the host (first-fit decreasing)."""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

from rrl.errors import UserError
from rrl.rl.batch import Batch


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
        """Per-token values of each sequence, in the order of `pack`'s input."""
        return [
            values[row, start : start + length]
            for row, start, length in zip(self.row, self.start, lengths, strict=True)
        ]


def first_fit_decreasing(
    lengths: Int[np.ndarray, "N"], row_length: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Places items into rows, longest first, each into the first row with enough room.

    Args:
        lengths: length of each item.
        row_length: length of a row.

    Returns:
        Row of each item, first column of each item, and number of rows. The number does not depend on the items' order.
    """
    order = np.argsort(-lengths, kind="stable")
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    # A binary tree with the maximal room of each range of rows finds the first row with enough room in log time.
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


def even_shares(sizes: Int[np.ndarray, "N"], shares: int) -> list[np.ndarray]:
    """Divides items into at most `shares` non-empty shares with nearly equal sums of sizes.

    Takes the largest item first and gives it to the share with the smallest sum (Graham, 1969).

    Returns:
        Indices of the items in each share.
    """
    members: list[list[int]] = [[] for _ in range(min(shares, len(sizes)))]
    # (sum of sizes, number of items, share): among equal sums, the share with fewest items comes first.
    sums = [(0, 0, share) for share in range(len(members))]
    for item in np.argsort(-sizes, kind="stable").tolist():
        total, count, share = heapq.heappop(sums)
        members[share].append(item)
        heapq.heappush(sums, (total + int(sizes[item]), count + 1, share))
    return [np.sort(share) for share in members]


def pack(
    tokens: Sequence[Int[np.ndarray, "T"]],
    loss_mask: Sequence[Bool[np.ndarray, "T"]],
    row_length: int,
    *,
    positions: Sequence[Int[np.ndarray, "T"]] | None = None,
    branches: Sequence[Int[np.ndarray, "T"]] | None = None,
    extras: Mapping[str, Sequence[np.ndarray]] | None = None,
    rows: int | None = None,
    multiple: int = 1,
    too_long: str = "error",
    pad_id: int = 0,
) -> Packed:
    """Packs sequences into rows: tokens, positions, segment ids, loss mask and other per-token arrays.

    The first token of a sequence is never a target, because no token predicts it.

    Args:
        tokens: the sequences.
        loss_mask: True on tokens that are targets of the loss.
        row_length: T.
        positions: position of each token in its sequence; None: 0, 1, 2, ...
        branches: branch of each token (`Batch.branches`); None: no sequence has branches.
        extras: per-token arrays of each sequence, by name; padding gets 0.
        rows: B; rows that are not needed are padding. None: as many rows as needed.
        multiple: B is rounded up to a multiple of this, so that few shapes are compiled or rows divide over devices.
        too_long: what happens to a sequence longer than a row: "error", "cut" (its end is lost) or "drop".
        pad_id: token of the padding.

    Raises:
        UserError: a sequence is longer than a row (with `too_long="error"`), or the sequences do not fit in `rows`.
    """
    if too_long not in ("error", "cut", "drop"):
        raise UserError(f"too_long={too_long!r} is unknown; choose error, cut or drop.")
    lengths = np.array([len(t) for t in tokens], np.int64)
    if too_long == "error" and len(lengths) and lengths.max() > row_length:
        raise UserError(
            f"sequence {int(lengths.argmax())} has {int(lengths.max())} tokens, more than row_length={row_length}; raise "
            f"row_length, or choose too_long=cut or too_long=drop."
        )
    retained = np.flatnonzero(lengths <= row_length) if too_long == "drop" else np.arange(len(lengths))
    lengths = np.minimum(lengths, row_length)[retained]
    row_of, start_of, used = first_fit_decreasing(lengths, row_length)
    if rows is not None and used > rows:
        raise UserError(
            f"{len(retained)} sequences need {used} rows of row_length={row_length}, more than rows={rows}; "
            "raise rows or row_length."
        )
    count = used if rows is None else rows
    count = max(1, -(-count // multiple)) * multiple

    # Flat index of each token of all packed sequences, in order: each array needs a single scatter.
    total = int(lengths.sum())
    first = np.cumsum(lengths) - lengths
    within = np.arange(total) - np.repeat(first, lengths)
    flat = np.repeat(row_of * row_length + start_of, lengths) + within

    def scatter(parts: Sequence[np.ndarray], fill: int, dtype: np.dtype | None = None) -> np.ndarray:
        cut = [parts[i][:n] for i, n in zip(retained.tolist(), lengths.tolist(), strict=True)]
        joined = np.concatenate(cut) if cut else np.zeros(0, dtype or np.float32)
        out = np.full(count * row_length, fill, dtype or joined.dtype)
        out[flat] = joined
        return out.reshape(count, row_length)

    # Segments of a row are numbered from 1, from left to right.
    left_to_right = np.lexsort((start_of, row_of))
    segment = np.zeros(len(retained), np.int32)
    new_row = np.diff(row_of[left_to_right], prepend=-1) != 0
    index = np.arange(len(retained))
    segment[left_to_right] = index - np.maximum.accumulate(np.where(new_row, index, 0)) + 1
    segment_ids, indices = np.zeros(count * row_length, np.int32), np.zeros(count * row_length, np.int32)
    segment_ids[flat], indices[flat] = np.repeat(segment, lengths), within
    index_in_sequence = indices.reshape(count, row_length)
    mask = scatter(loss_mask, 0, np.dtype(bool)) & (index_in_sequence > 0)

    row, start = np.full(len(tokens), -1, np.int64), np.zeros(len(tokens), np.int64)
    row[retained], start[retained] = row_of, start_of
    batch = Batch(
        tokens=scatter(tokens, pad_id, np.dtype(np.int32)),
        positions=index_in_sequence if positions is None else scatter(positions, 0, np.dtype(np.int32)),
        segment_ids=segment_ids.reshape(mask.shape),
        loss_mask=mask,
        extras={name: scatter(parts, 0) for name, parts in (extras or {}).items()},
        branches=None if branches is None else scatter(branches, 0, np.dtype(np.int32)),
    )
    return Packed(batch, row, start)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Batches of a few shapes, and the place of each sequence."""

    batches: list[Batch]
    batch_index: Int[np.ndarray, "N"]
    """Index of each sequence's batch; -1 if the sequence is longer than every row length."""
    row: Int[np.ndarray, "N"]
    """Row of each sequence in its batch."""
    start: Int[np.ndarray, "N"]
    """First column of each sequence."""

    def unpack(self, values: Sequence[Shaped[np.ndarray, "B T"]], lengths: Sequence[int]) -> list[np.ndarray]:
        """Per-token values of each sequence, in the order of `pack_buckets`' input, from the values of all batches."""
        places = zip(self.batch_index, self.row, self.start, lengths, strict=True)
        return [values[batch][row, start : start + length] for batch, row, start, length in places]


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
    batch_of, row_of, start_of = (np.full(len(tokens), -1, np.int64) for _ in range(3))
    waiting = np.zeros(0, np.int64)
    for bucket, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        low = lengths[bucket - 1] if bucket else 0
        waiting = np.append(waiting, np.flatnonzero((sizes > low) & (sizes <= length)))
        chosen = waiting.tolist()
        packed = pack(
            [tokens[i] for i in chosen],
            [loss_mask[i] for i in chosen],
            length,
            multiple=count,
            positions=None if positions is None else [positions[i] for i in chosen],
            branches=None if branches is None else [branches[i] for i in chosen],
            extras={name: [parts[i] for i in chosen] for name, parts in (extras or {}).items()},
        )
        used = int(packed.row.max(initial=-1)) + 1
        # Only full batches are taken; the last length also takes a batch that is partly padding.
        taken = used // count if bucket < len(lengths) - 1 else -(-used // count)
        ready = packed.row < taken * count
        placed = waiting[ready]
        batch_of[placed] = len(batches) + packed.row[ready] // count
        row_of[placed], start_of[placed] = packed.row[ready] % count, packed.start[ready]
        for index in range(taken):
            span = slice(index * count, (index + 1) * count)
            batches.append(jax.tree.map(lambda x, span=span: x[span], packed.batch))
        waiting = waiting[~ready]
    return Buckets(batches, batch_of, row_of, start_of)


def take_rows(batch: Batch, rows: Int[np.ndarray, "B"]) -> Batch:
    """Selects rows of a batch; index -1 gives a row of padding."""

    def take(x: np.ndarray) -> np.ndarray:
        out = x[rows]
        out[np.asarray(rows) < 0] = 0
        return out

    return Batch(
        take(batch.tokens),
        take(batch.positions),
        take(batch.segment_ids),
        take(batch.loss_mask),
        {name: take(x) for name, x in batch.extras.items()},
        None if batch.branches is None else take(batch.branches),
    )
