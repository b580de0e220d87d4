"""Samples and scores the episodes of a training step (`sample_step`), and evaluates a policy (`evaluate`)."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext
from rrl.recipes.episodes import run_questions
from rrl.retrieval.retriever import Retriever
from rrl.rl.dynamic_sampling import DynamicSampling
from rrl.rl.overlong import overlong_penalty
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.engine import Engine, RolloutStats
from rrl.train.rl_config import RLConfig


@dataclasses.dataclass(frozen=True)
class SampledStep:
    """The episodes of a training step."""

    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    """N scored trajectories. Their groups are numbered over all rounds."""
    used_groups: frozenset[int] = frozenset()
    """Groups that the update uses."""
    stats: RolloutStats = dataclasses.field(default_factory=RolloutStats)
    """Rollout statistics, summed over all rounds."""

    @property
    def left_out(self) -> Bool[np.ndarray, "N"]:
        """True for each trajectory that the update does not use."""
        return np.array([t.group not in self.used_groups for t in self.trajectories], bool)


def sample_step(
    config: RLConfig,
    step: int,
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    curriculum: Curriculum,
    scoring: ScoringContext,
) -> SampledStep:
    """Sample and score the episodes of a training step (counted from 0).

    A pure function of its arguments and of the curriculum's state, which it updates.
    """

    def select_questions(number: int, count: int) -> list[Question]:
        return curriculum.select(step, number, count)

    def permutation_rng(number: int) -> np.random.Generator:
        return np.random.default_rng((config.seed, step, number) if number else (config.seed, step))

    return sample_rounds(
        engine,
        params,
        recipe,
        select_questions,
        DynamicSampling(config.questions, config.rounds, config.drop_spread),
        key=jax.random.fold_in(jax.random.key(config.seed), step),
        samples=config.samples,
        temperature=config.temperatures or config.temperature,
        scoring=scoring.at_step(step, config.steps),
        update_curriculum=curriculum.update,
        permutation_rng=permutation_rng if config.permute_rewards else None,
        overlong=config.overlong,
    )


def sample_rounds(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    select_questions: Callable[[int, int], Sequence[Question]],
    dynamic_sampling: DynamicSampling,
    *,
    key: jax.Array,
    samples: int,
    temperature: float | Sequence[float],
    scoring: ScoringContext,
    update_curriculum: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
    permutation_rng: Callable[[int], np.random.Generator] | None = None,
    overlong: tuple[int, ...] = (),
) -> SampledStep:
    """Sample rounds of episodes until `dynamic_sampling` has enough groups with different rewards, or allows no more rounds.

    A pure function of parameters, key and questions.

    Args:
        engine: samples the episodes.
        params: parameters of the policy.
        recipe: prompts, environment and rewards.
        select_questions: (number of the round, n) -> n questions.
        dynamic_sampling: target number of groups, and limits.
        key: key of round 0; a later round folds its number into it.
        samples: episodes per question.
        temperature: one sampling temperature, or one for each sample.
        scoring: models that the rewards use.
        update_curriculum: called with the scored trajectories of each round, before the next questions are selected.
        permutation_rng: number of the round -> generator that permutes the round's rewards (control experiment); None: no
            permutation. Rewards are permuted before groups are selected, since a selection by the true rewards would reveal
            information that the control must not have.
        overlong: `RLConfig.overlong`.
    """
    sampled: list[Trajectory] = []
    stats = RolloutStats()
    while not dynamic_sampling.done:
        number = dynamic_sampling.rounds
        trajectories = run_questions(
            engine,
            params,
            recipe,
            select_questions(number, dynamic_sampling.next_round),
            key=jax.random.fold_in(key, number) if number else key,
            samples=samples,
            temperature=temperature,
            scoring=scoring,
        )
        update_curriculum(trajectories)
        if overlong:
            apply_overlong_penalty(trajectories, *overlong)
        if permutation_rng is not None:
            permute_rewards(trajectories, permutation_rng(number))
        for trajectory in trajectories:
            trajectory.group += dynamic_sampling.sampled
        totals, groups = np.array([(t.rewards["total"], t.group) for t in trajectories]).T
        excluded = recipe.excluded(trajectories)
        dynamic_sampling = dynamic_sampling.after(totals, groups.astype(np.int64), excluded)
        sampled += trajectories
        stats += engine.stats
    return SampledStep(sampled, frozenset(dynamic_sampling.selected), stats)


def apply_overlong_penalty(trajectories: Sequence[Trajectory], longest: int, cache: int) -> None:
    """Add DAPO's penalty for long outputs (`overlong_penalty`) to the rewards, in place.

    It becomes the component "overlong" and is added to "total" and, if turns have rewards, to the last turn's reward.
    """
    penalties = overlong_penalty(np.array([t.policy_tokens for t in trajectories]), longest, cache)
    for trajectory, penalty in zip(trajectories, penalties.tolist(), strict=True):
        trajectory.rewards["overlong"] = penalty
        trajectory.rewards["total"] += penalty
        if trajectory.turn_rewards:
            trajectory.turn_rewards[max(trajectory.turn_rewards)] += penalty


def permute_rewards(trajectories: Sequence[Trajectory], rng: np.random.Generator) -> None:
    """Permute rewards at random over the batch, in place. The components of a trajectory's reward stay together.

    Turn rewards are permuted over all turns of the batch.
    """
    components = [t.rewards for t in trajectories]
    for trajectory, place in zip(trajectories, rng.permutation(np.arange(len(components))), strict=True):
        trajectory.rewards = dict(components[place])
    paid = [(t.turn_rewards, turn) for t in trajectories if t.turn_rewards for turn in t.turn_rewards]
    earned = rng.permutation([rewards[turn] for rewards, turn in paid])
    for (rewards, turn), reward in zip(paid, earned, strict=True):
        rewards[turn] = float(reward)


def trajectory_metrics(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Return means over trajectories: "reward/...", metrics as "PREFIX/...", and "tokens/..." by role.

    "ended/REASON" is the share of trajectories with that end reason, "cut/LIMIT" the share that reached that limit.
    """
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
    for limit, number in collections.Counter(
        name for t in trajectories for name in {c[1] for c in t.cuts}
    ).items():
        out[f"cut/{limit}"] = number / count
    return out


def evaluate(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    temperature: float = 0.0,
    retriever: Retriever | None = None,
    scoring: ScoringContext = NO_MODELS,
    on_finish: Callable[[int, Trajectory], None] = lambda place, trajectory: None,
) -> tuple[dict[str, float], list[Trajectory]]:
    """Sample one episode per question, greedily by default, and return its metrics and trajectories.

    Metrics are "eval/em", "eval/f1", ... over all questions, and "eval/em/KIND", ... over each kind of question.
    "eval/searches_failed" and "eval/not_finite" count failed searches and episodes with logits that were not finite; both
    can lower all other metrics.
    """
    trajectories = run_questions(
        engine,
        params,
        recipe,
        questions,
        key=jax.random.key(0),
        temperature=temperature,
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
