"""Prefix sharing: finds slots whose KV cache already holds the prefix of a text, so that it is prefilled once.

All samples of a prompt share it, and so do samples that wrote the same tokens and received the same passages.

A layer with a sliding window holds only the last positions of a slot. Then a slot that has written too many tokens after the
common prefix is no source: it has overwritten the window at the end of the prefix.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from rrl.models.decoder import MAX_DECODE_TOKENS

EMPTY = np.iinfo(np.int32).min
"""Marks a cache position without a known token: neither a token nor ~token."""


class PrefixIndex:
    """The tokens of each slot from cache position 0 on: those in the cache, and those to be prefilled or copied.

    A token that was decoded is stored as ~token: its keys and values differ in the last bits from those of the same token
    prefilled, so that only slots that decoded the same tokens share them.
    """

    def __init__(self, slots: int, chunk_tokens: int, *, window: int = 0, window_slots: int = 0) -> None:
        """Set up an index of empty slots.

        Args:
          slots: number of slots.
          chunk_tokens: length of a prefill chunk. A prefix is shared only if that saves a chunk.
          window: sliding window of some layers, in tokens. 0: all layers hold all positions.
          window_slots: number of last positions that such a layer holds.
        """
        self._chunk_tokens = chunk_tokens
        self._window = window
        # A decode step also writes draft tokens, at positions after those of the slot's tokens.
        self._surely_held = window_slots - (MAX_DECODE_TOKENS - 1)
        self._overwritten_before = np.zeros(slots, np.int64)
        """How many leading positions the layers with a window had lost when a slot got its present text."""
        self._decoding = np.zeros(slots, np.int64)
        """How many tokens a slot has decoded after its tokens, in a turn that has not ended."""
        self._tokens = np.full((slots, chunk_tokens), EMPTY, np.int32)
        self._lengths = np.zeros(slots, np.int64)
        self._ready = np.zeros(slots, np.int64)
        """How many of a slot's tokens are in its cache."""
        self._scheduled: dict[int, int] = {}
        """How many of a slot's tokens will be in its cache after the current exchange."""
        self._copied_after_prefill: set[int] = set()
        """Slots that get their prefix at the end of the current exchange."""
        self._no_match = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def assign(
        self, slot: int, tokens: Int[np.ndarray, "T"], ready: int = 0, holders: Sequence[int] = ()
    ) -> None:
        """Set the tokens that `slot` will hold from position 0 on.

        Args:
          slot: the slot.
          tokens: the tokens.
          ready: how many of them are in its cache.
          holders: slots in whose cache the first tokens are now: a slot from which they are copied, and `slot` itself if it
            already holds some.
        """
        self._overwritten_before[slot] = max((int(self._overwritten(other)) for other in holders), default=0)
        positions = self._tokens.shape[1]
        if len(tokens) > positions:
            more = max(len(tokens) - positions, positions)
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)), constant_values=EMPTY)
        self._tokens[slot] = EMPTY
        self._tokens[slot, : len(tokens)] = tokens
        self._lengths[slot], self._ready[slot] = len(tokens), ready

    def append_decoded(self, slot: int, tokens: Int[np.ndarray, "T"]) -> None:
        """Append tokens that `slot` decoded."""
        tokens = np.concatenate([self.tokens(slot), ~tokens])
        self.assign(slot, tokens, len(tokens), [slot])
        self._scheduled.pop(slot, None)
        self._copied_after_prefill.discard(slot)

    def record_lengths(self, lengths: Int[np.ndarray, "slots"]) -> None:
        """Record how many tokens each slot has decoded in a turn that has not ended; 0 for the other slots."""
        self._decoding[:] = lengths

    def clear(self, slot: int) -> None:
        """Forget the tokens of `slot`, so that no other slot copies from it."""
        self.assign(slot, np.zeros(0, np.int32))
        self._scheduled.pop(slot, None)
        self._copied_after_prefill.discard(slot)

    def tokens(self, slot: int) -> Int[np.ndarray, "T"]:
        """Return the tokens that `slot` holds or will hold; ~token if decoded."""
        return self._tokens[slot, : self._lengths[slot]].copy()

    def schedule(self, slot: int, count: int, *, copied_after_prefill: bool = False) -> None:
        """Record that the first `count` tokens of `slot` will be in its cache after the current exchange.

        Args:
          slot: the slot.
          count: number of tokens.
          copied_after_prefill: whether the slot copies its prefix after all chunks of the exchange are prefilled.
        """
        self._scheduled[slot] = min(count, int(self._lengths[slot]))
        if copied_after_prefill:
            self._copied_after_prefill.add(slot)

    def prefill_completes(self, slot: int, count: int) -> bool:
        """Return whether prefilling alone completes the first `count` tokens of `slot` in the current exchange.

        If so, another slot can copy them at the end of the same exchange."""
        return slot not in self._copied_after_prefill and self._scheduled.get(slot, 0) >= count

    def end_exchange(self) -> None:
        """Mark all scheduled tokens as present."""
        for slot, count in self._scheduled.items():
            self._ready[slot] = count
        self._scheduled.clear()
        self._copied_after_prefill.clear()

    def find_source(self, slot: int, tokens: Int[np.ndarray, "T"], held: int = 0) -> tuple[int, int, bool]:
        """Find the best slot to copy a prefix of `tokens` from.

        Args:
          slot: the slot that will hold `tokens`. It may be its own source, at no cost: its cache still holds the tokens of
            its previous text.
          tokens: the whole text.
          held: number of leading tokens that `slot` already holds for this text.

        Returns:
          (source slot, number of shared tokens, whether they are already in the source's cache). If `slot` should copy nothing:
          (slot, held, True). That is so in two cases: no copy saves a chunk; or `held` > 0, a copy saves only one chunk, and
          `slot` would have to wait until another slot has prefilled the prefix.
        """
        chunks = self._chunks(len(tokens) - held)
        min_shared = len(tokens) - self._chunk_tokens * (chunks - 1)  # sharing fewer tokens saves no chunk
        slots, shared = self._with_common_prefix(tokens, min_shared) if chunks else self._no_match
        if self._window:
            usable = self._overwritten(slots) <= np.maximum(shared - self._window + 1, 0)
            slots, shared = slots[usable], shared[usable]
        if not len(slots):
            return slot, held, True
        longest = int(shared.max())
        candidates = slots[shared == longest]
        ready = candidates[self._ready[candidates] >= longest]
        if len(ready):
            return slot if slot in ready else int(ready[0]), longest, True
        if held and chunks - self._chunks(len(tokens) - longest) < 2:
            return slot, held, True
        # Prefer a slot whose prefix can be copied at the end of this exchange.
        earliest = min(candidates, key=lambda other: not self.prefill_completes(int(other), longest))
        return slot if slot in candidates else int(earliest), longest, False

    def _with_common_prefix(
        self, tokens: Int[np.ndarray, "T"], min_shared: int
    ) -> tuple[Int[np.ndarray, "r"], Int[np.ndarray, "r"]]:
        """Return the slots that share at least `min_shared` leading tokens, and how many each shares."""
        size = min(len(tokens), self._tokens.shape[1])
        if min_shared > size:
            return self._no_match
        # One token rules out nearly all slots.
        slots = np.flatnonzero(self._tokens[:, min_shared - 1] == tokens[min_shared - 1])
        differs = np.ones((len(slots), size + 1), bool)
        np.not_equal(self._tokens[slots, :size], tokens[:size], out=differs[:, :size])
        shared = differs.argmax(axis=1)
        return slots[shared >= min_shared], shared[shared >= min_shared]

    def _overwritten(self, slots: Int[np.ndarray, "r"] | int) -> Int[np.ndarray, "r"]:
        """Return an upper bound of how many leading positions the layers with a window no longer hold.

        All tokens of a slot count as written, even those that are to be prefilled.
        """
        written = self._lengths[slots] + self._decoding[slots]
        return np.maximum(self._overwritten_before[slots], written - self._surely_held)

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._chunk_tokens)
