"""Runs workflows (`rrl.rollout.workflow`) on a scheduler: starts the requests that they yield and sends the results back."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, Trajectory
from rrl.errors import UserError
from rrl.rollout.episodes import Request, check_tokens
from rrl.rollout.scheduler import Scheduler
from rrl.rollout.search_requests import Requester
from rrl.rollout.searches import SearchOutcome
from rrl.rollout.workflow import (
    GENERATION_BITS,
    Completion,
    Generate,
    Generated,
    PromptTooLong,
    Retrieve,
    Workflow,
    WorkflowRequest,
)
from rrl.text.chat import Prompt


@dataclasses.dataclass(slots=True)
class _Yield:
    """What a workflow yielded last, and the results so far."""

    is_list: bool
    """Whether it yielded a list of requests, not a single one."""
    results: list[Any]
    """Result of each request; None where it is missing."""
    missing: int
    """Number of missing results."""


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
        self._yields: dict[int, _Yield] = {}
        """The last `yield` of each workflow that waits."""
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
        workflow = self._workflows[number]
        resume: Callable[[], Any] = functools.partial(workflow.send, value)
        while True:
            try:
                yielded = resume()
            except StopIteration as end:
                self._finish(number, end.value)
                return
            is_list = isinstance(yielded, (list, tuple))
            requests: list[WorkflowRequest] = list(yielded) if is_list else [yielded]
            try:
                prompts = [self._checked_prompt(number, request) for request in requests]
            except PromptTooLong as error:  # the workflow may catch it and yield something else
                resume = functools.partial(workflow.throw, error)
                continue
            if requests:
                break
            resume = functools.partial(workflow.send, [])
        self._yields[number] = _Yield(is_list, [None] * len(requests), len(requests))
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if isinstance(request, Retrieve):
                self._scheduler.search_requests.add((number, index), request.query)
            else:
                self._generate(number, index, request, prompt)

    def _finish(self, number: int, result: Any) -> None:
        self._results[number] = result
        del self._workflows[number]
        self._scheduler.expects_requests = bool(self._workflows)
        self._on_finish(number, result)

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
        """Deliver the result of a `Generate`. The scheduler calls this as its `on_finish`."""
        written = "".join(text for role, text in trajectory.segments if role == POLICY)
        stop = trajectory.ended
        at_stop_string = any(stop in strings for strings in self._environment.stop_sets)
        text = written.partition(stop)[0] if at_stop_string else written
        self._deliver(*self._requesters.pop(request_number), Generated(text, stop, trajectory))

    def _retrieved(self, requester: Requester, outcome: SearchOutcome) -> None:
        """Deliver the result of a `Retrieve`. The scheduler calls this as its `on_search_done`."""
        assert isinstance(requester, tuple)
        self._deliver(*requester, outcome)

    def _deliver(self, number: int, index: int, result: Any) -> None:
        """Store a result, and continue the workflow if it was the last missing one."""
        waiting = self._yields[number]
        waiting.results[index] = result
        waiting.missing -= 1
        if not waiting.missing:
            self._advance(number, waiting.results if waiting.is_list else waiting.results[0])
