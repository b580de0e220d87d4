"""Stop strings matched on bytes: one transition per vocabulary token, so that jitted code advances one integer.

A tokenizer may spell `</search>` in many ways and glue `>` to what follows; bytes do not care. The automaton is
Aho-Corasick over the stop strings; its transition for a token is the transition over all the token's bytes, and a
stop string that ends anywhere inside a token counts.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from rrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
    """The compiled stop strings of a protocol for one tokenizer."""

    strings: tuple[str, ...]
    table: Int[np.ndarray, "states V"]
    """Next state after a token; state 0 is the start, the last `len(strings)` states are absorbing accepts."""

    @property
    def first_accept(self) -> int:
        """States from this one on mean that stop string `state - first_accept` has been seen."""
        return self.table.shape[0] - len(self.strings)


@dataclasses.dataclass(frozen=True)
class StopSets:
    """Automata of several sets of stop strings in one table, each with a start of its own."""

    strings: tuple[str, ...]
    """All of them, each once."""
    starts: dict[tuple[str, ...], int]
    """The start state of each set."""
    table: Int[np.ndarray, "states V"]
    """As of a `StopAutomaton`, whose accepts are those of `strings`."""

    @property
    def first_accept(self) -> int:
        """As of a `StopAutomaton`."""
        return self.table.shape[0] - len(self.strings)


def compile_sets(sets: Sequence[tuple[str, ...]], token_bytes: Sequence[bytes]) -> StopSets:
    """Compiles sets of stop strings side by side; arguments and errors as for `compile_stops`."""
    parts = [compile_stops(strings, token_bytes) for strings in sets]
    strings = tuple(dict.fromkeys(string for part in parts for string in part.strings))
    starts = np.cumsum([0, *(part.first_accept for part in parts)])
    rows = []
    for start, part in zip(starts, parts):
        accepts = starts[-1] + np.array([strings.index(string) for string in part.strings], np.int32)
        states = np.concatenate([start + np.arange(part.first_accept), accepts])
        rows.append(states[part.table[: part.first_accept]])
    last = starts[-1] + np.arange(len(strings))
    rows.append(np.broadcast_to(last[:, None], (len(strings), len(token_bytes))))
    return StopSets(
        strings,
        {tuple(part.strings): int(start) for start, part in zip(starts, parts)},
        np.concatenate(rows).astype(np.int32),
    )


def compile_stops(strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopAutomaton:
    """Compiles `strings` for a vocabulary given as the exact bytes of each token id.

    The first string to be completed wins; of two that end at the same byte, the longer. Raises UserError for an empty
    stop string, a repeated one, or one that no bytes spell.
    """
    try:
        patterns = [string.encode() for string in strings]
    except UnicodeEncodeError as error:
        raise UserError(
            f"the stop string {error.object!r} has half a character, {error.object[error.start]!r}: no text holds it, give "
            "whole ones"
        ) from error
    if not all(patterns) or len(set(patterns)) != len(patterns):
        raise UserError(f"stop strings must be non-empty and distinct, found {list(strings)}")
    delta, first_accept = _byte_automaton(patterns)
    lengths = np.array([len(data) for data in token_bytes], np.int64)
    order = np.argsort(-lengths, kind="stable")  # each byte is a step of those that have it, which come first
    text = np.frombuffer(b"".join(token_bytes[token] for token in order), np.uint8)
    starts = np.cumsum(lengths[order]) - lengths[order]
    states = delta.shape[0]
    table = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for place in range(lengths.max(initial=0)):
        longer = np.count_nonzero(lengths > place)
        data = text[starts[:longer] + place]
        for row in table:
            row[:longer] = delta[row[:longer], data]
    table[:, order] = table.copy()
    assert first_accept == states - len(patterns)
    return StopAutomaton(tuple(strings), table)


def _byte_automaton(patterns: list[bytes]) -> tuple[np.ndarray, int]:
    """Aho-Corasick as a dense table [states, 256]; accepts are absorbing."""
    children: list[dict[int, int]] = [{}]
    ends: list[int] = [-1]
    for index, pattern in enumerate(patterns):
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(-1)
            node = children[node][byte]
        ends[node] = index
    failure = [0] * len(children)
    order: list[int] = []
    queue = collections.deque(children[0].values())
    while queue:
        node = queue.popleft()
        order.append(node)
        for byte, child in children[node].items():
            fallback = failure[node]
            while fallback and byte not in children[fallback]:
                fallback = failure[fallback]
            failure[child] = children[fallback].get(byte, 0)
            queue.append(child)
    for node in order:
        if ends[node] < 0:
            ends[node] = ends[failure[node]]
    live = [0] + [node for node in order if ends[node] < 0]
    number = {node: i for i, node in enumerate(live)}
    first_accept = len(live)
    delta = np.zeros((first_accept + len(patterns), 256), np.int32)
    goto = np.zeros((len(children), 256), np.int64)
    for node in [0, *order]:
        if node:
            goto[node] = goto[failure[node]]
        for byte, child in children[node].items():
            goto[node, byte] = child
    for node in live:
        row = number[node]
        for byte in range(256):
            target = goto[node, byte]
            delta[row, byte] = first_accept + ends[target] if ends[target] >= 0 else number[target]
    for accept in range(first_accept, delta.shape[0]):
        delta[accept] = accept
    return delta, first_accept
