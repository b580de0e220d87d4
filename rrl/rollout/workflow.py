"""Prompted workflows: generator functions that yield requests for text and passages. One engine batches thousands of them.

    def workflow(question):
        passages = yield Retrieve(question)
        thought = yield Generate(prompt(question, passages), stops=(".",), tokens=64)
        return thought.text

A workflow may also yield a list of requests, which run concurrently, and receives the list of their results.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import NOT_FINITE, POLICY, Trajectory
from rrl.errors import UserError, at_least, at_most, integer_at_least
from rrl.rollout.episodes import MAX_TEMPERATURE, Request, check_tokens
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Action,
    Append,
    Episode,
    Finish,
    Restart,
    check_stops,
)
from rrl.rollout.scheduler import Scheduler
from rrl.rollout.search_requests import Requester
from rrl.rollout.searches import SearchOutcome
from rrl.text.chat import Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """Request for the policy's continuation of a prompt. Raises UserError for an invalid field."""

    prompt: str | Prompt | Int[np.ndarray, "T"]
    """A string (the user's message in the chat template), a `Prompt`, or token ids, used unchanged."""
    stops: tuple[str, ...] = ()
    """Strings to stop at: one of `Completion.stop_sets`, or none."""
    tokens: int = 0
    """Maximum tokens. 0: `Completion.turn_tokens`."""
    temperature: float = 0.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        integer_at_least(0, self, "tokens", where="generate.")
        at_least(0, self, "temperature", where="generate.")
        at_most(MAX_TEMPERATURE, self, "temperature", where="generate.")
        check_stops(self.stops, "generate.stops")


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """Request for passages. The result is a list of passages; None if the search failed."""

    query: str


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """Result of a `Generate`."""

    text: str
    """The continuation, up to the stop string and without it."""
    stop: str
    """The stop string, or one of RESERVED_STOPS."""
    trajectory: Trajectory
    """Tokens and log-probabilities."""


GENERATION_BITS = 12
"""Number of low bits of a request's seed that hold the index of the `Generate` within its workflow. The other bits hold the
workflow's number."""


class PromptTooLong(UserError):
    """Raised inside a workflow at the `yield` of a prompt that does not fit the context. The workflow may catch it; otherwise it
    ends the run."""


WorkflowRequest = Generate | Retrieve
Workflow = Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, Any]
RESERVED_STOPS = ("eos", "length", "context_limit", NOT_FINITE)
"""Values of `Generated.stop` other than stop strings."""


def numbered_workflows(
    workflows: Iterable[Workflow], numbers: Sequence[int] | None = None
) -> list[tuple[int, Workflow]]:
    """Return (number, workflow) pairs. The number is the workflow's seed: its index unless `numbers` are given.

    Raises:
      UserError: a workflow is no generator, has started, or is given twice; or `numbers` are not distinct, too large, or not
        one per workflow.
    """
    workflows, indices = list(workflows), dict[int, int]()
    for index, workflow in enumerate(workflows):
        if not isinstance(workflow, Generator):
            raise UserError(
                f"workflows[{index}] is a {type(workflow).__name__}; it must be a generator, the result of a generator function"
            )
        if inspect.isgenerator(workflow) and inspect.getgeneratorstate(workflow) != inspect.GEN_CREATED:
            raise UserError(f"workflows[{index}] has already started; call its function once per run")
        if (first := indices.setdefault(id(workflow), index)) != index:
            raise UserError(
                f"workflows[{first}] and [{index}] are the same generator; call its function once for each"
            )
    numbers = range(len(workflows)) if numbers is None else numbers
    if len(numbers) != len(workflows):
        raise UserError(
            f"numbers: {len(numbers)} for {len(workflows)} workflows; each workflow needs its own number, its seed"
        )
    largest = 2 ** (31 - GENERATION_BITS) - 1
    if wrong := [n for n in numbers if not isinstance(n, Integral) or not 0 <= n <= largest]:
        raise UserError(f"numbers: {wrong[0]!r} must be a whole number, 0 to {largest}")
    seeds = [int(number) for number in numbers]  # small NumPy integers would overflow in a seed
    if repeated := [number for number, count in collections.Counter(seeds).items() if count > 1]:
        raise UserError(f"numbers: {repeated[0]} is repeated; each workflow needs its own number, its seed")
    return list(zip(seeds, workflows, strict=True))


