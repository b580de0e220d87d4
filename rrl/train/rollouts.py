"""From questions to scored trajectories: the half of a training step that evaluation shares."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from rrl.data.questions import Question
from rrl.recipes.base import Answers, Recipe
from rrl.retrieval.retriever import Retriever
from rrl.rl.refill import Refill
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import Request
from rrl.rollout.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.text.chat import chat_ids, chat_text


def run_questions(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    key: jax.Array,
    samples: int = 1,
    temperature: float = 1.0,
    reader: Answers | None = None,
    retriever: Retriever | None = None,
    on_finish: Callable[[int], None] = lambda done: None,
) -> list[Trajectory]:
    """Runs `samples` episodes of each question and scores them; samples of question i are group i.

    The sampling seed of an episode is its place (group * samples + sample), so that a step is a pure function of
    (parameters, key, questions).
    """
    requests = [
        Request(question, prompt, group * samples + sample, group, temperature)
        for group, question in enumerate(questions)
        for prompt in [chat_ids(engine.tokenizer, recipe.prompt(question))]
        for sample in range(samples)
    ]
    trajectories = engine.run(
        params, requests, recipe.environment, key, retriever=retriever, on_finish=on_finish
    )
    recipe.score(trajectories, reader)
    return trajectories


def refuse_long_prompts(engine: Engine, recipe: Recipe, questions: Sequence[Question]) -> None:
    """Raises UserError for a question whose prompt does not fit the context, which a run would else find on its way.

    A token has a byte at least, so that only prompts with many bytes are encoded.
    """
    template = len(chat_text(engine.tokenizer, "").encode())
    for question in questions:
        prompt = recipe.prompt(question)
        if len(prompt.encode()) + template + 2 > engine.config.context:
            engine.check_prompt(question, chat_ids(engine.tokenizer, prompt))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a training step samples."""

    trajectories: list[Trajectory]
    """Scored; groups are numbered over all rounds."""
    kept: set[int]
    """The groups to learn from."""
    stats: RolloutStats
    """Of all rounds."""


def sample_rounds(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    ask: Callable[[int, int], Sequence[Question]],
    refill: Refill,
    *,
    key: jax.Array,
    samples: int,
    temperature: float,
    reader: Answers | None,
) -> Sampled:
    """Rounds of rollouts until `refill` has enough groups with spread (dynamic sampling); one round where it allows no more.

    `ask(round, n)` gives n questions. A step is a pure function of parameters, key and questions: round 0 samples with `key`
    itself, a later one with its number folded in.
    """
    found: list[Trajectory] = []
    stats = RolloutStats()
    while not refill.done:
        number = refill.rounds
        some = run_questions(
            engine,
            params,
            recipe,
            ask(number, refill.next_round),
            key=jax.random.fold_in(key, number) if number else key,
            samples=samples,
            temperature=temperature,
            reader=reader,
        )
        for trajectory in some:
            trajectory.group += refill.asked
        refill = refill.after(
            np.array([t.rewards["total"] for t in some]), np.array([t.group for t in some], np.int64)
        )
        found += some
        stats += engine.stats
    return Sampled(found, set(refill.kept), stats)


def describe(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Means over trajectories: rewards by component, metrics, tokens by role, and the share of each way of ending."""
    count = max(len(trajectories), 1)
    out: dict[str, float] = {}
    for name in trajectories[0].rewards if trajectories else ():
        out[f"reward/{name}"] = float(np.mean([t.rewards[name] for t in trajectories]))
    for name in trajectories[0].metrics if trajectories else ():
        out[f"{prefix}/{name}"] = float(np.mean([t.metrics[name] for t in trajectories]))
    for role, name in ((PROMPT, "prompt"), (POLICY, "policy"), (ENVIRONMENT, "environment")):
        out[f"tokens/{name}"] = float(np.mean([(t.roles == role).sum() for t in trajectories]))
    for reason, number in collections.Counter(t.ended for t in trajectories).items():
        out[f"ended/{reason}"] = number / count
    return out


def evaluate(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    temperature: float = 0.0,
    retriever: Retriever | None = None,
    reader: Answers | None = None,
    on_finish: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, float], list[Trajectory]]:
    """One episode a question (greedy unless told): "eval/em", "eval/f1", ... and "eval/em/<kind>"."""
    trajectories = run_questions(
        engine,
        params,
        recipe,
        questions,
        key=jax.random.key(0),
        temperature=temperature,
        retriever=retriever,
        reader=reader,
        on_finish=on_finish,
    )
    found = {k: v for k, v in describe(trajectories, "eval").items() if k.startswith("eval/")}
    for kind in dict.fromkeys(q.kind for q in questions if q.kind):
        of_kind = [t for t in trajectories if t.question.kind == kind]
        for name in ("em", "f1", "searches"):
            found[f"eval/{name}/{kind}"] = float(np.mean([t.metrics[name] for t in of_kind]))
    return found, trajectories
