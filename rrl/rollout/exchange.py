"""The words that device and host exchange: the state of rows one way, chunks and marks the other."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

DECODING, PAUSED, BLOCKED, OFF = 0, 1, 2, 3
"""Status of a row: decoding; paused, the host has something to do for it; paused, the host waits for others (a search, the
next request); nothing left to do."""

STOP_EOS, STOP_TURN, STOP_CONTEXT, STOP_NOT_FINITE = -1, -2, -3, -4
"""Why a row paused, where it was not one of the stop strings."""

ABORT = -1
"""In place of the decode steps that a host gives the device: it met an error, and all devices leave the loop."""


CHUNK_TOKENS = 32
"""Most tokens of a piece: a shorter one is padded to it."""

PREFILLS_PER_EXCHANGE = 6
"""How often the device prefills between two exchanges at most."""


class PrefillChunk(NamedTuple):
    """A piece of what a row is fed; the tokens follow. Later pieces of a row's text come after earlier ones."""

    row: Any
    start: Any
    """Slot of the first token."""
    length: Any
    """Number of tokens to be prefilled."""
    begin: Any
    """1: then the policy's turn begins."""
    request: Any
    offset: Any
    limit: Any
    tag: Any
    """Start state of its stop automaton."""
    temperature: Any
    """The bits of a float32."""
    source: Any
    """A row whose first `copied` slots hold what this row's are to hold; where `copied` is negative, they will once these pieces
    are prefilled."""
    copied: Any
    kept: Any
    """Of these so many hold it already."""
    last_4: Any
    last_3: Any
    last_2: Any
    pending: Any
    """The last tokens of all that the row is fed; NO_TOKEN where it has fewer. The turn begins with what follows `pending`, which
    is none of these."""


HEADER = len(PrefillChunk._fields)

RECENT = HEADER - PrefillChunk._fields.index("last_4")
"""So many last tokens of a row are known to the device."""

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Static sizes of the exchange between device and host, for one data shard."""

    rows: int
    context: int
    """Cache slots of a row: no context is longer."""
    wake_threshold: int
    """Rows that wait when decoding stops for them; as many queries are encoded together."""
    prefill_tokens: int
    """Tokens that are prefilled together."""
    query_tokens: int
    """Width of the query encoder's input; 0 without an encoder."""
    max_wait_steps: int = 8
    """Decode steps that a paused row waits at most while others run."""

    @property
    def piece(self) -> int:
        """Tokens of a piece."""
        return min(CHUNK_TOKENS, self.prefill_tokens)

    @property
    def together(self) -> int:
        """Pieces that are prefilled together."""
        return max(1, self.prefill_tokens // CHUNK_TOKENS)

    @property
    def pieces(self) -> int:
        """Pieces of one exchange."""
        return PREFILLS_PER_EXCHANGE * self.together

    @property
    def copies(self) -> int:
        """Rows that copy a prefix in one exchange, at most."""
        return min(self.wake_threshold, self.pieces)

    @property
    def words(self) -> int:
        """Length of the array that the host returns: chunks, queries, marks, and two numbers: of the queries, and of the
        decode steps after which it wants to be asked again if rows are paused."""
        return self.pieces * (HEADER + self.piece) + self.wake_threshold * self.query_tokens + self.rows + 2


@dataclasses.dataclass(slots=True)
class DeviceReport:
    """What the device reports: one entry a row."""

    status: Int[np.ndarray, "R"]
    stop: Int[np.ndarray, "R"]
    """Index of the stop string, or one of the STOP_* codes."""
    ids: Int[np.ndarray, "R A"]
    logps: Float[np.ndarray, "R A"]
    sampled_logps: Float[np.ndarray, "R A"]
    length: Int[np.ndarray, "R"]

    @classmethod
    def from_message(
        cls, words: Int[np.ndarray, "words"], rows: int, embedded: int
    ) -> "tuple[DeviceReport, Float[np.ndarray, 'embedded']]":
        """The fields of all rows, one after the other and floats by their bits, and the `embedded` numbers behind them. (As one
        array, since each that a callback is handed costs the host more than what it does with it.)"""
        turn = ((len(words) - embedded) // rows - 3) // 3
        sizes = np.array([1, 1, turn, turn, turn, 1]) * rows
        status, stop, ids, logps, sampled, length, vectors = np.split(words, np.cumsum(sizes))
        turns = cls(
            status,
            stop,
            ids.reshape(rows, turn),
            logps.view(np.float32).reshape(rows, turn),
            sampled.view(np.float32).reshape(rows, turn),
            length,
        )
        return turns, vectors.view(np.float32)
