"""Messages between the device and a scheduler, and their sizes.

In one exchange the device sends a report (`DeviceReport`), and the scheduler sends a reply. Both messages are int32 arrays of a
fixed length. A reply holds, in this order:

    chunks       ExchangeSizes.chunks prefill chunks, each a header (`PrefillChunk`) and `chunk_tokens` tokens
    queries      token ids of the `wake_threshold` queries to embed, `query_tokens` each
    statuses     new status of each slot + 1; 0: unchanged
    query count  number of queries to embed
    wait steps   `max_wait_steps` of the next call of `decode`, or ABORT
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

DECODING, PAUSED, BLOCKED, OFF = 0, 1, 2, 3
"""Status of a slot. DECODING: the policy writes. PAUSED: the scheduler has work to do for it, or its text is being
prefilled, or its query is being embedded. BLOCKED: it waits for a search or for the next request. OFF: no request is left.
`status <= PAUSED` means DECODING or PAUSED."""

STOP_EOS, STOP_TURN, STOP_CONTEXT, STOP_NOT_FINITE = -1, -2, -3, -4
"""Why a slot paused, if not at a stop string: end-of-sequence token, token limit of the turn, end of the context, logits that
are not finite."""

ABORT = -1
"""After an error, a scheduler sends this in place of the wait steps. Then all devices leave the loop."""

CHUNK_TOKENS = 32
"""Maximum tokens of a prefill chunk. A shorter chunk is padded."""

PREFILLS_PER_EXCHANGE = 6
"""A reply has room for the chunks of this many prefill calls of the largest size (`ExchangeSizes.chunks_per_prefill` chunks)."""


class PrefillChunk(NamedTuple):
    """Header of a prefill chunk; its tokens follow. The chunks of a slot are in the order of its text.

    Each field is an int32, or an array of them with one entry per chunk.
    """

    slot: Any
    start: Any
    """Cache position of the first token."""
    length: Any
    """Number of tokens to prefill."""
    begins_turn: Any
    """1 if the policy's turn begins after this chunk, else 0."""
    seed: Any
    """Seed of the request."""
    offset: Any
    """Tokens of the trajectory before this context."""
    turn_limit: Any
    """Maximum tokens of the turn."""
    stop_state: Any
    """Start state of the stop automaton."""
    temperature: Any
    """The bits of a float32."""
    source: Any
    """Slot to copy a prefix from."""
    copied: Any
    """Number of leading cache positions to copy from `source`. 0: none. Negative: copy them after all chunks of this exchange
    are prefilled."""
    held: Any
    """Number of leading cache positions in which the slot already holds this text; they need no copy."""
    last_4: Any
    last_3: Any
    last_2: Any
    pending: Any
    """The last tokens of the prefill request; NO_TOKEN in place of each missing one. `pending` is not prefilled: the first
    decode step of the turn computes it."""

    @classmethod
    def of(cls, chunks: Any) -> "PrefillChunk":
        """Return the header fields of chunks [..., chunk_length], each of shape [...]."""
        return cls(*(chunks[..., index] for index in range(HEADER_LENGTH)))


HEADER_LENGTH = len(PrefillChunk._fields)

RECENT_TOKENS = HEADER_LENGTH - PrefillChunk._fields.index("last_4")
"""Number of last tokens of each slot that the device stores, for sampling and for drafts."""

NO_TOKEN = -1
"""Stands for a missing token in place of a token id."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Static sizes of the messages between the device and the scheduler of one data shard."""

    slots: int
    """Slots of the data shard."""
    context: int
    """Cache positions of a slot: the maximum length of a context."""
    wake_threshold: int
    """Decoding is interrupted when this many slots per data shard are paused, on average over the shards. Also the maximum
    number of queries that are embedded together, since each of these slots may search."""
    prefill_tokens: int
    """Tokens that are prefilled together."""
    query_tokens: int
    """Width of the query encoder's input; 0 without an encoder."""
    max_wait_steps: int = 8
    """Maximum number of decode steps between two exchanges while any slot is PAUSED or BLOCKED."""
    window: int = 0
    """Sliding window of the layers whose cache holds only the last positions of a slot, in tokens. 0: all hold all positions."""
    window_slots: int = 0
    """How many last positions these layers hold, draft tokens included."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill chunk."""
        return min(CHUNK_TOKENS, self.prefill_tokens)

    @property
    def chunks_per_prefill(self) -> int:
        """Chunks that are prefilled together."""
        return max(1, self.prefill_tokens // CHUNK_TOKENS)

    @property
    def chunks(self) -> int:
        """Chunks of a reply; unused ones are empty."""
        return PREFILLS_PER_EXCHANGE * self.chunks_per_prefill

    @property
    def max_copies(self) -> int:
        """Maximum number of slots that copy a prefix in one exchange."""
        return min(self.wake_threshold, self.chunks)

    @property
    def reply_length(self) -> int:
        """Length of a reply (see the module's docstring)."""
        return (
            self.chunks * (HEADER_LENGTH + self.chunk_tokens)
            + self.wake_threshold * self.query_tokens
            + self.slots
            + 2
        )

    def empty_chunks(self) -> Int[np.ndarray, "chunks chunk_length"]:
        """Return the chunks of a reply without prefill requests."""
        chunks = np.zeros((self.chunks, HEADER_LENGTH + self.chunk_tokens), np.int32)
        PrefillChunk.of(chunks).slot[:] = self.slots  # no slot
        return chunks

    def empty_queries(self) -> Int[np.ndarray, "Q query_tokens"]:
        """Return the queries of a reply without queries."""
        return np.zeros((self.wake_threshold, self.query_tokens), np.int32)


@dataclasses.dataclass(slots=True)
class DeviceReport:
    """What the device reports of each slot; A is the maximum number of tokens of a turn."""

    status: Int[np.ndarray, "slots"]
    stop: Int[np.ndarray, "slots"]
    """Index of the stop string, or one of the STOP_* codes."""
    ids: Int[np.ndarray, "slots A"]
    """Tokens of the current turn."""
    logps: Float[np.ndarray, "slots A"]
    """Their log-probabilities under the full distribution."""
    sampled_logps: Float[np.ndarray, "slots A"]
    """Their log-probabilities under the distribution from which they were sampled."""
    length: Int[np.ndarray, "slots"]
    """Number of these tokens."""

    @classmethod
    def from_message(
        cls, message: Int[np.ndarray, "message"], slots: int, embedding_size: int
    ) -> "tuple[DeviceReport, Float[np.ndarray, 'embedding_size']]":
        """Split a device's message into the report and the query embeddings.

        The message holds the fields of all slots, one field after the other, then the embeddings. Floats are stored as the
        int32 with the same bits. All fields share one array, because a callback has a high fixed cost per array that it
        receives.

        Args:
          message: the message of one data shard.
          slots: number of slots.
          embedding_size: number of floats of all embeddings.
        """
        # Per slot: status, stop, length, and ids, logps, sampled_logps of a turn.
        turn = ((len(message) - embedding_size) // slots - 3) // 3
        sizes = np.array([1, 1, turn, turn, turn, 1]) * slots
        status, stop, ids, logps, sampled_logps, length, embeddings = np.split(message, np.cumsum(sizes))
        report = cls(
            status,
            stop,
            ids.reshape(slots, turn),
            logps.view(np.float32).reshape(slots, turn),
            sampled_logps.view(np.float32).reshape(slots, turn),
            length,
        )
        return report, embeddings.view(np.float32)
