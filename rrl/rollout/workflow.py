"""Prompted workflows: generator functions that ask for text and passages, thousands of them batched by one engine.

    def workflow(question):
        passages = yield Retrieve(question)
        thought = yield Generate(prompt(question, passages), stops=(".",), tokens=64)
        return thought.text

A workflow may also yield a list, whose parts run side by side, and gets the list of their results.
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
from rrl.rollout.scheduler import Requester, Scheduler
from rrl.text.chat import Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """Asks for what the policy writes after a prompt. Raises UserError for what cannot be asked."""

    prompt: str | Prompt | Int[np.ndarray, "T"]
    """A text (the user's turn of the chat template), a `Prompt`, or token ids as they are."""
    stops: tuple[str, ...] = ()
    """Strings to stop at: one of the sets that the engine was told of."""
    tokens: int = 0
    """Most tokens; 0: as many as the engine was told."""
    temperature: float = 0.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        integer_at_least(0, self, "tokens", where="generate.")
        at_least(0, self, "temperature", where="generate.")
        at_most(MAX_TEMPERATURE, self, "temperature", where="generate.")
        check_stops(self.stops, "generate.stops")


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """Asks for passages; the result is a list of them, None where the search failed."""

    query: str


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """What came of a `Generate`."""

    text: str
    """Up to the stop string, without it."""
    stop: str
    """The stop string, or "eos", "length", "context_limit", "not_finite"."""
    trajectory: Trajectory
    """Tokens and log-probabilities."""


CALL_BITS = 12
"""Bits of a seed that count the texts that one workflow asks for; the others are its number."""


class PromptTooLong(UserError):
    """Is raised inside a workflow whose prompt outgrows the context, which may go on with something else; where it does not,
    the run ends with it."""


WorkflowRequest = Generate | Retrieve
Workflow = Generator[WorkflowRequest | Sequence[WorkflowRequest], Any, Any]
RESERVED_STOPS = ("eos", "length", "context_limit", NOT_FINITE)
"""What `Generated.stop` is where it is no stop string."""


def numbered_workflows(
    workflows: Iterable[Workflow], numbers: Sequence[int] | None = None
) -> list[tuple[int, Workflow]]:
    """Each with its seed, its place unless given. Raises UserError for what is no generator that has yet to begin, for one that
    is there twice, and for numbers that are not one for each, there twice or too large."""
    workflows, places = list(workflows), dict[int, int]()
    for place, workflow in enumerate(workflows):
        if not isinstance(workflow, Generator):
            raise UserError(
                f"workflows[{place}] is a {type(workflow).__name__}; it must be a generator, what a generator function returns"
            )
        if inspect.isgenerator(workflow) and inspect.getgeneratorstate(workflow) != inspect.GEN_CREATED:
            raise UserError(f"workflows[{place}] has begun already; call its function once for each run")
        if (first := places.setdefault(id(workflow), place)) != place:
            raise UserError(
                f"workflows[{first}] and [{place}] are the same generator; call its function once for each"
            )
    numbers = range(len(workflows)) if numbers is None else numbers
    if len(numbers) != len(workflows):
        raise UserError(
            f"numbers: {len(numbers)} for {len(workflows)} workflows; each needs one of its own, its seed"
        )
    most = 2 ** (31 - CALL_BITS) - 1
    if wrong := [n for n in numbers if not isinstance(n, Integral) or not 0 <= n <= most]:
        raise UserError(f"numbers: {wrong[0]!r} must be a whole number, 0 to {most}")
    seeds = [int(number) for number in numbers]  # a small NumPy integer would overflow in a seed
    if twice := [number for number, count in collections.Counter(seeds).items() if count > 1]:
        raise UserError(f"numbers: {twice[0]} is there twice; each workflow needs one of its own, its seed")
    return list(zip(seeds, workflows, strict=True))


@dataclasses.dataclass(frozen=True)
class Completion:
    """The environment of a `Generate`: one turn, to the end or to a stop string."""

    stop_sets: tuple[tuple[str, ...], ...] = ()
    """The sets of strings that a `Generate` of the run may stop at, beside none."""
    turn_tokens: int = 256
    observation_tokens: int = 0

    def __post_init__(self) -> None:
        integer_at_least(1, self, "turn_tokens", where="completion.")
        integer_at_least(0, self, "observation_tokens", where="completion.")
        if not isinstance(self.stop_sets, Sequence):
            raise UserError(
                f"completion.stop_sets: {self.stop_sets!r} must be a tuple of tuples of texts, such as (('.',),)"
            )
        for strings in self.stop_sets:
            check_stops(strings, "completion.stop_sets")
            if taken := set(strings).intersection(RESERVED_STOPS):
                raise UserError(
                    f"completion.stop_sets: {taken.pop()!r} stands for an end at no stop string; choose another"
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """Those of a request that names none."""
        return ()

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        return Finish({EOS: "eos", TURN_TOKENS: "length", CONTEXT: "context_limit"}.get(stop, stop))

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> Action:
        raise NotImplementedError("a completion never searches")

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        raise NotImplementedError("a completion is never answered")


class WorkflowRunner:
    """The workflows of one host, each advanced as soon as what it asked for is there."""

    def __init__(
        self,
        workflows: Sequence[tuple[int, Workflow]],
        host: Scheduler,
        environment: Completion,
        results: dict[int, Any],
        on_finish: Callable[[int, Any], None] = lambda number, result: None,
    ) -> None:
        """`workflows` are numbered; the number is their seed, and what one returns is put into `results` under it."""
        self._results = results
        self._scheduler, self._environment = host, environment
        self._on_finish = on_finish
        self._flows = dict(workflows)
        self._waiting: dict[int, list[Any]] = {}
        self._missing: dict[int, int] = {}
        self._single: dict[int, bool] = {}
        self._asked: dict[int, int] = dict.fromkeys(self._flows, 0)
        self._places: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count()
        host.on_finish, host.on_search_done = self._generated, self._found
        host.expects_requests = bool(self._flows)

    def start(self) -> None:
        """Runs all workflows up to the first thing that they ask for."""
        for flow in list(self._flows):
            self._advance(flow, None)

    def _advance(self, flow: int, value: Any) -> None:
        go_on: Callable[[], Any] = functools.partial(self._flows[flow].send, value)
        while True:
            try:
                asked = go_on()
            except StopIteration as end:
                self._results[flow] = end.value
                del self._flows[flow]
                self._scheduler.expects_requests = bool(self._flows)
                self._on_finish(flow, end.value)
                return
            self._single[flow] = not isinstance(asked, (list, tuple))
            parts: list[WorkflowRequest] = list(asked) if isinstance(asked, (list, tuple)) else [asked]
            try:
                prompts = [self._checked(flow, part) for part in parts]
            except PromptTooLong as error:
                go_on = functools.partial(self._flows[flow].throw, error)
                continue
            if parts:
                break
            go_on = functools.partial(self._flows[flow].send, [])
        self._waiting[flow], self._missing[flow] = [None] * len(parts), len(parts)
        for place, (part, prompt) in enumerate(zip(parts, prompts, strict=True)):
            if isinstance(part, Retrieve):
                self._scheduler.request_search((flow, place), part.query)
            else:
                self._generate(flow, place, part, prompt)

    def _checked(self, flow: int, ask: Any) -> Int[np.ndarray, "T"]:
        """The tokens of the prompt of what a workflow asks for, none for a search; raises what is wrong with it."""
        environment, context = self._environment, self._scheduler.limits.context
        if isinstance(ask, Retrieve) and isinstance(ask.query, str):
            return np.zeros(0, np.int32)
        if isinstance(ask, Retrieve):
            raise UserError(f"workflow {flow} searches for {ask.query!r}; a query is a text")
        if not isinstance(ask, Generate):
            raise UserError(
                f"workflow {flow} yields a {type(ask).__name__}; it may yield Generate, Retrieve, or lists of them"
            )
        prompt = ask.prompt
        if isinstance(prompt, (str, Prompt)):
            prompt = self._scheduler.encode_prompt(prompt)
        if ask.stops and ask.stops not in environment.stop_sets:
            raise UserError(
                f"workflow {flow} stops at {ask.stops}, which is none of {environment.stop_sets}: name all sets of stop "
                "strings of a run in its Completion"
            )
        if ask.tokens > environment.turn_tokens:
            raise UserError(
                f"workflow {flow} asks for {ask.tokens} tokens; Completion.turn_tokens={environment.turn_tokens}"
            )
        check_tokens(prompt, self._scheduler.vocab_size, f"the prompt of workflow {flow}")
        if len(prompt) > context - 2:
            raise PromptTooLong(
                f"workflow {flow}: a prompt of {len(prompt)} tokens; the context holds {context}, two of which are the policy's: "
                "raise rollout.context or shorten it"
            )
        return np.array(prompt)  # its own: the workflow may write into its array again

    def _generate(self, flow: int, place: int, ask: Generate, prompt: Int[np.ndarray, "T"]) -> None:
        number = next(self._numbers)
        self._places[number] = (flow, place)
        asked = self._asked[flow]
        self._asked[flow] += 1
        if asked >= 2**CALL_BITS:
            raise UserError(f"workflow {flow} asks for more than {2**CALL_BITS} texts")
        seed = flow << CALL_BITS | asked
        question = Question(f"{flow}.{asked}", "", ())
        request = Request(question, prompt, seed, flow, ask.temperature, ask.tokens, ask.stops)
        self._scheduler.queue.append((number, request))

    def _generated(self, number: int, trajectory: Trajectory) -> None:
        written = "".join(text for role, text in trajectory.segments if role == POLICY)
        stop = trajectory.ended
        stopped = any(stop in strings for strings in self._environment.stop_sets)
        text = written.partition(stop)[0] if stopped else written
        self._deliver(*self._places.pop(number), Generated(text, stop, trajectory))

    def _found(self, key: Requester, passages: list[Passage] | None) -> None:
        assert isinstance(key, tuple)
        self._deliver(*key, passages)

    def _deliver(self, flow: int, place: int, result: Any) -> None:
        results = self._waiting[flow]
        results[place] = result
        self._missing[flow] -= 1
        if not self._missing[flow]:
            self._advance(flow, results[0] if self._single[flow] else results)
