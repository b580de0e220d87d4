"""The strong model of a cold start: a policy folder in our engine, or a service that is asked step by step."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Search, Trajectory
from rrl.errors import UserError
from rrl.recipes.base import Recipe
from rrl.recipes.episodes import run_requests
from rrl.retrieval.retriever import Retriever
from rrl.rewards.endpoint import Endpoint, EndpointConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import EOS, TURN_TOKENS, Action, Episode, Finish, Restart, SearchFor
from rrl.text.chat import Prompt, chat_ids

REFUSED = "refused"
"""Why a trajectory ended of which a service would not answer a step."""


class Teacher(Protocol):
    """Gives trajectories of questions."""

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """One at each temperature of each question, the first of which has the number `first` in the run; those of a question
        follow one another, and its number is their group. A pure function of its arguments."""


@dataclasses.dataclass(frozen=True)
class PolicyTeacher:
    """A decoder in the rollout engine."""

    engine: Engine
    params: PyTree
    recipe: Recipe
    temperatures: tuple[float, ...]
    seed: int = 0

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """See `Teacher`."""
        size = len(self.temperatures)
        requests = [
            Request(question, prompt, group * size + sample, group, temperature)
            for group, question in enumerate(questions, start=first)
            for prompt in [chat_ids(self.engine.tokenizer, self.recipe.prompt(question))]
            for sample, temperature in enumerate(self.temperatures)
        ]
        return run_requests(self.engine, self.params, requests, self.recipe, jax.random.key(self.seed))


@dataclasses.dataclass
class _TeacherEpisode:
    """A trajectory in the making."""

    episode: Episode
    group: int
    prompt: str | Prompt
    said: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    ended: str = ""


class EndpointTeacher:
    """A model behind an OpenAI-compatible service, asked for one step at a time, of all trajectories together."""

    def __init__(
        self,
        config: EndpointConfig,
        recipe: Recipe,
        retriever: Retriever | None,
        top_k: int,
        temperatures: Sequence[float],
        seed: int = 0,
    ) -> None:
        self.recipe, self.retriever, self.top_k = recipe, retriever, top_k
        # Equal requests are answered from the cache: another sample at a temperature needs another seed.
        first = seed * len(temperatures)  # so that no two seeds of ours ask for the same sample
        again = [list(temperatures[:at]).count(value) for at, value in enumerate(temperatures)]
        self.endpoints = [
            Endpoint(
                dataclasses.replace(config, temperature=value, seed=first + count if first + count else None)
            )
            for value, count in zip(temperatures, again, strict=True)
        ]

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """See `Teacher`. Raises as `Endpoint.answers` and the retriever do, and UserError for a protocol that goes on within one
        context, which a service cannot."""
        lives = [
            [_TeacherEpisode(Episode(question), group, self.recipe.prompt(question)) for _ in self.endpoints]
            for group, question in enumerate(questions, start=first)
        ]
        while any(not live.ended for row in lives for live in row):
            searching: list[tuple[_TeacherEpisode, str]] = []
            for sample, endpoint in enumerate(self.endpoints):
                asked = [row[sample] for row in lives if not row[sample].ended]
                replies = endpoint.replies([live.prompt for live in asked])
                for live, reply in zip(asked, replies, strict=True):
                    if reply.refused:
                        live.ended = REFUSED
                        continue
                    text = reply.text
                    live.said += [(PROMPT, _prompt_text(live.prompt)), (POLICY, text)]
                    live.episode.policy_texts.append(text)
                    action = self.recipe.environment.react(
                        live.episode, text, TURN_TOKENS if reply.truncated else EOS
                    )
                    if isinstance(action, SearchFor):
                        searching.append((live, action.query))
                    else:
                        _apply_action(live, action)
            for (live, query), passages in zip(
                searching, self._search([query for _, query in searching]), strict=True
            ):
                live.episode.searches.append(Search.of(live.episode.turn, query, passages))
                _apply_action(live, self.recipe.environment.observe(live.episode, passages))
        return [_trajectory(live) for row in lives for live in row]

    def _search(self, queries: list[str]) -> list[list[Passage]]:
        if self.retriever is None or not queries:
            return [[] for _ in queries]
        vectors = self.retriever.embed(queries) if self.retriever.needs_embeddings else None
        hits = self.retriever.search(queries, self.top_k, vectors)
        return [[hit.passage for hit in of_one] for of_one in hits]


def _apply_action(live: _TeacherEpisode, action: Action) -> None:
    if isinstance(action, Finish):
        live.ended = action.reason
    elif isinstance(action, Restart) and isinstance(action.prompt, (str, Prompt)):
        live.episode.turn += 1
        live.prompt = action.prompt
    else:
        raise UserError(
            f"a service cannot go on after {type(action).__name__} of this recipe's protocol, which needs one context; give "
            "a policy folder as model"
        )


def _prompt_text(prompt: str | Prompt) -> str:
    return prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"


def _trajectory(live: _TeacherEpisode) -> Trajectory:
    """Words and searches alone: a service tells no tokens."""
    none = np.zeros(0)
    return Trajectory(
        live.episode.question,
        live.group,
        live.group,
        *(none, none, none, none, none),
        segments=live.said,
        searches=list(live.episode.searches),
        ended=live.ended,
    )
