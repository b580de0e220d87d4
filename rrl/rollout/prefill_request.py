"""Prefill requests: the tokens that a slot must prefill, sent to the device in chunks."""

import numpy as np
from jaxtyping import Int

from rrl.rollout.episodes import Request
from rrl.rollout.exchange import HEADER_LENGTH, NO_TOKEN, RECENT_TOKENS, PrefillChunk


class PrefillRequest:
    """The tokens that a slot must prefill before its turn begins."""

    def __init__(
        self,
        slot: int,
        tokens: Int[np.ndarray, "T"],
        start: int,
        request: Request,
        *,
        offset: int,
        turn_limit: int,
        stop_state: int,
    ) -> None:
        """Set up a request of which no chunk was sent.

        Args:
          slot: the slot.
          tokens: go to the cache positions from `start` on, except the last one, which stays pending.
          start: cache position of the first token.
          request: gives seed and temperature.
          offset: tokens of the trajectory before this context.
          turn_limit: maximum tokens of the turn.
          stop_state: start state of the stop automaton.
        """
        self.slot = slot
        recent = [NO_TOKEN] * (RECENT_TOKENS - len(tokens)) + tokens[-RECENT_TOKENS:].tolist()
        self.tokens = tokens[:-1]
        """Tokens that were not sent yet."""
        self.position = start
        """Cache position of the first of `tokens`."""
        self.begun = False
        """Whether its first chunk was sent."""
        self._header = PrefillChunk(
            slot=slot,
            start=0,
            length=0,
            begins_turn=0,
            seed=request.seed,
            offset=offset,
            turn_limit=turn_limit,
            stop_state=stop_state,
            temperature=np.float32(request.temperature).view(np.int32),
            source=slot,
            copied=0,
            held=0,
            last_4=recent[0],
            last_3=recent[1],
            last_2=recent[2],
            pending=recent[3],
        )

    def take_chunks(
        self, max_chunks: int, chunk_tokens: int, *, source: int, copied: int, held: int
    ) -> Int[np.ndarray, "chunks chunk_length"]:
        """Return the next chunks and remove their tokens from the request.

        Args:
          max_chunks: maximum number of chunks. At least one is returned, even if no tokens are left.
          chunk_tokens: maximum tokens of a chunk.
          source: `PrefillChunk.source` of all chunks.
          copied: `PrefillChunk.copied` of the first chunk. The others copy nothing.
          held: `PrefillChunk.held` of all chunks.
        """
        self.begun = True
        count = min(max_chunks, max(1, -(-len(self.tokens) // chunk_tokens)))
        tokens, self.tokens = self.tokens[: count * chunk_tokens], self.tokens[count * chunk_tokens :]
        message = np.zeros((count, HEADER_LENGTH + chunk_tokens), np.int32)
        message[:, :HEADER_LENGTH] = self._header._replace(
            start=self.position, length=chunk_tokens, source=source, held=held
        )
        chunks = PrefillChunk.of(message)  # views: writing to a field changes `message`
        chunks.start[:] += chunk_tokens * np.arange(count)
        chunks.length[-1] = len(tokens) - chunk_tokens * (count - 1)
        chunks.begins_turn[-1] = not len(self.tokens)
        chunks.copied[0] = copied
        message[:, HEADER_LENGTH:].flat[: len(tokens)] = tokens
        self.position += len(tokens)
        return message
