"""The host's side of an episode batch: what happened to each row, what it is fed next, and the finished trajectories.

One `Host` serves the rows of one data shard. `exchange` is called from inside the jitted loop: it is NumPy only, never
calls JAX and never raises (an exception is kept in `error`, every row is switched off, and the engine raises it).
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

from rrl.data.questions import Question
from rrl.retrieval.retriever import Retriever
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Append,
    Environment,
    Episode,
    Finish,
    SearchFor,
    message_ids,
)
from rrl.rollout.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory

RUN, WAIT, OFF = 0, 1, 2
"""Status of a row: decoding; paused, the host has yet to answer; nothing left to do."""

HEADER = 6
"""Words before the tokens of a feed: row, start, length, begin, request, temperature (float32 bits)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One episode to run."""

    question: Question
    prompt: Int[np.ndarray, "T"]
    """Token ids of the prompt."""
    seed: int
    """Folded into the sampling key; the same seed gives the same trajectory."""
    group: int = 0
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Static sizes of the exchange between device and host, for one data shard."""

    rows: int
    context: int
    """Cache slots of a row: no trajectory is longer."""
    feeds: int
    """Rows that are prefilled together."""
    feed_tokens: int
    """Tokens a prefilled row takes at a time; longer texts go in chunks."""
    query_tokens: int
    """Width of the query encoder's input; 0 without an encoder."""


@dataclasses.dataclass(slots=True)
class Turns:
    """What the device reports: one entry a row."""

    status: Int[np.ndarray, "R"]
    stop: Int[np.ndarray, "R"]
    """Index of the stop string, or one of the STOP_* codes."""
    ids: Int[np.ndarray, "R A"]
    logps: Float[np.ndarray, "R A"]
    sampled_logps: Float[np.ndarray, "R A"]
    length: Int[np.ndarray, "R"]


STOP_EOS, STOP_TURN, STOP_CONTEXT = -1, -2, -3
_STOP_NAMES = {STOP_EOS: EOS, STOP_TURN: TURN_TOKENS, STOP_CONTEXT: CONTEXT}


