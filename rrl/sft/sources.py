"""Batch sources of supervised training. The batch of a step is a pure function of (seed, step).

`FixedSource` repeats a fixed set in epochs; `StreamSource` generates examples without end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from rrl.data.examples import Example
from rrl.rl.batch import Batch, take_rows
from rrl.rl.packing import pack


class BatchSource(Protocol):
    """Provides the batch of each step."""

    def batch(self, step: int) -> Batch:
        """Return the rows [B, T] of a step as NumPy arrays. The same step always gives the same batch."""
        ...


def pack_examples(examples: Sequence[Example], row_length: int, too_long: str = "error") -> Batch:
    """Pack all examples into rows of `row_length` tokens. `too_long`: see `rrl.rl.packing.pack`."""
    tokens, masks = [e.tokens for e in examples], [e.loss_mask for e in examples]
    return pack(tokens, masks, row_length, too_long=too_long).batch


class FixedSource:
    """A fixed set of examples, shuffled anew in each epoch.

    Packing places the longest examples first, so every epoch has the same number of rows: step s is in epoch
    s // steps_per_epoch.
    """

    def __init__(self, examples: Sequence[Example], rows: int, row_length: int, seed: int) -> None:
        self._examples, self._rows, self._row_length, self._seed = list(examples), rows, row_length, seed
        self._epoch = 0
        self._packed, self._order = self._load(0)
        self.steps_per_epoch = -(-len(self._packed.tokens) // rows)

    def batch(self, step: int) -> Batch:
        """Return the rows of a step. The last step of an epoch is filled up with empty rows."""
        epoch = step // self.steps_per_epoch
        if epoch != self._epoch:
            self._epoch, (self._packed, self._order) = epoch, self._load(epoch)
        at = step % self.steps_per_epoch * self._rows
        rows = self._order[at : at + self._rows]
        return take_rows(self._packed, np.pad(rows, (0, self._rows - len(rows)), constant_values=-1))

    def _load(self, epoch: int) -> tuple[Batch, Int[np.ndarray, "R"]]:
        """Return the packed rows of an epoch and their random order."""
        rng = np.random.default_rng((self._seed, epoch))
        shuffled = [self._examples[i] for i in rng.permutation(len(self._examples))]
        packed = pack_examples(shuffled, self._row_length)
        return packed, rng.permutation(len(packed.tokens))


@dataclasses.dataclass
class StreamSource:
    """An endless source, generated in blocks of `steps_per_block` steps."""

    make: Callable[[int], Sequence[Example]]
    """Generates the examples of a block, by its number."""
    rows: int
    """Rows per step."""
    row_length: int
    """Tokens per row."""
    seed: int
    """Seed of the order of rows within a block."""
    steps_per_block: int = 16
    """Steps per block. A block with too few rows for its steps repeats rows; one with too many drops some."""
    _cache: tuple[int, Batch] | None = None
    """Number and shuffled rows of the latest block."""

    def batch(self, step: int) -> Batch:
        """Return the rows of a step."""
        block = step // self.steps_per_block
        if self._cache is None or self._cache[0] != block:
            packed = pack_examples(self.make(block), self.row_length)
            order = np.random.default_rng((self.seed, block)).permutation(len(packed.tokens))
            self._cache = (block, take_rows(packed, order))
        packed = self._cache[1]
        at = step % self.steps_per_block * self.rows
        return take_rows(packed, np.arange(at, at + self.rows) % len(packed.tokens))


@dataclasses.dataclass(frozen=True)
class AlternatingSource:
    """Cycles through sources, `steps` steps each, so that most rows can be short and cheap and some long."""

    sources: Sequence[BatchSource]
    steps: int
    """Steps before the next source."""

    def batch(self, step: int) -> Batch:
        """Return the batch of the source of this step."""
        return self.sources[step // self.steps % len(self.sources)].batch(step)
