"""The host's side of an episode batch: what happened to each row, what it is fed next, and the finished trajectories.

One `Scheduler` serves the rows of one data shard. `exchange` is called from inside the jitted loop: it is NumPy only, never
calls JAX and never raises (an exception is kept in `error`, the device is told to leave the loop, in all processes, and the
engine raises it).
"""

import collections
import threading
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from rrl.data.trajectory import NOT_FINITE, Search, Trajectory
from rrl.errors import UserError
from rrl.retrieval.retriever import Retriever
from rrl.rollout.automaton import StopSets
from rrl.rollout.episodes import EpisodeState, Request, check_tokens
from rrl.rollout.exchange import (
    ABORT,
    BLOCKED,
    DECODING,
    HEADER,
    NO_TOKEN,
    OFF,
    PAUSED,
    RECENT,
    STOP_CONTEXT,
    STOP_EOS,
    STOP_NOT_FINITE,
    STOP_TURN,
    DeviceReport,
    ExchangeSizes,
    PrefillChunk,
)
from rrl.rollout.prefixes import PrefixIndex
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Action,
    Append,
    Environment,
    Finish,
    Restart,
    SearchFor,
    message_ids,
)
from rrl.rollout.searches import IDLE_WAIT_SECONDS, InFlightSearches, SearchOutcome, SearchRunner
from rrl.text.chat import Prompt

Requester = int | tuple[int, int]
"""Who asks: a row, or a workflow and the place in what it asked for."""
LENGTH, COPIED = (PrefillChunk._fields.index(name) for name in ("length", "copied"))
SOONER = 4
"""A row whose query is being encoded waits for this part of the steps that others wait."""
DEVICE_STAGES = NOT_CALLED_YET, WAITING_FOR_DEVICE = "has not been asked yet", "waiting for the device"
"""Stages of a host that waits for the device."""
_LIMITS = {STOP_TURN: "turn_tokens", STOP_CONTEXT: "context"}
_STOP_NAMES = {STOP_EOS: EOS, STOP_TURN: TURN_TOKENS, STOP_CONTEXT: CONTEXT}


class PrefillRequest:
    """What a row is to be fed before its turn begins."""

    def __init__(self, tokens: Int[np.ndarray, "T"], start: int) -> None:
        """`tokens` go to the slots from `start` on, but for the last of them, which stays pending."""
        self.tokens, self.slot = tokens[:-1], start
        self.recent = [NO_TOKEN] * (RECENT - len(tokens)) + tokens[-RECENT:].tolist()
        self.begun = False
        """Whether the first of them is sent."""