@dataclasses.dataclass(frozen=True)
class Completion:
    """The environment of each `Generate`: one turn, to its end or to a stop string."""

    stop_sets: tuple[tuple[str, ...], ...] = ()
    """All sets of stop strings that a `Generate` of the run may use. The empty set is always allowed."""
    turn_tokens: int = 256
    """Maximum tokens of a `Generate`."""
    observation_tokens: int = 0
    """Unused: there are no observations."""

    def __post_init__(self) -> None:
        integer_at_least(1, self, "turn_tokens", where="completion.")
        integer_at_least(0, self, "observation_tokens", where="completion.")
        if not isinstance(self.stop_sets, Sequence):
            raise UserError(
                f"completion.stop_sets: {self.stop_sets!r} must be a tuple of tuples of strings, such as (('.',),)"
            )
        for strings in self.stop_sets:
            check_stops(strings, "completion.stop_sets")
            if reserved := set(strings).intersection(RESERVED_STOPS):
                raise UserError(
                    f"completion.stop_sets: {reserved.pop()!r} is reserved; choose another stop string"
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of a request without its own."""
        return ()

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        return Finish({EOS: "eos", TURN_TOKENS: "length", CONTEXT: "context_limit"}.get(stop, stop))

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Action:
        raise NotImplementedError("a completion never searches")

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        raise NotImplementedError("a completion has no messages of the environment")


class WorkflowRunner:
    """Runs the workflows of one scheduler. A workflow continues as soon as all results of its last `yield` are there."""

    def __init__(
        self,
        workflows: Sequence[tuple[int, Workflow]],
        scheduler: Scheduler,
        environment: Completion,
        results: dict[int, Any],
        on_finish: Callable[[int, Any], None] = lambda number, result: None,
    ) -> None:
        """Set up the workflows; `start` starts them.

        Args:
          workflows: (number, generator) pairs. The number is the workflow's seed.
          scheduler: runs the requests.
          environment: the allowed stop strings and lengths.
          results: filled with what each workflow returns, by number.
          on_finish: receives the number and the result of each finished workflow.
        """
        self._results = results
        self._scheduler, self._environment = scheduler, environment
        self._on_finish = on_finish
        self._workflows = dict(workflows)
        """Workflows that have not finished, by number."""
        self._partial: dict[int, list[Any]] = {}
        """Results of a workflow's last `yield`; None where one is missing."""
        self._missing: dict[int, int] = {}
        """How many of them are missing."""
        self._single: dict[int, bool] = {}
        """Whether the last `yield` was one request, not a list."""
        self._generations: dict[int, int] = dict.fromkeys(self._workflows, 0)
        """Number of `Generate` requests of each workflow so far."""
        self._requesters: dict[int, tuple[int, int]] = {}
        """(workflow, index in its last `yield`) of each request in flight."""
        self._request_numbers = itertools.count()
        scheduler.on_finish, scheduler.on_search_done = self._generated, self._retrieved
        scheduler.expects_requests = bool(self._workflows)

    def start(self) -> None:
        """Run all workflows up to their first `yield`."""
        for number in list(self._workflows):
            self._advance(number, None)

    def _advance(self, number: int, value: Any) -> None:
        """Send `value` into a workflow, and start what it yields."""
        resume: Callable[[], Any] = functools.partial(self._workflows[number].send, value)
        while True:
            try:
                yielded = resume()
            except StopIteration as end:
                self._results[number] = end.value
                del self._workflows[number]
                self._scheduler.expects_requests = bool(self._workflows)
                self._on_finish(number, end.value)
                return
            self._single[number] = not isinstance(yielded, (list, tuple))
            requests: list[WorkflowRequest] = (
                list(yielded) if isinstance(yielded, (list, tuple)) else [yielded]
            )
            try:
                prompts = [self._checked_prompt(number, request) for request in requests]
            except PromptTooLong as error:
                resume = functools.partial(self._workflows[number].throw, error)
                continue
            if requests:
                break
            resume = functools.partial(self._workflows[number].send, [])
        self._partial[number], self._missing[number] = [None] * len(requests), len(requests)
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if isinstance(request, Retrieve):
                self._scheduler.search_requests.add((number, index), request.query)
            else:
                self._generate(number, index, request, prompt)

    def _checked_prompt(self, number: int, request: Any) -> Int[np.ndarray, "T"]:
        """Return the prompt's token ids; none for a `Retrieve`. Raises UserError for an invalid request."""
        environment, context = self._environment, self._scheduler.sizes.context
        if isinstance(request, Retrieve) and isinstance(request.query, str):
            return np.zeros(0, np.int32)
        if isinstance(request, Retrieve):
            raise UserError(f"workflow {number} searches for {request.query!r}; a query must be a string")
        if not isinstance(request, Generate):
            raise UserError(
                f"workflow {number} yields a {type(request).__name__}; it may yield Generate, Retrieve, or lists of them"
            )
        prompt = request.prompt
        if isinstance(prompt, (str, Prompt)):
            prompt = self._scheduler.text.encode_prompt(prompt)
        if request.stops and request.stops not in environment.stop_sets:
            raise UserError(
                f"workflow {number} stops at {request.stops}, which is not in {environment.stop_sets}: list all sets of stop "
                "strings of a run in Completion.stop_sets"
            )
        if request.tokens > environment.turn_tokens:
            raise UserError(
                f"workflow {number} requests {request.tokens} tokens; the maximum is "
                f"Completion.turn_tokens={environment.turn_tokens}"
            )
        check_tokens(prompt, self._scheduler.text.vocab_size, f"the prompt of workflow {number}")
        if len(prompt) > context - 2:
            raise PromptTooLong(
                f"workflow {number}: the prompt has {len(prompt)} tokens; the context holds {context}, two of which are for the "
                "policy: raise rollout.context or shorten the prompt"
            )
        return np.array(prompt)  # a copy: the workflow may change its array

    def _generate(self, number: int, index: int, generate: Generate, prompt: Int[np.ndarray, "T"]) -> None:
        request_number = next(self._request_numbers)
        self._requesters[request_number] = (number, index)
        generation = self._generations[number]
        self._generations[number] += 1
        if generation >= 2**GENERATION_BITS:
            raise UserError(f"workflow {number} requests more than {2**GENERATION_BITS} texts")
        request = Request(
            Question(f"{number}.{generation}", "", ()),
            prompt,
            seed=number << GENERATION_BITS | generation,
            group=number,
            temperature=generate.temperature,
            turn_tokens=generate.tokens,
            stops=generate.stops,
        )
        self._scheduler.queue.append((request_number, request))

    def _generated(self, request_number: int, trajectory: Trajectory) -> None:
        written = "".join(text for role, text in trajectory.segments if role == POLICY)
        stop = trajectory.ended
        stopped = any(stop in strings for strings in self._environment.stop_sets)
        text = written.partition(stop)[0] if stopped else written
        self._deliver(*self._requesters.pop(request_number), Generated(text, stop, trajectory))

    def _retrieved(self, requester: Requester, outcome: SearchOutcome) -> None:
        assert isinstance(requester, tuple)
        self._deliver(*requester, outcome)

    def _deliver(self, number: int, index: int, result: Any) -> None:
        results = self._partial[number]
        results[index] = result
        self._missing[number] -= 1
        if not self._missing[number]:
            self._advance(number, results[0] if self._single[number] else results)
