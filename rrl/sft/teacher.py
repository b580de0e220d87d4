"""Teachers of a cold start: a model in our rollout engine (`PolicyTeacher`), or one behind an OpenAI-compatible service
(`EndpointTeacher`)."""

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
from rrl.recipes.episodes import question_requests, run_requests
from rrl.retrieval.retriever import Retriever
from rrl.rewards.endpoint import Endpoint
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import EOS, TURN_TOKENS, Episode, Finish, Restart, SearchFor, StepResult
from rrl.text.chat import Prompt

REFUSED = "refused"
"""End reason of a trajectory for which the service refused a step."""


class Teacher(Protocol):
    """A model that samples trajectories for demonstrations."""

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """Sample one trajectory per question and temperature.

        Args:
            questions: Q questions.
            first: index of `questions[0]` among all questions of the run.

        Returns:
            Q x T trajectories for T temperatures, question by question. `group` is the index of the
            trajectory's question among all questions of the run.
        """


@dataclasses.dataclass(frozen=True)
class PolicyTeacher:
    """A teacher whose decoder runs in the rollout engine."""

    engine: Engine
    params: PyTree
    recipe: Recipe
    temperatures: tuple[float, ...]
    seed: int = 0

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """See `Teacher`. The same arguments and seed give the same trajectories."""
        groups = range(first, first + len(questions))
        requests = question_requests(self.engine, self.recipe, questions, self.temperatures, groups)
        return run_requests(self.engine, self.params, requests, self.recipe, jax.random.key(self.seed))


@dataclasses.dataclass
class _TeacherEpisode:
    """The state of a trajectory that is being sampled."""

    question: Question
    episode: Episode
    group: int
    prompt: str | Prompt
    """Prompt of the next request."""
    segments: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """(role, text) so far."""
    ended: str = ""
    """End reason; "" while the episode runs."""


class EndpointTeacher:
    """A teacher behind an OpenAI-compatible service. It samples all trajectories together, one step per request.

    `Endpoint` caches the replies, so a repeated request gets the same reply.
    """

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
        # The cache of `Endpoint` answers a repeated request. A temperature that occurs again therefore gets another seed, and
        # runs with different seeds get disjoint ranges of request seeds. Request seed 0 is sent as None.
        first_seed = seed * len(temperatures)
        repeats = [list(temperatures[:at]).count(value) for at, value in enumerate(temperatures)]
        self.endpoints = [
            Endpoint(dataclasses.replace(config, temperature=value, seed=first_seed + count or None))
            for value, count in zip(temperatures, repeats, strict=True)
        ]

    def sample(self, questions: Sequence[Question], first: int) -> list[Trajectory]:
        """See `Teacher`.

        Raises:
            UserError: the recipe's protocol appends to a context, which a service cannot continue.
            ServiceUnavailable: the service does not answer. Errors of the retriever are raised too.
        """
        groups = [
            [
                _TeacherEpisode(question, episode, group, self.recipe.prompt(episode.question))
                for episode in (Episode(question) for _ in self.endpoints)
            ]
            for group, question in enumerate(questions, start=first)
        ]
        while any(not state.ended for group in groups for state in group):
            searching: list[tuple[_TeacherEpisode, str]] = []
            for index, endpoint in enumerate(self.endpoints):
                running = [group[index] for group in groups if not group[index].ended]
                replies = endpoint.replies([state.prompt for state in running])
                for state, reply in zip(running, replies, strict=True):
                    if reply.refused:
                        state.ended = REFUSED
                        continue
                    text = reply.text
                    state.segments += [(PROMPT, _prompt_text(state.prompt)), (POLICY, text)]
                    state.episode.policy_texts.append(text)
                    result = self.recipe.environment.step(
                        state.episode, text, TURN_TOKENS if reply.truncated else EOS
                    )
                    if isinstance(result, SearchFor):
                        searching.append((state, result.query))
                    else:
                        _apply_result(state, result)
            for (state, query), passages in zip(
                searching, self._search([query for _, query in searching]), strict=True
            ):
                state.episode.searches.append(Search.of(state.episode.turn, query, passages))
                _apply_result(state, self.recipe.environment.observe(state.episode, passages))
        return [_trajectory(state) for group in groups for state in group]

    def _search(self, queries: list[str]) -> list[list[Passage]]:
        if self.retriever is None or not queries:
            return [[] for _ in queries]
        vectors = self.retriever.embed(queries) if self.retriever.needs_embeddings else None
        hits = self.retriever.search(queries, self.top_k, vectors)
        return [[hit.passage for hit in query_hits] for query_hits in hits]


def _apply_result(state: _TeacherEpisode, result: StepResult) -> None:
    if isinstance(result, Finish):
        state.ended = result.reason
    elif isinstance(result, Restart) and isinstance(result.prompt, (str, Prompt)):
        state.episode.turn += 1
        state.prompt = result.prompt
    else:
        raise UserError(
            f"a service cannot continue after {type(result).__name__}: this recipe's protocol appends to one context; give "
            "a policy folder as model"
        )


def _prompt_text(prompt: str | Prompt) -> str:
    return prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"


def _trajectory(state: _TeacherEpisode) -> Trajectory:
    """Return the trajectory with text and searches only: a service returns no token ids."""
    empty = np.zeros(0)
    return Trajectory(
        question=state.question,
        request=state.group,
        group=state.group,
        tokens=empty,
        roles=empty,
        logps=empty,
        sampled_logps=empty,
        turns=empty,
        segments=state.segments,
        searches=list(state.episode.searches),
        ended=state.ended,
    )
