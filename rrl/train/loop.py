"""Reinforcement learning of a search agent, on one page: sample, score, select, compute advantages, update, log, save.

Each call in `train` is one stage; its module has the details. From the trajectories to the loss (GRPO or PPO), a step goes
through six files:

    train/loop.py      the stages
    train/learner.py   `Learner.compute_advantages`, `Learner.update`: the trained state
    rl/update.py       `Updater`: minibatches, optimiser steps, gradients summed over microbatches
    rl/packing.py      `pack_trajectories`: trajectories as microbatches of packed rows
    rl/logprobs.py     `token_logprobs`: log-probabilities under policy and reference
    rl/losses.py       `policy_loss`: the loss of a microbatch
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from rrl.recipes.base import Recipe
from rrl.setup.rl_config import RLConfig
from rrl.train.run import open_run
from rrl.train.sample import sample_and_score, select_trajectories
from rrl.train.task import Outcome, RunModels, Task


def train(
    config: RLConfig,
    recipe: Recipe,
    task: Task,
    models: RunModels,
    workdir: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any] | None = None,
    before_writing: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train `models.decoder` in place. If the workdir has a checkpoint, continue from it.

    Args:
        config: settings of the run.
        recipe: prompt, environment, rewards and advantages.
        task: training and held-out questions.
        models: the initial policy, its rollout engine, the critic and the models that score. At the end the decoder holds
            the final policy's parameters; if `config.average_last` is above 0, these are the mean over the last updates.
        workdir: gets config.json, checkpoints, metrics and trajectories for the report.
        identity: what identifies the run besides `config` (models, data). A workdir of a run with another identity
            is refused.
        before_writing: called once, when all checks have passed and nothing is written yet. It may lock the workdir.

    Raises:
        UserError: the workdir belongs to another config.
        SaveError: the workdir cannot be written.
        ServiceUnavailable: a judge or reader does not answer. A checkpoint is saved first.
    """
    engine, scoring = models.engine, models.scoring
    with open_run(config, recipe, task, models, workdir, identity or {}, before_writing) as run:
        learner, curriculum = run.learner, run.curriculum

        for step in run.steps():
            # Sample and score: the curriculum gives the questions, each gets a group of episodes. DAPO: more rounds if too few
            # groups have unequal rewards.
            sampled = sample_and_score(
                config, step, engine, learner.policy_params, recipe, curriculum, scoring
            )

            # Select: DAPO drops groups with equal rewards.
            selected, left_out = select_trajectories(config, sampled, recipe)

            # Compute advantages: group-normalised (GRPO), or by a critic (PPO).
            batch = learner.compute_advantages(selected, left_out, recipe)

            # Update: pack the trajectories into microbatches, sum gradients, take the optimiser steps.
            result = learner.update(step, batch)

            # Log the step. Evaluate and save if due.
            run.end_step(sampled, batch, result)

    return run.outcome()
