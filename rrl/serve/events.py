"""Events of a running episode, and an environment that emits them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rrl.data.passages import Passage, render
from rrl.data.trajectory import Trajectory
from rrl.report.segments import policy_segments
from rrl.rollout.protocol import Append, Environment, Episode, Restart, StepResult
from rrl.text.chat import Prompt
from rrl.text.spans import Tag


class Event(NamedTuple):
    """One event of an episode."""

    kind: str
    """"reasoning", "search", "observation", "evidence", "answer", "end", or "message": a text of the environment that is no
    observation, such as the correction of a malformed turn."""
    text: str
    """The text of the segment; for "end" the reason why the episode ended."""
    titles: tuple[str, ...] = ()
    """Titles of the passages, best first; for "observation" only."""
    trajectory: Trajectory | None = None
    """For "end" only."""

    def __str__(self) -> str:
        shown = " · ".join(self.titles) if self.titles else self.text
        lines = textwrap.wrap(shown, 96) or [""]
        return "\n".join(f"{self.kind if n == 0 else '':>11}  {line}" for n, line in enumerate(lines))


class ObservedEnvironment:
    """Wraps an environment: behaves like it and emits an event for each part of each turn.

    `emit` is called from the engine's host callback: it must return quickly, must not raise and must
    not call JAX.
    """

    def __init__(self, inner: Environment, tags: Mapping[Tag, str], emit: Callable[[Event], None]) -> None:
        self._inner, self._tags, self._emit = inner, tags, emit
        self.turn_tokens, self.observation_tokens = inner.turn_tokens, inner.observation_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the wrapped environment."""
        return self._inner.stops

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        """React like the wrapped environment, and emit the segments of the turn."""
        for segment in policy_segments(text, self._tags):
            self._emit(Event(segment.kind, segment.text))
        result = self._inner.step(episode, text, stop)
        if isinstance(result, Append):
            self._emit(Event("message", f"{result.prefix}{result.body}{result.suffix}".strip()))
        elif isinstance(result, Restart) and isinstance(result.prompt, (str, Prompt)):
            message = result.prompt if isinstance(result.prompt, str) else result.prompt.user_message
            self._emit(Event("message", message))
        return result

    def observe(self, episode: Episode, *results: Sequence[Passage] | None) -> StepResult:
        """Observe like the wrapped environment, and emit the passages. `results`: the passages of each parallel query."""
        result = self._inner.observe(episode, *results)
        passages = [passage for query_passages in results for passage in query_passages or ()]
        text = result.body if isinstance(result, Append) else render(passages)
        self._emit(Event("observation", text, tuple(passage.title for passage in passages)))
        return result

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        """Replace a message that does not fit, like the wrapped environment.

        Emits no event, because the full message was already emitted.
        """
        return self._inner.overflow(episode, message, room)
