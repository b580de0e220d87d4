"""Episodes of a recipe: from questions to prompts that fit the context, and on to scored trajectories."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int, PyTree

from rrl.data.questions import Question
from rrl.data.records import OnFault
from rrl.data.trajectory import Trajectory
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext
from rrl.retrieval.retriever import Retriever
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import EpisodeState, Request
from rrl.text.chat import chat_ids, chat_text, fitting_ids


def run_questions(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    key: jax.Array,
    samples: int = 1,
    temperature: float | Sequence[float] = 1.0,
    scoring: ScoringContext = NO_MODELS,
    retriever: Retriever | None = None,
    on_finish: Callable[[int, Trajectory], None] = lambda place, trajectory: None,
) -> list[Trajectory]:
    """Runs `samples` episodes of each question and scores them; samples of question i are group i. `temperature` is that of
    all, or holds one for each sample of a question.

    The sampling seed of an episode is its place (group * samples + sample), so that a step is a pure function of
    (parameters, key, questions).
    """
    temperatures = np.broadcast_to(temperature, samples).tolist()
    requests = [
        Request(question, prompt, group * samples + sample, group, temperatures[sample])
        for group, question in enumerate(questions)
        for prompt in [prompt_ids(engine, recipe, question)]
        for sample in range(samples)
    ]
    trajectories = run_requests(
        engine, params, requests, recipe, key, retriever=retriever, on_finish=on_finish
    )
    recipe.score(trajectories, scoring)
    return trajectories


def run_requests(
    engine: Engine,
    params: PyTree,
    requests: Sequence[Request],
    recipe: Recipe,
    key: jax.Array,
    *,
    retriever: Retriever | None = None,
    on_finish: Callable[[int, Trajectory], None] = lambda place, trajectory: None,
) -> list[Trajectory]:
    """`Engine.run`, where a request whose prompt does not fit the context ends as "context_limit" before a turn.

    The prompt of such a trajectory is cut to the context. The others are what they are without it.
    """
    fitting = [place for place, request in enumerate(requests) if engine.fits(request.prompt)]
    if len(fitting) == len(requests):
        return engine.run(params, requests, recipe.environment, key, retriever=retriever, on_finish=on_finish)
    found: dict[int, Trajectory] = {}
    for place, request in enumerate(requests):
        if not engine.fits(request.prompt):
            shown = request.prompt[: engine.config.context]
            state = EpisodeState(dataclasses.replace(request, prompt=shown), engine.decode(shown))
            state.hit_limit("room")
            found[place] = state.trajectory("context_limit")
            if jax.process_index() == 0:
                on_finish(place, found[place])
    if fitting:
        ran = engine.run(
            params,
            [requests[place] for place in fitting],
            recipe.environment,
            key,
            retriever=retriever,
            on_finish=lambda place, trajectory: on_finish(fitting[place], trajectory),
        )
        found |= zip(fitting, ran, strict=True)
    else:
        engine.stats = RolloutStats()
    return [found[place] for place in range(len(requests))]


def prompt_ids(engine: Engine, recipe: Recipe, question: Question) -> Int[np.ndarray, "T"]:
    """Token ids of what opens an episode. The body of a prompt gives way where a turn would not fit behind it."""
    prompt = recipe.prompt(question)
    if isinstance(prompt, str) or not prompt.body:
        return chat_ids(engine.tokenizer, prompt)
    context = engine.config.context
    return fitting_ids(
        engine.tokenizer, prompt, max(context - recipe.environment.turn_tokens - 1, context // 2)
    )


def find_long_prompts(
    engine: Engine,
    recipe: Recipe,
    questions: Sequence[Question],
    on_error: OnFault,
    say: Callable[[str], None],
) -> set[int]:
    """Places of the questions whose prompts do not fit the context, which end as "context_limit"; says how many there are.

    Raises UserError for the first of them where `on_error` is "stop". A token has a byte at least, so that only prompts with
    many bytes are encoded.
    """
    template: int | None = None  # its bytes; the same for all questions
    long: dict[int, int] = {}
    for place, question in enumerate(questions):
        prompt = recipe.prompt(question)
        own = prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"
        size = len(own.encode())
        if template is None:
            template = len(chat_text(engine.tokenizer, prompt).encode()) - size
        if size + template + 2 > engine.config.context:
            ids = chat_ids(engine.tokenizer, prompt)
            if on_error == "stop":
                engine.check_prompt(question, ids)
            if not engine.fits(ids):
                long[place] = len(ids)
    if long:
        first, tokens = next(iter(long.items()))
        say(
            f"warning: {len(long)} of {len(questions)} questions do not fit the context of {engine.config.context} tokens and "
            f"end as context_limit; the first is {questions[first].id!r}, whose prompt has {tokens} tokens. Raise "
            "rollout.context to have them answered"
        )
    return set(long)
