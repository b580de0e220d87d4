"""Whose keys and values lie in which row of the cache: what begins alike is prefilled once, for all samples of a prompt and
for those that came the same way to the same passages."""

import numpy as np
from jaxtyping import Int

NOTHING = np.iinfo(np.int32).min
"""In a slot of which nothing is known: neither a token nor ~token."""


class PrefixIndex:
    """What the first slots of each row hold, or will hold once the row is fed."""

    def __init__(self, rows: int, chunk: int) -> None:
        """`chunk` is the number of tokens that a row is fed at a time: sharing is worth it where it saves a chunk."""
        self._chunk = chunk
        self._held = np.full((rows, chunk), NOTHING, np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._ready = np.zeros(rows, np.int64)
        self._fed: dict[int, int] = {}
        self._last: set[int] = set()
        self._nobody = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def opens(self, row: int, tokens: Int[np.ndarray, "T"], there: int = 0) -> None:
        """The row is to hold these tokens from slot 0 on; the first `there` of them it does."""
        slots = self._held.shape[1]
        if len(tokens) > slots:
            more = max(len(tokens) - slots, slots)
            self._held = np.pad(self._held, ((0, 0), (0, more)), constant_values=NOTHING)
        self._held[row] = NOTHING
        self._held[row, : len(tokens)] = tokens
        self._lengths[row], self._ready[row] = len(tokens), there

    def wrote(self, row: int, tokens: Int[np.ndarray, "T"]) -> None:
        """Behind what the row was fed stand tokens now that it decoded. They are shared with rows that decoded the same, not
        with those that are to be fed it: the last bits differ."""
        held = np.concatenate([self.held(row), ~tokens])
        self.opens(row, held, len(held))
        self._fed.pop(row, None)
        self._last.discard(row)

    def forget(self, row: int) -> None:
        """Nobody is to copy what the row holds."""
        self.opens(row, np.zeros(0, np.int32))
        self._fed.pop(row, None)
        self._last.discard(row)

    def held(self, row: int) -> Int[np.ndarray, "T"]:
        """What the row holds or will hold, ~token where it was decoded."""
        return self._held[row, : self._lengths[row]].copy()

    def filled(self, row: int, slots: int, *, last: bool = False) -> None:
        """Of the row's tokens so many will be there after this exchange; `last`: copied once all else is prefilled."""
        self._fed[row] = min(slots, int(self._lengths[row]))
        if last:
            self._last.add(row)

    def fed(self, row: int, slots: int) -> bool:
        """Whether so many are there once this exchange has prefilled: then they can be copied last."""
        return row not in self._last and self._fed.get(row, 0) >= slots

    def settle(self) -> None:
        """The exchange is over."""
        for row, slots in self._fed.items():
            self._ready[row] = slots
        self._fed.clear()
        self._last.clear()

    def find(self, row: int, tokens: Int[np.ndarray, "T"], own: int = 0) -> tuple[int, int, bool]:
        """The best row to copy from: (row, tokens that it shares, whether they are there already).

        (row, own, True) where no row saves a chunk: the first `own` tokens are the row's already. The row itself counts: what it
        held before is there at no cost. A single chunk behind its own is not worth waiting for.
        """
        chunks = self._chunks(len(tokens) - own)
        least = len(tokens) - self._chunk * (chunks - 1)  # who shares fewer saves no chunk
        rows, shared = self._sharing(tokens, least) if chunks else self._nobody
        if not len(rows):
            return row, own, True
        most = int(shared.max())
        best = rows[shared == most]
        there = best[self._ready[best] >= most]
        if chunks - self._chunks(len(tokens) - most) < 2 and own and not len(there):
            return row, own, True
        candidates = there if len(there) else sorted(best, key=lambda other: not self.fed(int(other), most))
        return row if row in candidates else int(candidates[0]), most, bool(len(there))

    def _sharing(
        self, tokens: Int[np.ndarray, "T"], least: int
    ) -> tuple[Int[np.ndarray, "r"], Int[np.ndarray, "r"]]:
        """The rows whose tokens begin with `least` of these or more, and with how many."""
        size = min(len(tokens), self._held.shape[1])
        if least > size:
            return self._nobody
        # Nearly all rows are ruled out by one token.
        rows = np.flatnonzero(self._held[:, least - 1] == tokens[least - 1])
        differs = np.ones((len(rows), size + 1), bool)
        np.not_equal(self._held[rows, :size], tokens[:size], out=differs[:, :size])
        shared = differs.argmax(axis=1)
        return rows[shared >= least], shared[shared >= least]

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._chunk)
