"""Evaluation of the policy on held-out questions during training."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext
from rrl.recipes.episodes import Sampling, run_questions
from rrl.retrieval.retriever import Retriever
from rrl.rollout.engine import Engine
from rrl.train.step_metrics import trajectory_metrics


def evaluate(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    temperature: float = 0.0,
    retriever: Retriever | None = None,
    scoring: ScoringContext = NO_MODELS,
    on_finish: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
) -> tuple[dict[str, float], list[Trajectory]]:
    """Sample one episode per question, greedily by default, and return the metrics and the trajectories.

    Metrics are "eval/em", "eval/f1", ... over all questions, and "eval/em/KIND", ... over each kind of question.
    "eval/searches_failed" and "eval/not_finite" count failed searches and episodes with logits that were not finite; both
    can lower all other metrics.

    Args:
        engine: samples the episodes.
        params: parameters of the policy.
        recipe: prompts, environment and metrics.
        questions: held-out questions.
        temperature: sampling temperature; 0: greedy.
        retriever: retriever for these questions; None: the engine's.
        scoring: models that the rewards use.
        on_finish: called with the index of the question and its unscored trajectory when an episode ends.
    """
    trajectories = run_questions(
        engine,
        params,
        recipe,
        questions,
        Sampling(jax.random.key(0), temperature=temperature),
        retriever=retriever,
        scoring=scoring,
        on_finish=on_finish,
    )
    metrics = {k: v for k, v in trajectory_metrics(trajectories, "eval").items() if k.startswith("eval/")}
    for kind in dict.fromkeys(q.kind for q in questions if q.kind):
        of_kind = [t for t in trajectories if t.question.kind == kind]
        for name in of_kind[0].metrics:
            metrics[f"eval/{name}/{kind}"] = float(np.mean([t.metrics[name] for t in of_kind]))
    metrics["eval/searches_failed"] = float(engine.stats.searches_failed)
    metrics["eval/not_finite"] = float(engine.stats.not_finite)
    return metrics, trajectories
