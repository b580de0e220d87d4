"""Which prompt's keys and values lie in which row of the cache, so that a prompt is prefilled once for all its samples."""

import numpy as np
from jaxtyping import Int


class Prefixes:
    """What the first slots of each row hold, or will hold once the row is fed."""

    def __init__(self, rows: int, chunk: int) -> None:
        """`chunk` is the number of tokens that a row is fed at a time: sharing is worth it where it saves a chunk."""
        self._chunk = chunk
        self._held: list[np.ndarray] = [np.zeros(0, np.int32)] * rows
        self._ready = np.zeros(rows, np.int64)
        self._fed: dict[int, int] = {}

    def opens(self, row: int, tokens: Int[np.ndarray, "T"]) -> None:
        """The row is to hold these tokens from slot 0 on; nothing of them is there yet."""
        self._held[row] = tokens
        self._ready[row] = 0

    def filled(self, row: int, slots: int) -> None:
        """Of the row's tokens so many will be there after this exchange: the device copies before it prefills."""
        self._fed[row] = min(slots, len(self._held[row]))

    def settle(self) -> None:
        """The exchange is over."""
        for row, slots in self._fed.items():
            self._ready[row] = slots
        self._fed.clear()

    def find(self, row: int, tokens: Int[np.ndarray, "T"]) -> tuple[int, int, bool]:
        """The best row to copy from: (row, tokens that it shares, whether they are there already).

        (row, 0, True) where no row saves a chunk. The row itself counts: what it held before is there at no cost.
        """
        best, most, ready = row, 0, True
        seen: dict[int, int] = {}
        for other in (row, *range(len(self._held))):
            held = self._held[other]
            if id(held) not in seen:
                seen[id(held)] = _common(held, tokens)
            common = seen[id(held)]
            there = bool(self._ready[other] >= common)
            if common > most or (common == most and there and not ready):
                best, most, ready = other, common, there
        if self._chunks(len(tokens) - most) >= self._chunks(len(tokens)):
            return row, 0, True
        return best, most, ready

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._chunk)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size
