"""Stop strings, matched on bytes: one transition per vocabulary token, so that jitted code advances one integer per token.

A tokenizer may split `</search>` in many ways and merge `>` with the next characters, but its bytes are always the same. The
automaton is Aho-Corasick over the stop strings. Its transition for a token runs over all bytes of the token; a stop string that
ends inside a token counts.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from rrl.errors import UserError

CACHED_STOP_TABLES = 8
"""Number of tables in the cache. Few suffice: most runs use the stop strings of an earlier run, or some of them."""


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
    """The compiled stop strings of one environment, for one tokenizer."""

    strings: tuple[str, ...]
    table: Int[np.ndarray, "states V"]
    """Next state after a token. State 0 is the start; the last `len(strings)` states are accepting and absorbing."""

    @property
    def first_accept(self) -> int:
        """First accepting state: state s from it on means that stop string `s - first_accept` was seen."""
        return self.table.shape[0] - len(self.strings)


@dataclasses.dataclass(frozen=True)
class StopSets:
    """The automata of several sets of stop strings in one table. Each set has its own start state."""

    strings: tuple[str, ...]
    """The stop strings of all sets, without duplicates."""
    starts: dict[tuple[str, ...], int]
    """The start state of each set."""
    table: Int[np.ndarray, "states V"]
    """As in `StopAutomaton`; the accepting states are those of `strings`."""

    @property
    def first_accept(self) -> int:
        """As in `StopAutomaton`."""
        return self.table.shape[0] - len(self.strings)


def compile_sets(sets: Sequence[tuple[str, ...]], token_bytes: Sequence[bytes]) -> StopSets:
    """Compile several sets of stop strings into one table. Arguments and errors are those of `compile_stops`."""
    # The joined table holds the non-accepting states of each set, then one accepting state per distinct string.
    parts = [compile_stops(strings, token_bytes) for strings in sets]
    strings = tuple(dict.fromkeys(string for part in parts for string in part.strings))
    starts = np.cumsum([0, *(part.first_accept for part in parts)])
    first_accept = starts[-1]
    rows = []
    for start, part in zip(starts, parts):
        accepts = first_accept + np.array([strings.index(string) for string in part.strings], np.int32)
        states = np.concatenate([start + np.arange(part.first_accept), accepts])
        rows.append(states[part.table[: part.first_accept]])
    accepting = first_accept + np.arange(len(strings))
    rows.append(np.broadcast_to(accepting[:, None], (len(strings), len(token_bytes))))
    return StopSets(
        strings,
        {tuple(part.strings): int(start) for start, part in zip(starts, parts)},
        np.concatenate(rows).astype(np.int32),
    )


class StopSetsCache:
    """A cache of compiled sets of stop strings for one tokenizer."""

    def __init__(self, token_bytes: Sequence[bytes], special_tokens: Sequence[str]) -> None:
        """Set up an empty cache.

        Args:
          token_bytes: the bytes of each token id; empty for special tokens.
          special_tokens: tokens that no stop string may contain, since decoded text omits them.
        """
        self._token_bytes, self._special_tokens = token_bytes, special_tokens
        self._tables = collections.deque[StopSets](maxlen=CACHED_STOP_TABLES)

    def __len__(self) -> int:
        """Number of cached tables."""
        return len(self._tables)

    def get(self, sets: Sequence[tuple[str, ...]]) -> StopSets:
        """Return the automata of these sets of stop strings.

        The result may hold more sets. A cached table is reused for a subset of its sets, since XLA would compile the episode loop
        again for a table of another size.

        Raises:
          UserError: a stop string contains a special token.
        """
        needed = dict.fromkeys(sets)
        for table in self._tables:
            if needed.keys() <= table.starts.keys():
                return table
        for string in {string for strings in needed for string in strings}:
            if contained := [token for token in self._special_tokens if token in string]:
                raise UserError(
                    f"the stop string {string!r} would never match: {contained[0]!r} is a special token of the tokenizer, "
                    'which decoded text omits. Make it an ordinary token ("special": false in tokenizer.json '
                    "and tokenizer_config.json), or choose another tag"
                )
        self._tables.append(compile_sets(tuple(needed), self._token_bytes))
        return self._tables[-1]


def compile_stops(strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopAutomaton:
    """Compile stop strings for a vocabulary.

    The string that is completed first wins; if two end at the same byte, the longer one.

    Args:
      strings: the stop strings.
      token_bytes: the exact bytes of each token id.

    Raises:
      UserError: a stop string is empty, repeated, or not encodable in UTF-8.
    """
    try:
        patterns = [string.encode() for string in strings]
    except UnicodeEncodeError as error:
        raise UserError(
            f"the stop string {error.object!r} has a lone surrogate, {error.object[error.start]!r}, which no valid text "
            "contains; use whole characters"
        ) from error
    if not all(patterns) or len(set(patterns)) != len(patterns):
        raise UserError(f"stop strings must be non-empty and distinct, found {list(strings)}")
    delta, first_accept = _byte_automaton(patterns)
    lengths = np.array([len(data) for data in token_bytes], np.int64)
    # Longest tokens first: the tokens that have a byte at `byte_index` are the first `count` ones.
    order = np.argsort(-lengths, kind="stable")
    text = np.frombuffer(b"".join(token_bytes[token] for token in order), np.uint8)
    starts = np.cumsum(lengths[order]) - lengths[order]
    states = delta.shape[0]
    table = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for byte_index in range(lengths.max(initial=0)):
        count = np.count_nonzero(lengths > byte_index)
        data = text[starts[:count] + byte_index]
        for row in table:
            row[:count] = delta[row[:count], data]
    table[:, order] = table.copy()
    assert first_accept == states - len(patterns)
    return StopAutomaton(tuple(strings), table)


def _byte_automaton(patterns: list[bytes]) -> tuple[np.ndarray, int]:
    """Return the Aho-Corasick automaton as a dense table [states, 256] with absorbing accepting states, and its first accepting
    state."""
    children, ends = _trie(patterns)
    failure, order = _failure_links(children)
    for node in order:
        if ends[node] < 0:
            ends[node] = ends[failure[node]]
    goto = np.zeros((len(children), 256), np.int64)  # next node of each node
    for node in [0, *order]:
        if node:
            goto[node] = goto[failure[node]]
        for byte, child in children[node].items():
            goto[node, byte] = child
    # States: the non-accepting nodes, then one state per pattern.
    non_accepting = [0] + [node for node in order if ends[node] < 0]
    state_of = {node: state for state, node in enumerate(non_accepting)}
    first_accept = len(non_accepting)
    delta = np.zeros((first_accept + len(patterns), 256), np.int32)  # next state of each state
    for node in non_accepting:
        for byte in range(256):
            target = goto[node, byte]
            accepts = ends[target] >= 0
            delta[state_of[node], byte] = first_accept + ends[target] if accepts else state_of[target]
    for accept in range(first_accept, delta.shape[0]):
        delta[accept] = accept
    return delta, first_accept


def _trie(patterns: list[bytes]) -> tuple[list[dict[int, int]], list[int]]:
    """Return the children of each node by byte, and the index of the pattern that ends at each node; -1 if none does."""
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
    return children, ends


def _failure_links(children: list[dict[int, int]]) -> tuple[list[int], list[int]]:
    """Return the node of the longest proper suffix of each node, and all nodes but the root in breadth-first order."""
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
    return failure, order
