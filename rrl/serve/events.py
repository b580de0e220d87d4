"""What an episode does, as it does it: an environment that tells of every turn it sees."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rrl.data.passages import Passage, render
from rrl.data.trajectory import Trajectory
from rrl.report.segments import policy_segments
from rrl.rollout.protocol import Action, Append, Environment, Episode, Restart
from rrl.text.chat import Prompt
from rrl.text.spans import Tag


class Event(NamedTuple):
    """One thing that happened."""

    kind: str
    """reasoning, search, observation, evidence, answer; message (the environment's correction); end."""
    text: str
    """What was written; of "end", why the episode ended."""
    titles: tuple[str, ...] = ()
    """Of an observation: the passages' titles, best first."""
    trajectory: Trajectory | None = None
    """Of "end" only."""

    def __str__(self) -> str:
        shown = " · ".join(self.titles) if self.titles else self.text
        lines = textwrap.wrap(shown, 96) or [""]
        return "\n".join(f"{self.kind if n == 0 else '':>11}  {line}" for n, line in enumerate(lines))


class ObservedEnvironment:
    """An environment that answers as the one inside it does, and tells `emit` of each turn.

    `emit` is called from the engine's host callback: it must be quick, must not raise and must not touch JAX.
    """

    def __init__(self, inner: Environment, tags: Mapping[Tag, str], emit: Callable[[Event], None]) -> None:
        self._inner, self._tags, self._emit = inner, tags, emit
        self.turn_tokens, self.observation_tokens = inner.turn_tokens, inner.observation_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Those of the environment inside."""
        return self._inner.stops

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        """Tells the pieces of the turn."""
        for piece in policy_segments(text, self._tags):
            self._emit(Event(piece.kind, piece.text))
        action = self._inner.react(episode, text, stop)
        if isinstance(action, Append):
            self._emit(Event("message", f"{action.prefix}{action.body}{action.suffix}".strip()))
        elif isinstance(action, Restart) and isinstance(action.prompt, (str, Prompt)):
            said = action.prompt if isinstance(action.prompt, str) else action.prompt.user_message
            self._emit(Event("message", said))
        return action

    def observe(self, episode: Episode, *found: Sequence[Passage] | None) -> Action:
        """Tells what was found."""
        action = self._inner.observe(episode, *found)
        passages = [passage for some in found for passage in some or ()]
        text = action.body if isinstance(action, Append) else render(passages)
        self._emit(Event("observation", text, tuple(passage.title for passage in passages)))
        return action

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        """As the environment inside does; what was told was the whole message."""
        return self._inner.overflow(episode, message, room)
