"""The prefill requests of one scheduler, packed into the chunks of its replies. Read `PrefillQueue.take_chunks` first."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from rrl.rollout.exchange import HEADER_LENGTH, ExchangeSizes, PrefillChunk
from rrl.rollout.prefill_request import PrefillRequest
from rrl.rollout.prefixes import PrefixIndex

LENGTH, COPIED = (PrefillChunk._fields.index(name) for name in ("length", "copied"))
"""Columns of a chunk's header."""


class _PrefixCopy(NamedTuple):
    """A copy of a prefix from another slot's cache."""

    source: int
    """Slot to copy from; the slot itself if nothing is copied."""
    tokens: int
    """Number of leading tokens to copy."""
    after_prefill: bool
    """Whether this exchange still prefills the prefix in the source. If so, the copy follows after all chunks are prefilled."""


class PrefillQueue:
    """The prefill requests of all slots, oldest first. Slots copy common prefixes from each other (`PrefixIndex`)."""

    def __init__(self, sizes: ExchangeSizes, share_prompts: bool) -> None:
        """Set up an empty queue. `share_prompts`: whether slots copy common prefixes."""
        self._sizes = sizes
        self._prefixes = (
            PrefixIndex(sizes.slots, sizes.chunk_tokens, window=sizes.window, window_slots=sizes.window_slots)
            if share_prompts
            else None
        )
        self._requests: dict[int, PrefillRequest] = {}
        """The request of each slot that has one."""
        self.prefilled_tokens = 0
        """Tokens that were sent to be prefilled; copied ones do not count."""

    def __len__(self) -> int:
        """Number of slots with a request."""
        return len(self._requests)

    def __contains__(self, slot: int) -> bool:
        """Whether `slot` has a request."""
        return slot in self._requests

    def add(self, request: PrefillRequest) -> None:
        """Add the request of a slot that has none."""
        self._requests[request.slot] = request

    def record_lengths(self, lengths: Int[np.ndarray, "slots"]) -> None:
        """Record how many tokens each slot has decoded in a turn that has not ended; 0 for the other slots."""
        if self._prefixes is not None:
            self._prefixes.record_lengths(lengths)

    def record_decoded(self, slot: int, tokens: Int[np.ndarray, "T"]) -> None:
        """Record that the cache of `slot` now ends with these decoded tokens."""
        if self._prefixes is not None:
            self._prefixes.append_decoded(slot, tokens)

    def forget(self, slot: int) -> None:
        """Let no slot copy from the present cache of `slot`."""
        if self._prefixes is not None:
            self._prefixes.clear(slot)

    def take_chunks(self) -> Int[np.ndarray, "chunks chunk_length"]:
        """Return the chunks of the next reply, padded with empty ones, and remove their tokens from the requests."""
        if self._prefixes is not None:
            self._prefixes.end_exchange()
        chunks = self._sizes.empty_chunks()
        room, copies, parts = len(chunks), 0, [chunks[:0]]
        for slot in list(self._requests):
            part = self._next_chunks(slot, room, copies)
            room -= len(part)
            copies += int(np.count_nonzero(part[:, COPIED]))
            parts.append(part)
        filled = np.concatenate(parts)
        # Chunks with tokens first, as `rrl.rollout.prefilling.prefill` expects.
        chunks[: len(filled)] = filled[np.argsort(filled[:, LENGTH] == 0, kind="stable")]
        return chunks

    def _next_chunks(self, slot: int, room: int, copies: int) -> Int[np.ndarray, "chunks chunk_length"]:
        """Return the next chunks of a slot's request.

        Args:
          slot: the slot.
          room: maximum number of chunks.
          copies: number of slots that already copy a prefix in this exchange.

        Returns:
          headers and tokens. No chunks if `room` is 0 or the request must wait (`_choose_copy`).
        """
        request, size = self._requests[slot], self._sizes.chunk_tokens
        no_chunks = np.zeros((0, HEADER_LENGTH + size), np.int32)
        if not room:
            return no_chunks
        held, copy = request.position, _PrefixCopy(slot, 0, False)
        if self._prefixes is not None and not request.begun:
            chosen = self._choose_copy(request, copies)
            if chosen is None:
                return no_chunks
            copy = chosen
        start = request.position
        copied = -copy.tokens if copy.after_prefill else copy.tokens
        chunks = request.take_chunks(room, size, source=copy.source, copied=copied, held=held)
        self.prefilled_tokens += request.position - start
        if self._prefixes is not None:
            self._prefixes.schedule(slot, request.position, copied_after_prefill=copy.after_prefill)
        if not len(request.tokens):
            del self._requests[slot]
        return chunks

    def _choose_copy(self, request: PrefillRequest, copies: int) -> _PrefixCopy | None:
        """Choose a prefix to copy, and remove its tokens from a request that has not begun.

        Returns:
          the copy. None if the request must wait for a later exchange: another slot is prefilling the prefix, or no further
          slot may copy in this exchange.
        """
        assert self._prefixes is not None
        slot, held = request.slot, request.position
        held_tokens = self._prefixes.tokens(slot) if held else request.tokens[:0]
        assert len(held_tokens) == held, (
            f"slot {slot} holds {len(held_tokens)} tokens, but its text continues at {held}"
        )
        text = np.concatenate([held_tokens, request.tokens])
        source, shared, ready = self._prefixes.find_source(slot, text, held)
        # Chunks of this slot would be prefilled before such a copy, so it must cover the whole text.
        after_prefill = not ready and shared == len(text) and self._prefixes.prefill_completes(source, shared)
        if not (ready or after_prefill) or (source != slot and copies == self._sizes.max_copies):
            return None
        holders = [*([source] if shared else []), *([slot] if held else [])]
        self._prefixes.assign(slot, text, held, holders)
        request.tokens, request.position = text[shared:], shared
        return _PrefixCopy(source, shared if source != slot else 0, after_prefill)
