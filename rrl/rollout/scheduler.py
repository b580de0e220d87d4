"""The host's half of the rollout: what happened in each slot, what to prefill next, and the finished trajectories.

One `Scheduler` serves the slots of one data shard (of one worker on a CPU). The jitted loop calls `exchange`, which is NumPy
only: it never calls JAX and never raises. After an exception it stores `error` and tells the device to leave the loop, in all
processes; the engine raises the error then. Read `Scheduler.exchange` first.
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
    HEADER_LENGTH,
    OFF,
    PAUSED,
    STOP_CONTEXT,
    STOP_EOS,
    STOP_NOT_FINITE,
    STOP_TURN,
    DeviceReport,
    ExchangeSizes,
    PrefillChunk,
)
from rrl.rollout.prefill_request import PrefillRequest
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
"""Who requested a search: a slot, or (workflow, index of the request in what the workflow yielded)."""
LENGTH, COPIED = (PrefillChunk._fields.index(name) for name in ("length", "copied"))
EMBEDDING_WAIT_DIVISOR = 4
"""While a query is being embedded, a paused slot waits for this fraction of `max_wait_steps`."""
DEVICE_STAGES = NOT_CALLED_YET, WAITING_FOR_DEVICE = "not called yet", "waiting for the device"
"""Stages in which the scheduler waits for the device."""
_LIMITS = {STOP_TURN: "turn_tokens", STOP_CONTEXT: "context"}
_STOP_NAMES = {STOP_EOS: EOS, STOP_TURN: TURN_TOKENS, STOP_CONTEXT: CONTEXT}


class Scheduler:
    """Replies to the device's reports about the slots of one data shard."""

    def __init__(
        self,
        requests: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        sizes: ExchangeSizes,
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
        in_flight: InFlightSearches | None = None,
        idle_wait: float = IDLE_WAIT_SECONDS,
    ) -> None:
        """Set up a scheduler whose slots are free.

        Args:
          requests: groups of (number, request) pairs. The requests of a group share a prompt. Several schedulers may take from
            one queue.
          environment: reacts to paused turns.
          stops: the compiled stop strings.
          sizes: sizes of the messages.
          encode: text -> token ids.
          encode_body: as in `message_ids`.
          decode: token ids -> text.
          encode_prompt: prompt -> token ids, with the chat template.
          vocab_size: token ids are below it.
          retriever: None: every search finds nothing.
          top_k: passages per search.
          search_seconds: time limit of a search.
          share_prompts: whether slots copy common prefixes.
          on_finish: receives the number of each finished request, and its trajectory.
          in_flight: the searches of all schedulers of a run.
          idle_wait: seconds to wait for searches if there is nothing else to do.
        """
        self.environment, self.stops, self.sizes = environment, stops, sizes
        self.encode, self.encode_body = encode, encode_body
        self.decode, self.encode_prompt = decode, encode_prompt
        self.vocab_size, self.idle_wait = vocab_size, idle_wait
        self.searches = SearchRunner(retriever, top_k, search_seconds, in_flight)
        self.on_finish = on_finish
        self.on_search_done: Callable[[Requester, SearchOutcome], None] = lambda requester, outcome: None
        """Receives the outcomes of searches that no slot requested."""
        self.groups = requests
        self.queue = collections.deque[tuple[int, Request]]()
        """Requests of the groups that this scheduler took."""
        self.last_prompt: tuple[np.ndarray, str] = np.zeros(0, np.int32), ""
        """Token ids and text of the last prompt: samples of a group share it."""
        self.expects_requests = False
        """Whether requests may be added to an empty queue. If so, free slots are BLOCKED instead of OFF."""
        self.slots: list[EpisodeState | None] = [None] * sizes.slots
        """The episode of each slot; None: the slot is free."""
        self.request_numbers: list[int] = [-1] * sizes.slots
        self.prefixes = PrefixIndex(sizes.slots, sizes.chunk_tokens) if share_prompts else None
        self.prefills: dict[int, PrefillRequest] = {}
        """Prefill request of each slot that has one, oldest first."""
        self.queries: dict[int, tuple[str, ...]] = {}
        """Queries of each slot that waits for passages."""
        self.outcomes: dict[int, dict[str, SearchOutcome]] = {}
        """Outcomes of the ended searches of each slot in `queries`, by query."""
        self.requesters: dict[str, list[Requester]] = {}
        """All requesters of each query that is embedded or searched."""
        self.waiting_queries = collections.deque[str]()
        """Queries that wait for an embedding. If the retriever needs none, they wait for the start of their search."""
        self.embedding: list[str] = []
        """Queries that the device embeds now."""
        self.stage = NOT_CALLED_YET
        """Current work, for log messages."""
        self.exchanges = 0
        self.prefilled_tokens = 0
        """Tokens that were prefilled, without copied ones."""
        self.policy_tokens = 0
        """Tokens that the policy wrote."""
        self.searches_failed = 0
        """Failed searches, counted once per requester."""
        self.not_finite: list[tuple[int, str]] = []
        """(request number, question id) of each episode that ended as NOT_FINITE."""
        self.error: BaseException | None = None
        self.aborted = threading.Event()
        """Set after an error. All schedulers of a run share it, so that they end together."""

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` before the first exchange. An exception in it is handled as in `exchange`."""
        stage, self.stage = self.stage, "beginning"
        try:
            start()
            self.stage = stage
        except BaseException as error:
            self.error = error
            self.aborted.set()

    def exchange(
        self, report: DeviceReport, embeddings: Float[np.ndarray, "Q E"], others: int = 0
    ) -> Int[np.ndarray, "message"]:
        """Process the device's report and return the reply.

        Args:
          report: state of the slots.
          embeddings: embeddings of the queries of the last reply.
          others: number of slots of other data shards that decode or are paused. They stand still during this call.

        Returns:
          prefill chunks, queries and statuses (see `ExchangeSizes.reply_length`).
        """
        self.exchanges += 1
        try:
            if not self.aborted.is_set():
                self.stage = "reading what the policy wrote"
                self._end_turns(report)
                self._search(report, embeddings, others)
                self.stage = "packing prefill chunks"
                self.fill()
                message = self._reply()
                self.stage = WAITING_FOR_DEVICE
                return message
        except BaseException as error:  # the engine raises it outside the callback
            self.error = error
            self.aborted.set()
        self.stage = "ended by an error"
        message = self._join(*self._empty_reply(), np.zeros(self.sizes.slots, np.int32))
        message[-1] = ABORT
        return message

    # -- what the policy wrote ---------------------------------------------------------------------------------------

    def _end_turns(self, report: DeviceReport) -> None:
        """Record the turns that have ended, and apply the environment's reactions."""
        busy = self.queries.keys() | self.prefills.keys()
        for index in np.flatnonzero(report.status == PAUSED):
            slot = int(index)
            state = self.slots[slot]
            if state is None or slot in busy:
                continue
            count = int(report.length[slot])
            self.policy_tokens += count
            ids = report.ids[slot, :count].copy()
            stop = int(report.stop[slot])
            text, last = self.decode(ids), state.last_token
            if stop in _LIMITS:
                state.hit_limit(_LIMITS[stop])
            logps, sampled_logps = (
                report.logps[slot, :count].copy(),
                report.sampled_logps[slot, :count].copy(),
            )
            state.add_policy_turn(ids, text, logps, sampled_logps)
            if stop == STOP_TURN and state.context_length >= self.sizes.context:
                state.hit_limit("context")
            state.episode.policy_texts.append(text)
            if stop == STOP_NOT_FINITE:
                self._end_not_finite(slot, state)
                continue
            if self.prefixes is not None:
                # The turn wrote the keys and values of the pending token before it (`last`), but not those of its last token.
                self.prefixes.append_decoded(slot, np.concatenate([last, ids[:-1]]))
            name = _STOP_NAMES[stop] if stop < 0 else self.stops.strings[stop]
            self._apply(slot, state, self.environment.react(state.episode, text, name))

    def _end_not_finite(self, slot: int, state: EpisodeState) -> None:
        """End an episode whose logits are not finite, without a reaction of the environment."""
        if self.prefixes is not None:
            self.prefixes.clear(slot)
        self.not_finite.append((self.request_numbers[slot], state.request.question.id))
        self._finish(slot, state, NOT_FINITE)

    def _apply(self, slot: int, state: EpisodeState, action: Action) -> None:
        if isinstance(action, Finish):
            self._finish(slot, state, action.reason)
        elif isinstance(action, Append):
            self._append(slot, state, action)
        elif isinstance(action, Restart):
            self._restart(slot, state, action)
        elif not isinstance(action, SearchFor):
            raise UserError(
                f"environment {type(self.environment).__name__} returned {action!r} in turn {state.episode.turn} of question "
                f"{state.request.question.id!r}; it must be SearchFor, Append, Restart or Finish"
            )
        else:
            self.queries[slot], self.outcomes[slot] = (action.query, *action.parallel_queries), {}
            for query in dict.fromkeys(self.queries[slot]):
                if not isinstance(query, str):
                    raise UserError(
                        f"environment {type(self.environment).__name__} searches for {query!r} in turn {state.episode.turn} of "
                        f"question {state.request.question.id!r}; a query must be a string"
                    )
                self.request_search(slot, query)

    def _append(self, slot: int, state: EpisodeState, message: Append) -> None:
        room = self.sizes.context - state.context_length
        ids, cut = self._message_ids(message)
        if cut:
            state.hit_limit("observation_tokens")
        if len(ids) + max(1, message.reserve_tokens) > room:
            state.hit_limit("room")
            action = self.environment.overflow(state.episode, message, room)
            if not isinstance(action, Append):
                self._apply(slot, state, action)
                return
            ids, _ = self._message_ids(action)
            if len(ids) + max(1, action.reserve_tokens) > room:
                self._finish(slot, state, "context_limit")
                return
        # The last sampled token is not in the cache yet.
        self._prefill(slot, state, np.concatenate([state.last_token, ids]), state.context_length - 1)
        state.add_observation(ids, self.decode(ids))

    def _message_ids(self, message: Append) -> tuple[Int[np.ndarray, "T"], bool]:
        return message_ids(message, self.encode, self.environment.observation_tokens, self.encode_body)

    def _restart(self, slot: int, state: EpisodeState, action: Restart) -> None:
        room = self.sizes.context - 2
        prompt = self._prompt_ids(state, action)
        if len(prompt) > room:
            state.hit_limit("room")
            other = self.environment.overflow(state.episode, action, room)
            if not isinstance(other, Restart):
                self._apply(slot, state, other)
                return
            prompt = self._prompt_ids(state, other)
            if len(prompt) > room:
                self._finish(slot, state, "context_limit")
                return
        state.restart(prompt, self.decode(prompt))
        self._prefill(slot, state, prompt, 0)

    def _prompt_ids(self, state: EpisodeState, action: Restart) -> Int[np.ndarray, "T"]:
        prompt, whose = action.prompt, f"the prompt of a Restart of question {state.request.question.id!r}"
        if isinstance(prompt, (str, Prompt)):
            prompt = self.encode_prompt(prompt)
        check_tokens(prompt, self.vocab_size, whose)
        return prompt

    def _finish(self, slot: int, state: EpisodeState, reason: str) -> None:
        self.slots[slot] = None
        self.on_finish(self.request_numbers[slot], state.trajectory(reason))

    def fill(self, max_groups: int | None = None) -> int:
        """Assign the next requests to free slots.

        Args:
          max_groups: maximum number of groups to take from the shared queue. None: no maximum.

        Returns:
          number of groups taken.
        """
        taken = 0
        for slot, state in enumerate(self.slots):
            if state is not None:
                continue
            if not self.queue:
                if taken == max_groups:
                    break
                try:
                    self.queue.extend(self.groups.popleft())
                except IndexError:  # another scheduler may have taken the last group
                    break
                taken += 1
            self.request_numbers[slot], request = self.queue.popleft()
            if not np.array_equal(request.prompt, self.last_prompt[0]):
                self.last_prompt = request.prompt, self.decode(request.prompt)
            state = self.slots[slot] = EpisodeState(request, self.last_prompt[1])
            self._prefill(slot, state, request.prompt, 0)
        return taken

    def _prefill(self, slot: int, state: EpisodeState, tokens: Int[np.ndarray, "T"], start: int) -> None:
        """Request to prefill `tokens` from cache position `start` on, and then to begin a turn."""
        request = state.request
        stops = self.environment.stops if request.stops is None else request.stops
        self.prefills[slot] = PrefillRequest(
            slot,
            np.asarray(tokens, np.int32),
            start,
            request,
            offset=state.starts[-1],
            turn_limit=request.turn_tokens or self.environment.turn_tokens,
            stop_state=self.stops.starts[stops],
        )

    # -- retrieval ---------------------------------------------------------------------------------------------------

    def request_search(self, requester: Requester, query: str) -> None:
        """Search for a slot, or for a workflow, whose `on_search_done` receives the outcome. Equal queries share a search."""
        if query in self.requesters:
            self.requesters[query].append(requester)
        else:
            self.requesters[query] = [requester]
            self.waiting_queries.append(query)

    def _search(self, report: DeviceReport, embeddings: Float[np.ndarray, "Q E"], others: int) -> None:
        """Start the searches of embedded queries, and deliver the outcomes of ended searches."""
        if self._needs_embeddings:
            ready, self.embedding = self.embedding, []
            vectors = embeddings[: len(ready)]
            self.waiting_queries = collections.deque(
                query for query in self.waiting_queries if not self.searches.take_cached(query)
            )
        else:
            ready, vectors = list(self.waiting_queries), None
            self.waiting_queries.clear()
        if ready:
            self.stage = f"searching for {len(ready)} queries"
            self.searches.submit(ready, vectors)
        idle = not (self.prefills or self.waiting_queries or (report.status == DECODING).any() or others)
        if idle and len(self.searches):
            self.stage = "waiting for searches"
        for query, outcome in self.searches.poll(wait=self.idle_wait if idle else 0.0):
            requesters = self.requesters.pop(query)
            self.searches_failed += len(requesters) * (outcome is None)
            for requester in requesters:
                if not isinstance(requester, int):
                    self.on_search_done(requester, outcome)
                    continue
                self.outcomes[requester][query] = outcome
                if len(self.outcomes[requester]) == len(set(self.queries[requester])):
                    self._observe(requester)

    def _observe(self, slot: int) -> None:
        """Pass the outcomes of a slot's searches to the environment, once all have ended."""
        state, queries, outcomes = self.slots[slot], self.queries.pop(slot), self.outcomes.pop(slot)
        assert state is not None
        for query in queries:
            state.episode.searches.append(Search.of(state.episode.turn, query, outcomes[query]))
        action = self.environment.observe(state.episode, *(outcomes[query] for query in queries))
        self._apply(slot, state, action)

    @property
    def _needs_embeddings(self) -> bool:
        return self.searches.retriever is not None and self.searches.retriever.needs_embeddings

    # -- the reply ---------------------------------------------------------------------------------------------------

    def _empty_reply(self) -> tuple[np.ndarray, np.ndarray]:
        """Return chunks without a slot, and empty queries."""
        sizes = self.sizes
        chunks = np.zeros((sizes.chunks, HEADER_LENGTH + sizes.chunk_tokens), np.int32)
        chunks[:, 0] = sizes.slots  # no slot
        return chunks, np.zeros((sizes.wake_threshold, sizes.query_tokens), np.int32)

    def _reply(self) -> Int[np.ndarray, "message"]:
        chunks, queries = self._empty_reply()
        room, copies, parts = len(chunks), 0, [chunks[:0]]
        if self.prefixes is not None:
            self.prefixes.end_exchange()
        for slot in list(self.prefills):
            part = self._next_chunks(slot, room, copies)
            room -= len(part)
            copies += int(np.count_nonzero(part[:, COPIED]))
            parts.append(part)
        filled = np.concatenate(parts)
        # Chunks with tokens first, as `rrl.rollout.device.prefill` expects.
        chunks[: len(filled)] = filled[np.argsort(filled[:, LENGTH] == 0, kind="stable")]
        if self.waiting_queries and self._needs_embeddings:
            assert self.searches.retriever is not None
            count = min(self.sizes.wake_threshold, len(self.waiting_queries))
            self.embedding = [self.waiting_queries.popleft() for _ in range(count)]
            ids = self.searches.retriever.tokenize(self.embedding)
            queries[:count] = ids[:, : self.sizes.query_tokens]
        return self._join(chunks, queries, self._statuses())

    def _statuses(self) -> Int[np.ndarray, "slots"]:
        """Return the new status of each slot + 1; 0: unchanged."""
        statuses = np.zeros(self.sizes.slots, np.int32)
        free = BLOCKED if self.expects_requests else OFF
        for slot, state in enumerate(self.slots):
            if state is None:
                statuses[slot] = free + 1
            elif slot in self.prefills:
                statuses[slot] = PAUSED + 1
        for query in self.searches.queries:
            for requester in self.requesters[query]:
                if isinstance(requester, int):
                    statuses[requester] = BLOCKED + 1
        return statuses

    def _join(
        self, chunks: np.ndarray, queries: np.ndarray, statuses: np.ndarray
    ) -> Int[np.ndarray, "message"]:
        """Return the parts as one message.

        While queries are being embedded, decoding is interrupted after fewer steps, so that the next report, which holds the
        embeddings, comes sooner."""
        wait_steps = self.sizes.max_wait_steps // (EMBEDDING_WAIT_DIVISOR if self.embedding else 1)
        numbers = np.array([len(self.embedding), wait_steps], np.int32)
        return np.concatenate([chunks.ravel(), queries.ravel(), statuses, numbers])

    def _next_chunks(self, slot: int, room: int, copies: int) -> Int[np.ndarray, "chunks chunk_length"]:
        """Return the next chunks of a slot's prefill request.

        Args:
          slot: the slot.
          room: maximum number of chunks.
          copies: number of slots that already copy a prefix in this exchange.

        Returns:
          headers and tokens. No chunks if `room` is 0, if the slot waits for a prefix that another slot prefills, or if no
          further slot may copy in this exchange.
        """
        prefill, size = self.prefills[slot], self.sizes.chunk_tokens
        nothing = np.zeros((0, HEADER_LENGTH + size), np.int32)
        if not room:
            return nothing
        source, copied, own, copy_after_prefill = slot, 0, prefill.position, False
        if self.prefixes is not None and not prefill.begun:
            held = self.prefixes.tokens(slot) if own else prefill.tokens[:0]
            assert len(held) == own, f"slot {slot} holds {len(held)} tokens, but its text continues at {own}"
            tokens = np.concatenate([held, prefill.tokens])
            source, copied, ready = self.prefixes.find_source(slot, tokens, own)
            copy_after_prefill = (
                not ready and copied == len(tokens) and self.prefixes.prefill_completes(source, copied)
            )
            if not (ready or copy_after_prefill) or (source != slot and copies == self.sizes.max_copies):
                return nothing
            self.prefixes.assign(slot, tokens, own)
            prefill.tokens, prefill.position = tokens[copied:], copied
        if source == slot:
            copied = 0
        start = prefill.position
        chunks = prefill.take_chunks(
            room, size, source=source, copied=-copied if copy_after_prefill else copied, held=own
        )
        self.prefilled_tokens += prefill.position - start
        if self.prefixes is not None:
            self.prefixes.schedule(slot, prefill.position, copied_after_prefill=copy_after_prefill)
        if not len(prefill.tokens):
            del self.prefills[slot]
        return chunks
