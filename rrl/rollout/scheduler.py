"""The host's part of the rollout: assign requests to slots, record what the policy wrote, carry out the environment's results.

One `Scheduler` serves the slots of one data shard, or of one worker on a CPU. The jitted loop calls `exchange`, which uses NumPy
only: it never calls JAX and never raises. After an exception it stores `error` and tells the device to leave the loop, in all
processes. The engine raises the error then. Read `Scheduler.exchange` first.
"""

import collections
import threading
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from rrl.data.trajectory import NOT_FINITE, Search, Trajectory
from rrl.errors import UserError
from rrl.rollout.automaton import StopSets
from rrl.rollout.episodes import EpisodeState, Request, check_tokens
from rrl.rollout.exchange import (
    ABORT,
    BLOCKED,
    DECODING,
    OFF,
    PAUSED,
    STOP_CONTEXT,
    STOP_EOS,
    STOP_NOT_FINITE,
    STOP_TURN,
    DeviceReport,
    ExchangeSizes,
)
from rrl.rollout.prefill_queue import PrefillQueue
from rrl.rollout.prefill_request import PrefillRequest
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Append,
    Environment,
    Finish,
    Restart,
    SearchFor,
    StepResult,
    message_ids,
)
from rrl.rollout.search_requests import Requester, SearchRequests
from rrl.rollout.searches import IDLE_WAIT_SECONDS, SearchOutcome, SearchRunner
from rrl.rollout.stats import SchedulerCounts
from rrl.rollout.text_codec import TextCodec
from rrl.text.chat import Prompt

EMBEDDING_WAIT_DIVISOR = 4
"""While a query is being embedded, the number of wait steps is `max_wait_steps` divided by this."""
DEVICE_STAGES = NOT_CALLED_YET, WAITING_FOR_DEVICE = "not called yet", "waiting for the device"
"""Stages in which the scheduler waits for the device."""
_LIMITS = {STOP_TURN: "turn_tokens", STOP_CONTEXT: "context"}
"""Name of the limit that a STOP_* code reports, for `Trajectory.cuts`."""
_STOP_NAMES = {STOP_EOS: EOS, STOP_TURN: TURN_TOKENS, STOP_CONTEXT: CONTEXT}
"""The `stop` that `Environment.step` receives for a STOP_* code."""