class _Row:
    """One episode in flight."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.episode = Episode(request.question)
        self.ids: list[np.ndarray] = []
        self.roles: list[np.ndarray] = []
        self.logps: list[np.ndarray] = []
        self.sampled: list[np.ndarray] = []
        self.turns: list[np.ndarray] = []
        self.segments: list[tuple[int, str]] = []
        self.length = 0
        self.feed = np.asarray(request.prompt, np.int32)
        self.fed = 0
        """Tokens that are in the cache already."""

    def record(
        self,
        ids: np.ndarray,
        role: int,
        text: str,
        logps: np.ndarray | None = None,
        sampled: np.ndarray | None = None,
    ) -> None:
        zeros = np.zeros(len(ids), np.float32)
        self.ids.append(np.asarray(ids, np.int32))
        self.roles.append(np.full(len(ids), role, np.int8))
        self.logps.append(zeros if logps is None else logps)
        self.sampled.append(zeros if sampled is None else sampled)
        self.turns.append(np.full(len(ids), self.episode.turn, np.int16))
        if self.segments and self.segments[-1][0] == role:
            text = self.segments.pop()[1] + text
        self.segments.append((role, text))
        self.length += len(ids)

    def trajectory(self, ended: str) -> Trajectory:
        return Trajectory(
            question=self.request.question,
            request=self.request.seed,
            group=self.request.group,
            tokens=np.concatenate(self.ids),
            roles=np.concatenate(self.roles),
            logps=np.concatenate(self.logps).astype(np.float32),
            sampled_logps=np.concatenate(self.sampled).astype(np.float32),
            turns=np.concatenate(self.turns),
            segments=self.segments,
            searches=list(self.episode.searches),
            ended=ended,
        )


class Host:
    """Answers the device for the rows of one data shard."""

    def __init__(
        self,
        requests: Iterable[tuple[int, Request]],
        environment: Environment,
        limits: Limits,
        *,
        encode: Callable[[str], np.ndarray],
        decode: Callable[[np.ndarray], str],
        retriever: Retriever | None = None,
        top_k: int = 3,
        on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
        told: set[type] | None = None,
    ) -> None:
        """`told` holds the kinds of search error that were logged already, and takes new ones."""
        self.environment = environment
        self.limits = limits
        self.encode, self.decode = encode, decode
        self.retriever, self.top_k = retriever, top_k
        self.on_finish = on_finish
        self.told = set() if told is None else told
        self.queue = collections.deque(requests)
        self.rows: list[_Row | None] = [None] * limits.rows
        self.indices: list[int] = [-1] * limits.rows
        self.to_feed: collections.deque[int] = collections.deque()
        self.to_encode: collections.deque[tuple[int, str]] = collections.deque()
        self.encoding: list[tuple[int, str]] = []
        self.off = np.zeros(limits.rows, bool)
        self.finished: dict[int, Trajectory] = {}
        self.error: BaseException | None = None
        self.retrieval_seconds = 0.0
        self.searches_failed = 0
        for row in range(limits.rows):
            self._admit(row)

    def exchange(self, turns: Turns, embeddings: Float[np.ndarray, "P E"]) -> Int[np.ndarray, "words"]:
        """Takes what the device has done and returns the next feeds, packed (see `pack_width`)."""
        try:
            if self.error is None:
                self._read(turns)
                self._search(embeddings)
                return self._pack()
        except BaseException as error:  # raised again by the engine, outside the callback
            self.error = error
        self.off[:] = True
        return self._pack(feed=False)

    # -- what the device has done ------------------------------------------------------------------------------------

    def _read(self, turns: Turns) -> None:
        fed = set(self.to_feed)
        blocked = {row for row, _ in self.to_encode} | {row for row, _ in self.encoding} | fed
        for index in np.flatnonzero(turns.status == WAIT):
            row = int(index)
            episode_row = self.rows[row]
            if episode_row is None or row in blocked:
                continue
            count = int(turns.length[row])
            ids = turns.ids[row, :count].copy()
            stop = int(turns.stop[row])
            name = _STOP_NAMES[stop] if stop < 0 else self.environment.stops[stop]
            text = self.decode(ids)
            episode_row.record(
                ids, POLICY, text, turns.logps[row, :count].copy(), turns.sampled_logps[row, :count].copy()
            )
            action = self.environment.react(episode_row.episode, text, name)
            self._act(row, action)

    def _act(self, row: int, action: SearchFor | Append | Finish) -> None:
        episode_row = self.rows[row]
        assert episode_row is not None
        if isinstance(action, Finish):
            self._finish(row, action.reason)
        elif isinstance(action, Append):
            self._append(row, action)
        else:
            self.to_encode.append((row, action.query))

    def _append(self, row: int, message: Append) -> None:
        episode_row = self.rows[row]
        assert episode_row is not None
        ids = message_ids(message, self.encode, self.environment.observation_tokens)
        if episode_row.length + len(ids) >= self.limits.context:
            self._finish(row, "context_limit")
            return
        last = episode_row.ids[-1][-1:]  # sampled, but not yet in the cache
        episode_row.fed = episode_row.length - 1
        episode_row.record(ids, ENVIRONMENT, self.decode(ids))
        episode_row.episode.turn += 1
        episode_row.feed = np.concatenate([last, ids])
        self.to_feed.append(row)

    def _finish(self, row: int, reason: str) -> None:
        episode_row = self.rows[row]
        assert episode_row is not None
        trajectory = episode_row.trajectory(reason)
        self.finished[self.indices[row]] = trajectory
        self.on_finish(self.indices[row], trajectory)
        self.rows[row] = None
        self._admit(row)

    def _admit(self, row: int) -> None:
        if not self.queue:
            self.off[row] = True
            return
        self.indices[row], request = self.queue.popleft()
        self.rows[row] = episode_row = _Row(request)
        episode_row.record(request.prompt, PROMPT, self.decode(request.prompt))
        self.to_feed.append(row)

    # -- retrieval ---------------------------------------------------------------------------------------------------

    def _search(self, embeddings: Float[np.ndarray, "P E"]) -> None:
        if self.retriever is not None and self.retriever.needs_embeddings:
            ready, self.encoding = self.encoding, []
            vectors = embeddings[: len(ready)]
        else:
            ready, vectors = list(self.to_encode), None
            self.to_encode.clear()
        if not ready:
            return
        start = time.perf_counter()
        queries = [query for _, query in ready]
        passages = self._retrieve(queries, vectors)
        self.retrieval_seconds += time.perf_counter() - start
        for (row, query), found in zip(ready, passages, strict=True):
            episode_row = self.rows[row]
            assert episode_row is not None
            titles = tuple(passage.title for passage in found or ())
            episode_row.episode.searches.append(
                Search(episode_row.episode.turn, query, titles, failed=found is None)
            )
            self._append(row, self.environment.observe(episode_row.episode, found))

    def _retrieve(self, queries: list[str], vectors: np.ndarray | None) -> Sequence[list | None]:
        if self.retriever is None:
            return [[] for _ in queries]
        try:
            hits = self.retriever.search(queries, self.top_k, vectors)
        except Exception as error:  # the policy is told that its search failed; the batch goes on
            self.searches_failed += len(queries)
            if type(error) not in self.told:
                self.told.add(type(error))
                logging.getLogger(__name__).warning(
                    "search failed for %d queries, the first of which is %r: %r (told once for each kind of error; "
                    "train/searches_failed counts them)",
                    len(queries),
                    queries[0],
                    error,
                )
            return [None] * len(queries)
        return [[hit.passage for hit in found] for found in hits]

    # -- what the device does next -----------------------------------------------------------------------------------

    def _pack(self, feed: bool = True) -> Int[np.ndarray, "words"]:
        limits = self.limits
        feeds = np.zeros((limits.feeds, HEADER + limits.feed_tokens), np.int32)
        feeds[:, 0] = limits.rows  # no row
        queries = np.zeros((limits.feeds, limits.query_tokens), np.int32)
        if feed:
            for slot in range(min(limits.feeds, len(self.to_feed))):
                self._feed(self.to_feed.popleft(), feeds[slot])
            if self.to_encode and limits.query_tokens:
                assert self.retriever is not None
                count = min(limits.feeds, len(self.to_encode))
                self.encoding = [self.to_encode.popleft() for _ in range(count)]
                ids = self.retriever.tokenize([query for _, query in self.encoding])
                queries[:count] = ids[:, : limits.query_tokens]
        return np.concatenate([feeds.ravel(), queries.ravel(), self.off.astype(np.int32)])

    def _feed(self, row: int, out: Int[np.ndarray, "words"]) -> None:
        episode_row = self.rows[row]
        assert episode_row is not None
        chunk = episode_row.feed[: self.limits.feed_tokens]
        episode_row.feed = episode_row.feed[len(chunk) :]
        begin = len(episode_row.feed) == 0
        temperature = np.float32(episode_row.request.temperature).view(np.int32)
        out[:HEADER] = (row, episode_row.fed, len(chunk), begin, episode_row.request.seed, temperature)
        out[HEADER : HEADER + len(chunk)] = chunk
        episode_row.fed += len(chunk)
        if not begin:
            self.to_feed.append(row)


def pack_width(limits: Limits) -> int:
    """Length of the array that `Host.exchange` returns."""
    return limits.feeds * (HEADER + limits.feed_tokens + limits.query_tokens) + limits.rows
