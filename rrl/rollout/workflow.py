"""Prompted workflows: generator functions that yield requests for text and passages. One engine batches thousands of them.

    def workflow(question):
        passages = yield Retrieve(question)
        thought = yield Generate(prompt(question, passages), stops=(".",), tokens=64)
        return thought.text

A workflow may also yield a list of requests, which run concurrently, and receives the list of their results.
`rrl.rollout.workflow_runner` runs the workflows.
"""

import collections
import dataclasses
import inspect
from collections.abc import Generator, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.data.trajectory import NOT_FINITE, Trajectory
from rrl.errors import UserError, at_least, at_most, integer_at_least
from rrl.rollout.episodes import MAX_TEMPERATURE
from rrl.rollout.protocol import (
    CONTEXT,
    EOS,
    TURN_TOKENS,
    Append,
    Environment,
    Episode,
    Finish,
    Restart,
    StepResult,
    check_stops,
)
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
    """Return (number, workflow) pairs. The number is the workflow's seed and name: its index unless `numbers` are given.

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
class Completion(Environment):
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
        """No stop strings: each `Generate` gives its own in `Generate.stops`."""
        return ()

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        return Finish({EOS: "eos", TURN_TOKENS: "length", CONTEXT: "context_limit"}.get(stop, stop))

    def observe(self, episode: Episode, passages: Sequence[Passage] | None) -> StepResult:
        raise NotImplementedError("a completion never searches")

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        raise NotImplementedError("a completion has no messages of the environment")