class Scheduler:
    """Replies to the device's reports about the slots of one data shard."""

    def __init__(
        self,
        groups: collections.deque[list[tuple[int, Request]]],
        environment: Environment,
        stops: StopSets,
        sizes: ExchangeSizes,
        text: TextCodec,
        search_runner: SearchRunner,
        *,
        share_prompts: bool = True,
        idle_wait: float = IDLE_WAIT_SECONDS,
    ) -> None:
        """Set up a scheduler whose slots are free.

        Args:
          groups: groups of (number, request) pairs. `on_finish` receives the number. The requests of a group share a prompt.
            Several schedulers may take from one queue.
          environment: returns the next observation when a turn has ended, or ends the episode.
          stops: the compiled stop strings.
          sizes: sizes of the messages.
          text: encodes and decodes text.
          search_runner: runs the searches of this scheduler only.
          share_prompts: whether slots copy common prefixes.
          idle_wait: seconds to wait for searches if there is nothing else to do.
        """
        self.environment, self.stops, self.sizes, self.text = environment, stops, sizes, text
        self.idle_wait = idle_wait
        self.on_finish: Callable[[int, Trajectory], None] = lambda number, trajectory: None
        """Receives the number of each finished request, and its trajectory."""
        self.on_search_done: Callable[[Requester, SearchOutcome], None] = lambda requester, outcome: None
        """Receives each search request of a workflow, and the outcome of the search."""
        self.groups = groups
        self.queue = collections.deque[tuple[int, Request]]()
        """Requests that wait for a slot: those of the groups that this scheduler took, and those of workflows."""
        self.last_prompt: tuple[np.ndarray, str] = np.zeros(0, np.int32), ""
        """Token ids and text of the last prompt: samples of a group share it."""
        self.expects_requests = False
        """Whether requests may be added to an empty queue. If so, free slots are BLOCKED instead of OFF."""
        self.slots: list[EpisodeState | None] = [None] * sizes.slots
        """The episode of each slot; None: the slot is free."""
        self.request_numbers: list[int] = [-1] * sizes.slots
        """The number of each slot's request."""
        self.prefills = PrefillQueue(sizes, share_prompts)
        self.search_requests = SearchRequests(search_runner, sizes)
        self.stage = NOT_CALLED_YET
        """Current work, for log messages."""
        self.exchanges = 0
        self.policy_tokens = 0
        """Tokens that the policy wrote."""
        self.not_finite: list[tuple[int, str]] = []
        """(request number, question id) of each episode that ended as NOT_FINITE."""
        self.error: BaseException | None = None
        self.aborted = threading.Event()
        """Set after an error. All schedulers of a run share it, so that they end together."""

    @property
    def counts(self) -> SchedulerCounts:
        """What this scheduler counted so far."""
        return SchedulerCounts(
            self.search_requests.runner.seconds,
            self.policy_tokens,
            self.prefills.prefilled_tokens,
            self.search_requests.failed,
            self.not_finite,
        )

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
        self, report: DeviceReport, embeddings: Float[np.ndarray, "Q E"], active_elsewhere: int = 0
    ) -> Int[np.ndarray, "message"]:
        """Process the device's report and return the reply.

        Args:
          report: state of the slots.
          embeddings: embeddings of the queries of the last reply.
          active_elsewhere: number of slots of other data shards that decode or are paused. They make no progress during this
            call.

        Returns:
          the reply (see `rrl.rollout.exchange`).
        """
        self.exchanges += 1
        try:
            if not self.aborted.is_set():
                self.stage = "reading what the policy wrote"
                self.prefills.record_lengths(np.where(report.status == DECODING, report.length, 0))
                self._end_turns(report)
                self._search(report, embeddings, active_elsewhere)
                self.stage = "packing prefill chunks"
                self.fill()
                message = self._reply()
                self.stage = WAITING_FOR_DEVICE
                return message
        except BaseException as error:  # the engine raises it outside the callback
            self.error = error
            self.aborted.set()
        self.stage = "ended by an error"
        unchanged = np.zeros(self.sizes.slots, np.int32)
        message = self._pack_reply(self.sizes.empty_chunks(), self.sizes.empty_queries(), unchanged)
        message[-1] = ABORT
        return message

    # -- what the policy wrote ---------------------------------------------------------------------------------------

    def _end_turns(self, report: DeviceReport) -> None:
        """Record the turns that have ended, and carry out what the environment returns."""
        for index in np.flatnonzero(report.status == PAUSED):
            slot = int(index)
            state = self.slots[slot]
            if state is not None and slot not in self.prefills and slot not in self.search_requests:
                self._end_turn(slot, state, report)

    def _end_turn(self, slot: int, state: EpisodeState, report: DeviceReport) -> None:
        count, stop, last_token = int(report.length[slot]), int(report.stop[slot]), state.last_token
        self.policy_tokens += count
        ids = report.ids[slot, :count].copy()
        text = self.text.decode(ids)
        if stop in _LIMITS:
            state.hit_limit(_LIMITS[stop])
        logps, sampled_logps = report.logps[slot, :count].copy(), report.sampled_logps[slot, :count].copy()
        state.add_policy_turn(ids, text, logps, sampled_logps)
        if stop == STOP_TURN and state.context_length >= self.sizes.context:
            state.hit_limit("context")
        state.episode.policy_texts.append(text)
        if stop == STOP_NOT_FINITE:  # the environment does not react
            self.prefills.forget(slot)
            self.not_finite.append((self.request_numbers[slot], state.request.question.id))
            self._finish(slot, state, NOT_FINITE)
            return
        # The cache now holds the token before the turn and the tokens of the turn, except its last one, which is pending.
        self.prefills.record_decoded(slot, np.concatenate([last_token, ids[:-1]]))
        name = _STOP_NAMES[stop] if stop < 0 else self.stops.strings[stop]
        self._execute(slot, state, self.environment.step(state.episode, text, name))

    def _execute(self, slot: int, state: EpisodeState, result: StepResult) -> None:
        """Carry out the result of a step of the environment."""
        if isinstance(result, Finish):
            self._finish(slot, state, result.reason)
        elif isinstance(result, Append):
            self._append(slot, state, result)
        elif isinstance(result, Restart):
            self._restart(slot, state, result)
        elif isinstance(result, SearchFor):
            self._search_for(slot, state, result)
        else:
            raise UserError(
                f"environment {type(self.environment).__name__} returned {result!r} in turn {state.episode.turn} of question "
                f"{state.request.question.id!r}; it must be SearchFor, Append, Restart or Finish"
            )

    def _search_for(self, slot: int, state: EpisodeState, result: SearchFor) -> None:
        queries = (result.query, *result.parallel_queries)
        for query in queries:
            if not isinstance(query, str):
                raise UserError(
                    f"environment {type(self.environment).__name__} searches for {query!r} in turn {state.episode.turn} of "
                    f"question {state.request.question.id!r}; a query must be a string"
                )
        self.search_requests.add_slot(slot, queries)

    def _append(self, slot: int, state: EpisodeState, message: Append) -> None:
        free_tokens = self.sizes.context - state.context_length
        ids, was_cut = self._message_ids(message)
        if was_cut:
            state.hit_limit("observation_tokens")
        if len(ids) + max(1, message.reserve_tokens) > free_tokens:
            state.hit_limit("room")
            result = self.environment.overflow(state.episode, message, free_tokens)
            if not isinstance(result, Append):
                self._execute(slot, state, result)
                return
            ids, _ = self._message_ids(result)
            if len(ids) + max(1, result.reserve_tokens) > free_tokens:
                self._finish(slot, state, "context_limit")
                return
        # The last sampled token is not in the cache yet.
        self._prefill(slot, state, np.concatenate([state.last_token, ids]), state.context_length - 1)
        state.add_observation(ids, self.text.decode(ids))

    def _message_ids(self, message: Append) -> tuple[Int[np.ndarray, "T"], bool]:
        return message_ids(
            message, self.text.encode, self.environment.observation_tokens, self.text.encode_plain
        )

    def _restart(self, slot: int, state: EpisodeState, result: Restart) -> None:
        max_tokens = self.sizes.context - 2
        prompt = self._prompt_ids(state, result)
        if len(prompt) > max_tokens:
            state.hit_limit("room")
            other = self.environment.overflow(state.episode, result, max_tokens)
            if not isinstance(other, Restart):
                self._execute(slot, state, other)
                return
            prompt = self._prompt_ids(state, other)
            if len(prompt) > max_tokens:
                self._finish(slot, state, "context_limit")
                return
        state.restart(prompt, self.text.decode(prompt))
        self._prefill(slot, state, prompt, 0)

    def _prompt_ids(self, state: EpisodeState, result: Restart) -> Int[np.ndarray, "T"]:
        prompt, name = result.prompt, f"the prompt of a Restart of question {state.request.question.id!r}"
        if isinstance(prompt, (str, Prompt)):
            prompt = self.text.encode_prompt(prompt)
        check_tokens(prompt, self.text.vocab_size, name)
        return prompt

    def _finish(self, slot: int, state: EpisodeState, reason: str) -> None:
        """End an episode and free its slot."""
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
                self.last_prompt = request.prompt, self.text.decode(request.prompt)
            state = self.slots[slot] = EpisodeState(request, self.last_prompt[1])
            self._prefill(slot, state, request.prompt, 0)
        return taken

    def _prefill(self, slot: int, state: EpisodeState, tokens: Int[np.ndarray, "T"], start: int) -> None:
        """Request to prefill `tokens` from cache position `start` on, and then to begin a turn."""
        request = state.request
        stops = self.environment.stops if request.stops is None else request.stops
        self.prefills.add(
            PrefillRequest(
                slot,
                np.asarray(tokens, np.int32),
                start,
                request,
                offset=state.starts[-1],
                turn_limit=request.turn_tokens or self.environment.turn_tokens,
                stop_state=self.stops.starts[stops],
            )
        )

    # -- searches ----------------------------------------------------------------------------------------------------

    def _search(
        self, report: DeviceReport, embeddings: Float[np.ndarray, "Q E"], active_elsewhere: int
    ) -> None:
        """Start the searches of embedded queries, and deliver the outcomes of ended searches."""
        runner = self.search_requests.runner
        ready, vectors = self.search_requests.take_ready(embeddings)
        if ready:
            self.stage = f"searching for {len(ready)} queries"
            runner.submit(ready, vectors)
        decodes = (report.status == DECODING).any()
        idle = not (len(self.prefills) or self.search_requests.waiting or decodes or active_elsewhere)
        if idle and len(runner):
            self.stage = "waiting for searches"
        for query, outcome in runner.poll(wait=self.idle_wait if idle else 0.0):
            for requester in self.search_requests.end(query, outcome):
                if isinstance(requester, int):
                    self._observe(requester)
                else:
                    self.on_search_done(requester, outcome)

    def _observe(self, slot: int) -> None:
        """Pass the outcomes of a slot's searches to the environment, once all have ended."""
        state, outcomes = self.slots[slot], self.search_requests.take_outcomes(slot)
        assert state is not None
        for query, outcome in outcomes:
            state.episode.searches.append(Search.of(state.episode.turn, query, outcome))
        result = self.environment.observe(state.episode, *(outcome for _, outcome in outcomes))
        self._execute(slot, state, result)

    # -- the reply ---------------------------------------------------------------------------------------------------

    def _reply(self) -> Int[np.ndarray, "message"]:
        chunks, queries = self.prefills.take_chunks(), self.search_requests.take_for_embedding()
        return self._pack_reply(chunks, queries, self._statuses())

    def _statuses(self) -> Int[np.ndarray, "slots"]:
        """Return the new status of each slot + 1; 0: unchanged."""
        statuses = np.zeros(self.sizes.slots, np.int32)
        free = BLOCKED if self.expects_requests else OFF
        for slot, state in enumerate(self.slots):
            if state is None:
                statuses[slot] = free + 1
            elif slot in self.prefills:
                statuses[slot] = PAUSED + 1
        statuses[self.search_requests.searching_slots()] = BLOCKED + 1
        return statuses

    def _pack_reply(
        self, chunks: np.ndarray, queries: np.ndarray, statuses: np.ndarray
    ) -> Int[np.ndarray, "message"]:
        """Return the parts as one message (see `rrl.rollout.exchange`).

        While queries are being embedded, decoding is interrupted after fewer steps, so that the next report, which holds the
        embeddings, comes sooner.
        """
        embedding_queries = self.search_requests.being_embedded
        wait_steps = self.sizes.max_wait_steps // (EMBEDDING_WAIT_DIVISOR if embedding_queries else 1)
        numbers = np.array([len(embedding_queries), wait_steps], np.int32)
        return np.concatenate([chunks.ravel(), queries.ravel(), statuses, numbers])