class Scheduler:
    """Answers the device for the rows of one data shard."""

    def __init__(
        self,
        requests: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        limits: ExchangeSizes,
        *,
        encode: Callable[[str], np.ndarray],
        encode_body: Callable[[str], np.ndarray] | None = None,
        decode: Callable[[np.ndarray], str],
        encode_prompt: Callable[[str | Prompt], np.ndarray],
        vocab_size: int,
        retriever: Retriever | None = None,
        top_k: int = 3,
        search_seconds: float = 60.0,
        share_prompts: bool = True,
        on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
        desk: InFlightSearches | None = None,
        nap: float = IDLE_WAIT_SECONDS,
    ) -> None:
        """`requests` come in groups of one prompt; several hosts may take theirs from the same. Hosts of one `desk` share their
        searches; `encode_body` is that of `message_ids`; `nap` is how many seconds the host waits for some where nothing else is
        to be done."""
        self.environment, self.stops = environment, stops
        self.limits = limits
        self.encode, self.encode_body, self.decode, self.encode_prompt = (
            encode,
            encode_body,
            decode,
            encode_prompt,
        )
        self.vocab_size, self.nap = vocab_size, nap
        self.searches = SearchRunner(retriever, top_k, search_seconds, desk)
        self.on_finish = on_finish
        self.on_search_done: Callable[[Requester, SearchOutcome], None] = lambda key, found: None
        self.groups = requests
        self.queue = collections.deque[tuple[int, Request]]()
        self.decoded: tuple[np.ndarray, str] = np.zeros(0, np.int32), ""
        """The last prompt, which is that of several samples, and its text."""
        self.expects_requests = False
        """Whether the queue, once empty, may fill again: then idle rows wait instead of ending."""
        self.rows: list[EpisodeState | None] = [None] * limits.rows
        self.indices: list[int] = [-1] * limits.rows
        self.prefixes = PrefixIndex(limits.rows, limits.piece) if share_prompts else None
        self.todo: dict[int, PrefillRequest] = {}
        """Rows to be fed, first come, first served."""
        self.asked: dict[int, tuple[str, ...]] = {}
        """Queries of the rows that wait for passages."""
        self.answers: dict[int, dict[str, SearchOutcome]] = {}
        """What is there of them."""
        self.requesters: dict[str, list[Requester]] = {}
        """Who waits for each query that is looked up."""
        self.to_encode = collections.deque[str]()
        self.encoding: list[str] = []
        self.stage = NOT_CALLED_YET
        """What it is doing, for who wonders why nothing happens."""
        self.exchanges = 0
        self.prefilled = 0
        """Tokens that were fed; what is copied from another row is not."""
        self.written = 0
        """Tokens of the policy."""
        self.failed = 0
        """Searches that failed, once for each that asked."""
        self.broken: list[tuple[int, str]] = []
        """Number and question of each request that ended as NOT_FINITE."""
        self.error: BaseException | None = None
        self.over = threading.Event()
        """Set by an error: hosts that share it end with the one that met it."""

    def begin(self, start: Callable[[], None]) -> None:
        """Does what comes before the first exchange; what it raises ends the run as if it had been met there."""
        waiting, self.stage = self.stage, "beginning"
        try:
            start()
            self.stage = waiting
        except BaseException as error:
            self.error = error
            self.over.set()

    def exchange(
        self, turns: DeviceReport, embeddings: Float[np.ndarray, "P E"], others: int = 0
    ) -> Int[np.ndarray, "words"]:
        """Takes what the device did and returns the next chunks, queries and marks (see `ExchangeSizes.words`). `others` is how
        many rows of other data shards go on; they stand still meanwhile."""
        self.exchanges += 1
        try:
            if not self.over.is_set():
                self.stage = "reading what the policy wrote"
                self._read(turns)
                self._search(turns, embeddings, others)
                self.stage = "packing what the rows are fed"
                self.fill()
                words = self._pack()
                self.stage = WAITING_FOR_DEVICE
                return words
        except BaseException as error:  # raised again by the engine, outside the callback
            self.error = error
            self.over.set()
        self.stage = "ended by an error"
        words = self._packed(*self._blank(), np.zeros(self.limits.rows, np.int32))
        words[-1] = ABORT
        return words

    # -- what the device has done ------------------------------------------------------------------------------------

    def _read(self, turns: DeviceReport) -> None:
        busy = self.asked.keys() | self.todo.keys()
        for index in np.flatnonzero(turns.status == PAUSED):
            row = int(index)
            live = self.rows[row]
            if live is None or row in busy:
                continue
            count = int(turns.length[row])
            self.written += count
            ids = turns.ids[row, :count].copy()
            stop = int(turns.stop[row])
            text, last = self.decode(ids), live.last
            if stop in _LIMITS:
                live.hit_limit(_LIMITS[stop])
            live.add_policy_turn(
                ids, text, turns.logps[row, :count].copy(), turns.sampled_logps[row, :count].copy()
            )
            if stop == STOP_TURN and live.used >= self.limits.context:
                live.hit_limit("context")
            live.episode.policy_texts.append(text)
            if stop == STOP_NOT_FINITE:
                self._end_broken(row, live)
                continue
            if self.prefixes is not None:  # the pending token came first, the last is pending now
                self.prefixes.wrote(row, np.concatenate([last, ids[:-1]]))
            name = _STOP_NAMES[stop] if stop < 0 else self.stops.strings[stop]
            self._act(row, live, self.environment.react(live.episode, text, name))

    def _end_broken(self, row: int, live: EpisodeState) -> None:
        """Ends an episode whose logits are not finite; no environment is asked what should follow."""
        if self.prefixes is not None:
            self.prefixes.forget(row)
        self.broken.append((self.indices[row], live.request.question.id))
        self._finish(row, live, NOT_FINITE)

    def _act(self, row: int, live: EpisodeState, action: Action) -> None:
        if isinstance(action, Finish):
            self._finish(row, live, action.reason)
        elif isinstance(action, Append):
            self._append(row, live, action)
        elif isinstance(action, Restart):
            self._restart(row, live, action)
        elif not isinstance(action, SearchFor):
            raise UserError(
                f"environment {type(self.environment).__name__} answers turn {live.episode.turn} of question "
                f"{live.request.question.id!r} with {action!r}; it must be SearchFor, Append, Restart or Finish"
            )
        else:
            self.asked[row], self.answers[row] = (action.query, *action.parallel_queries), {}
            for query in dict.fromkeys(self.asked[row]):
                if not isinstance(query, str):
                    raise UserError(
                        f"environment {type(self.environment).__name__} searches for {query!r} in turn {live.episode.turn} of "
                        f"question {live.request.question.id!r}; a query is a text"
                    )
                self.request_search(row, query)

    def _append(self, row: int, live: EpisodeState, message: Append) -> None:
        room = self.limits.context - live.used
        ids, cut = self._message_ids(message)
        if cut:
            live.hit_limit("observation_tokens")
        if len(ids) + max(1, message.reserve_tokens) > room:
            live.hit_limit("room")
            action = self.environment.overflow(live.episode, message, room)
            if not isinstance(action, Append):
                self._act(row, live, action)
                return
            ids, _ = self._message_ids(action)
            if len(ids) + max(1, action.reserve_tokens) > room:
                self._finish(row, live, "context_limit")
                return
        # The last sampled token is not in the cache yet.
        self.todo[row] = PrefillRequest(np.concatenate([live.last, ids]), live.used - 1)
        live.add_observation(ids, self.decode(ids))

    def _message_ids(self, message: Append) -> tuple[Int[np.ndarray, "T"], bool]:
        return message_ids(message, self.encode, self.environment.observation_tokens, self.encode_body)

    def _restart(self, row: int, live: EpisodeState, action: Restart) -> None:
        room = self.limits.context - 2
        prompt = self._prompt(live, action)
        if len(prompt) > room:
            live.hit_limit("room")
            other = self.environment.overflow(live.episode, action, room)
            if not isinstance(other, Restart):
                self._act(row, live, other)
                return
            prompt = self._prompt(live, other)
            if len(prompt) > room:
                self._finish(row, live, "context_limit")
                return
        live.restart(prompt, self.decode(prompt))
        self._open(row, prompt)

    def _prompt(self, live: EpisodeState, action: Restart) -> Int[np.ndarray, "T"]:
        prompt, whose = action.prompt, f"the prompt of a Restart of question {live.request.question.id!r}"
        if isinstance(prompt, (str, Prompt)):
            prompt = self.encode_prompt(prompt)
        check_tokens(prompt, self.vocab_size, whose)
        return prompt

    def _finish(self, row: int, live: EpisodeState, reason: str) -> None:
        self.rows[row] = None
        self.on_finish(self.indices[row], live.trajectory(reason))

    def fill(self, most: int | None = None) -> int:
        """Rows that are free take the next requests, of `most` further groups; returns of how many."""
        taken = 0
        for row, live in enumerate(self.rows):
            if live is not None:
                continue
            if not self.queue:
                if taken == most:
                    break
                try:
                    self.queue.extend(self.groups.popleft())
                except IndexError:  # another host may have taken the last
                    break
                taken += 1
            self.indices[row], request = self.queue.popleft()
            if not np.array_equal(request.prompt, self.decoded[0]):
                self.decoded = request.prompt, self.decode(request.prompt)
            self.rows[row] = EpisodeState(request, self.decoded[1])
            self._open(row, request.prompt)
        return taken

    def _open(self, row: int, prompt: Int[np.ndarray, "T"]) -> None:
        self.todo[row] = PrefillRequest(np.asarray(prompt, np.int32), 0)

    # -- retrieval ---------------------------------------------------------------------------------------------------

    def request_search(self, key: Requester, query: str) -> None:
        """Searches for a row, or for someone else, for whom `on_search_done` gets the passages.
        Who asks what another has asked waits
        for the same search."""
        if query in self.requesters:
            self.requesters[query].append(key)
        else:
            self.requesters[query] = [key]
            self.to_encode.append(query)

    def _search(self, turns: DeviceReport, embeddings: Float[np.ndarray, "P E"], others: int) -> None:
        if self._needs_embeddings:
            ready, self.encoding = self.encoding, []
            vectors = embeddings[: len(ready)]
            self.to_encode = collections.deque(
                query for query in self.to_encode if not self.searches.take_cached(query)
            )
        else:
            ready, vectors = list(self.to_encode), None
            self.to_encode.clear()
        if ready:
            self.stage = f"searching for {len(ready)} queries"
            self.searches.submit(ready, vectors)
        nothing_else = not (self.todo or self.to_encode or (turns.status == DECODING).any() or others)
        if nothing_else and len(self.searches):
            self.stage = "waiting for searches"
        for query, passages in self.searches.done(wait=self.nap if nothing_else else 0.0):
            keys = self.requesters.pop(query)
            self.failed += len(keys) * (passages is None)
            for key in keys:
                if not isinstance(key, int):
                    self.on_search_done(key, passages)
                    continue
                self.answers[key][query] = passages
                if len(self.answers[key]) == len(set(self.asked[key])):
                    self._observe(key)

    def _observe(self, row: int) -> None:
        """All that a row asked for is there."""
        live, queries, answers = self.rows[row], self.asked.pop(row), self.answers.pop(row)
        assert live is not None
        for query in queries:
            live.episode.searches.append(Search.of(live.episode.turn, query, answers[query]))
        self._act(row, live, self.environment.observe(live.episode, *(answers[query] for query in queries)))

    @property
    def _needs_embeddings(self) -> bool:
        return self.searches.retriever is not None and self.searches.retriever.needs_embeddings

    # -- what the device does next -----------------------------------------------------------------------------------

    def _blank(self) -> tuple[np.ndarray, np.ndarray]:
        limits = self.limits
        chunks = np.zeros((limits.pieces, HEADER + limits.piece), np.int32)
        chunks[:, 0] = limits.rows  # no row
        return chunks, np.zeros((limits.wake_threshold, limits.query_tokens), np.int32)

    def _pack(self) -> Int[np.ndarray, "words"]:
        chunks, queries = self._blank()
        room, copies, sent = len(chunks), 0, [chunks[:0]]
        if self.prefixes is not None:
            self.prefixes.settle()
        for row in list(self.todo):
            pieces = self._feed(row, room, copies)
            room -= len(pieces)
            copies += int(np.count_nonzero(pieces[:, COPIED]))
            sent.append(pieces)
        entries = np.concatenate(sent)
        chunks[: len(entries)] = entries[np.argsort(entries[:, LENGTH] == 0, kind="stable")]  # tokens first
        if self.to_encode and self._needs_embeddings:
            assert self.searches.retriever is not None
            count = min(self.limits.wake_threshold, len(self.to_encode))
            self.encoding = [self.to_encode.popleft() for _ in range(count)]
            ids = self.searches.retriever.tokenize(self.encoding)
            queries[:count] = ids[:, : self.limits.query_tokens]
        marks = np.zeros(self.limits.rows, np.int32)
        idle = BLOCKED if self.expects_requests else OFF
        for row, live in enumerate(self.rows):
            if live is None:
                marks[row] = idle + 1
            elif row in self.todo:
                marks[row] = PAUSED + 1
        for query in self.searches.queries:
            for key in self.requesters[query]:
                if isinstance(key, int):
                    marks[key] = BLOCKED + 1
        return self._packed(chunks, queries, marks)

    def _packed(self, chunks: np.ndarray, queries: np.ndarray, marks: np.ndarray) -> Int[np.ndarray, "words"]:
        """What the device gets. Embeddings are ready as soon as it asks again, which it then does soon."""
        max_wait_steps = self.limits.max_wait_steps // (SOONER if self.encoding else 1)
        last = np.array([len(self.encoding), max_wait_steps], np.int32)
        return np.concatenate([chunks.ravel(), queries.ravel(), marks, last])

    def _feed(self, row: int, room: int, copies: int) -> Int[np.ndarray, "pieces words"]:
        """The next pieces of what a row is fed, `room` at most; none where it waits for what another row is fed.

        `copies` rows copy a prefix already.
        """
        live, todo, size = self.rows[row], self.todo[row], self.limits.piece
        assert live is not None
        nothing = np.zeros((0, HEADER + size), np.int32)
        if not room:
            return nothing
        source, copied, own, last = row, 0, todo.slot, False
        if self.prefixes is not None and not todo.begun:
            held = self.prefixes.held(row) if own else todo.tokens[:0]
            assert len(held) == own, f"row {row} holds {len(held)} tokens, its text goes on at {own}"
            tokens = np.concatenate([held, todo.tokens])
            source, copied, there = self.prefixes.find(row, tokens, own)
            last = not there and copied == len(tokens) and self.prefixes.fed(source, copied)
            if not (there or last) or (source != row and copies == self.limits.copies):
                return nothing
            self.prefixes.opens(row, tokens, own)
            todo.tokens, todo.slot = tokens[copied:], copied
        todo.begun = True
        count = min(room, max(1, -(-len(todo.tokens) // size)))
        tokens, todo.tokens = todo.tokens[: count * size], todo.tokens[count * size :]
        words = np.zeros((count, HEADER + size), np.int32)
        words[:, :HEADER] = PrefillChunk(
            row=row,
            start=todo.slot,
            length=size,
            begin=0,
            request=live.request.seed,
            offset=live.starts[-1],
            limit=live.request.turn_tokens or self.environment.turn_tokens,
            tag=self.stops.starts[
                self.environment.stops if live.request.stops is None else live.request.stops
            ],
            temperature=np.float32(live.request.temperature).view(np.int32),
            source=source,
            copied=0,
            kept=own,
            last_4=todo.recent[0],
            last_3=todo.recent[1],
            last_2=todo.recent[2],
            pending=todo.recent[3],
        )
        pieces = PrefillChunk(*words[:, :HEADER].T)
        pieces.start[:] += size * np.arange(count)
        pieces.length[-1] = len(tokens) - size * (count - 1)
        pieces.begin[-1] = not len(todo.tokens)
        if source != row:
            pieces.copied[0] = -copied if last else copied
        words[:, HEADER:].flat[: len(tokens)] = tokens
        todo.slot += len(tokens)
        self.prefilled += len(tokens)
        if self.prefixes is not None:
            self.prefixes.filled(row, todo.slot, last=last)
        if not len(todo.tokens):
            del self.todo[row]
        return words
