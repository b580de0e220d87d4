"""Runs episodes of a recipe: questions become prompts that fit the context, and prompts become scored trajectories."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int, PyTree

from rrl.data.questions import Question, as_prompted
from rrl.data.records import RunOnError
from rrl.data.trajectory import Trajectory
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext
from rrl.retrieval.retriever import Retriever
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import EpisodeState, Request
from rrl.text.chat import chat_ids, chat_text, fitting_ids


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How episodes are sampled."""

    key: jax.Array
    """The sampling key of the step."""
    samples: int = 1
    """Episodes per question."""
    temperature: float | Sequence[float] = 1.0
    """One for all episodes, or one per sample of a question."""


def run_questions(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    sampling: Sampling,
    *,
    scoring: ScoringContext = NO_MODELS,
    retriever: Retriever | None = None,
    on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
) -> list[Trajectory]:
    """Run `sampling.samples` episodes per question and score them.

    Question i makes group i. The sampling seed of an episode is its index, group * samples + sample, so a step is a pure
    function of (parameters, key, questions).

    Args:
      engine: the rollout engine.
      params: the policy's parameters.
      recipe: its prompt, environment and rewards are used.
      questions: the questions.
      sampling: the sampling key, and how many samples of a question are drawn at which temperatures.
      scoring: the models that the rewards may use.
      retriever: answers the searches.
      on_finish: receives the index and the unscored trajectory of each episode when it ends. Each episode is reported by one
        process of the run.

    Returns:
      The scored trajectories, in order of their index.
    """
    temperatures = np.broadcast_to(sampling.temperature, sampling.samples).tolist()
    requests = question_requests(engine, recipe, questions, temperatures)
    trajectories = run_requests(
        engine, params, requests, recipe, sampling.key, retriever=retriever, on_finish=on_finish
    )
    recipe.score(trajectories, scoring)
    scoring.functions.add_to(trajectories)
    return trajectories


def run_requests(
    engine: Engine,
    params: PyTree,
    requests: Sequence[Request],
    recipe: Recipe,
    key: jax.Array,
    *,
    retriever: Retriever | None = None,
    on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
) -> list[Trajectory]:
    """Run the requests with `Engine.run`, and return a trajectory for each, in order.

    A request whose prompt does not fit the context is not run: its trajectory has the truncated prompt, no turn, and the end
    reason "context_limit". The other trajectories do not depend on it.
    """
    fitting = [index for index, request in enumerate(requests) if engine.fits(request.prompt)]
    if len(fitting) == len(requests):
        return engine.run(params, requests, recipe.environment, key, retriever=retriever, on_finish=on_finish)
    trajectories: dict[int, Trajectory] = {}
    for index, request in enumerate(requests):
        if not engine.fits(request.prompt):
            truncated = request.prompt[: engine.config.context]
            state = EpisodeState(
                dataclasses.replace(request, prompt=truncated), engine.text.decode(truncated)
            )
            state.hit_limit("room")  # the prompt does not fit the context (`Trajectory.cuts`)
            trajectories[index] = state.trajectory("context_limit")
            if jax.process_index() == 0:  # one process reports it
                on_finish(index, trajectories[index])
    if fitting:
        finished = engine.run(
            params,
            [requests[index] for index in fitting],
            recipe.environment,
            key,
            retriever=retriever,
            on_finish=lambda position, trajectory: on_finish(fitting[position], trajectory),
        )
        trajectories |= zip(fitting, finished, strict=True)
    else:
        engine.stats = RolloutStats()
    return [trajectories[index] for index in range(len(requests))]


def question_requests(
    engine: Engine,
    recipe: Recipe,
    questions: Sequence[Question],
    temperatures: Sequence[float],
    groups: Sequence[int] | None = None,
) -> list[Request]:
    """Return the requests of a recipe's episodes, question by question.

    Args:
      engine: its tokenizer and context decide the prompts.
      recipe: its prompt is used.
      questions: the questions.
      temperatures: one for each sample of a question.
      groups: group of each question; None: its index. The sampling seed of sample s is group * samples + s.
    """
    samples = len(temperatures)
    return [
        Request(question, prompt, group * samples + sample, group, temperature)
        for group, question in zip(
            range(len(questions)) if groups is None else groups, questions, strict=True
        )
        for prompt in [prompt_ids(engine, recipe, question)]
        for sample, temperature in enumerate(temperatures)
    ]


def prompt_ids(engine: Engine, recipe: Recipe, question: Question) -> Int[np.ndarray, "T"]:
    """Return the token ids of an episode's prompt.

    A prompt with a body (`Prompt.body`) must leave room in the context for a full turn (`turn_tokens`), but may always take
    half the context. A longer prompt is truncated at the front of its body, and only there: the question is never cut.
    """
    prompt = recipe.prompt(as_prompted(question))
    if isinstance(prompt, str) or not prompt.body:
        return chat_ids(engine.tokenizer, prompt)
    context = engine.config.context
    room = max(context - recipe.environment.turn_tokens - 1, context // 2)
    without_body = chat_ids(engine.tokenizer, dataclasses.replace(prompt, body=""))
    return without_body if len(without_body) >= room else fitting_ids(engine.tokenizer, prompt, room)


def find_long_prompts(
    engine: Engine,
    recipe: Recipe,
    questions: Sequence[Question],
    on_error: RunOnError,
    report: Callable[[str], None],
) -> set[int]:
    """Find the questions whose prompts do not fit the context; their episodes end as "context_limit".

    A prompt with a body (`Prompt.body`) fits if it does after `prompt_ids` has truncated the body.

    Args:
      engine: its tokenizer and context are used.
      recipe: makes the prompts.
      questions: the questions.
      on_error: "stop" raises UserError for the first such question; the other values report a warning.
      report: receives a warning with the number of such questions, if there are any.

    Returns:
      The indices of these questions.
    """
    # A token holds at least one byte, so a text that fits in bytes fits in tokens too. Only longer ones are encoded.
    template_bytes: int | None = None  # of the chat template; the same for all questions
    long: dict[int, int] = {}
    for index, question in enumerate(questions):
        prompt = recipe.prompt(as_prompted(question))
        text = prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"
        size = len(text.encode())
        if template_bytes is None:
            template_bytes = len(chat_text(engine.tokenizer, prompt).encode()) - size
        # The policy needs room for two tokens (`Engine.fits`).
        if size + template_bytes + 2 > engine.config.context:
            ids = prompt_ids(engine, recipe, question)
            if on_error == "stop":
                engine.check_prompt(question, ids)
            if not engine.fits(ids):
                long[index] = len(ids)
    if long:
        first, tokens = next(iter(long.items()))
        report(
            f"warning: {len(long)} of {len(questions)} questions do not fit the context of {engine.config.context} tokens and "
            f"end as context_limit; the first is {questions[first].id!r}, whose prompt has {tokens} tokens. Raise "
            "rollout.context to have them answered"
        )
    return set(long)
