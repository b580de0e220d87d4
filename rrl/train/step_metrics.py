"""Metrics of a training step, as written to metrics.jsonl (docs/metrics.md)."""

import collections
from collections.abc import Sequence

import numpy as np

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.rl.advantages import low_spread
from rrl.train.learner import LearningBatch, UpdateResult
from rrl.train.sample import SampledStep


def step_metrics(sampled: SampledStep, batch: LearningBatch, result: UpdateResult) -> dict[str, float]:
    """Return all metrics of a step except its times: of the trajectories, of the update, and of the rollout."""
    totals, groups = np.array([(t.rewards["total"], t.group) for t in sampled.trajectories]).T
    return {
        **trajectory_metrics(sampled.trajectories, "train"),
        **result.metrics,
        "train/frac_reward_zero_std": float(low_spread(totals, groups).mean()),
        "train/left_out": float(batch.left_out.mean()),
        "train/searches_failed": float(sampled.stats.searches_failed),
        "train/not_finite": float(sampled.stats.not_finite),
        "train/groups": float(len(np.unique(groups))),
        "rollout/busy": sampled.stats.busy,
        "rollout/tokens_per_step": sampled.stats.tokens_per_step,
        "rollout/tokens_per_second": sampled.stats.tokens_per_second,
        "time/rollout": sampled.stats.seconds,
        "time/retrieval": sampled.stats.retrieval_seconds,
        "time/score": sampled.seconds - sampled.stats.seconds,
    }


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
        limit for t in trajectories for limit in {limit for _turn, limit in t.cuts}
    ).items():
        out[f"cut/{limit}"] = number / count
    return out
