"""The learner: the trained state of an RL run (policy, optimiser, critic), its advantages and its updates.

Read `Learner.compute_advantages` and `Learner.update` first.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, PyTree

from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.models.decoder import Decoder, cast_params
from rrl.models.heads import ValueModel
from rrl.recipes.base import Recipe
from rrl.rl.critic import CriticState, ValueEstimate, make_critic
from rrl.rl.optim import (
    applied_updates,
    init_optimizer,
    make_optimizer,
    make_schedule,
    running_mean,
    skipped_updates,
    split_trained,
)
from rrl.rl.update import Advantages, ReferenceLogprobs, Updater
from rrl.setup.rl_config import RLConfig


def learned_params_path(settings: Mapping[str, Any]) -> str:
    """Return the path of the final policy's parameters in a checkpoint, for `rrl.runs.checkpoint_reader.read_part`.

    A checkpoint stores the tuple `Learner.state`. Its entry "[0]" has the parameters, and "[2]" their average if the run has one.

    Args:
        settings: the run's config.json.
    """
    return "[2]" if settings["average_last"] else "[0]"


@dataclasses.dataclass(frozen=True)
class LearningBatch:
    """The trajectories that a step learns from, and their advantages."""

    left_out: Bool[np.ndarray, "N"]
    """One entry for each of the N sampled trajectories: True if its group was not selected."""
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    """The trajectories to learn from; empty if there are none."""
    advantages: Advantages = ()
    """Advantages that the loss uses (after KL penalty and whitening): one per trajectory or one per token."""
    advantage_std: float = 0.0
    """Standard deviation of the advantages before whitening: over trajectories, or over policy tokens with a critic."""
    reference_logprobs: ReferenceLogprobs | None = None
    """Log-probabilities under the reference, if the objective has the KL penalty in the reward; else None."""
    values: ValueEstimate | None = None
    """The critic's estimates; None without a critic."""


@dataclasses.dataclass(frozen=True)
class UpdateResult:
    """The result of `Learner.update`."""

    metrics: dict[str, float]
    """Metrics of the update, with the prefixes "train/" (policy) and "critic/"."""
    finite: bool = True
    """False if a gradient was not finite, so that its optimiser step was skipped."""


def _commit_to_devices(tree: PyTree) -> PyTree:
    """Commit arrays to their devices, like the results of an update and of a restored checkpoint.

    Without this the update would be compiled a second time, for committed arrays.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


class Learner:
    """The policy with its optimiser, the frozen reference and, if the run has them, the parameter average and the critic.

    `state` is everything that changes; a checkpoint saves it.
    """

    def __init__(
        self,
        config: RLConfig,
        decoder: Decoder,
        mesh: Mesh | None = None,
        value_model: ValueModel | None = None,
    ) -> None:
        """Start from given models.

        Args:
            config: settings of the run.
            decoder: initial policy, and the reference. Its frozen parameters are cast to its dtype in place.
            mesh: mesh of the models; None: one device.
            value_model: initial critic, for PPO.

        Raises:
            UserError: only one of config.critic and `value_model` is given.
        """
        if (config.critic is None) != (value_model is None):
            raise UserError("train.critic and a value model go together; give both or neither")
        self.config = config
        graph, params, frozen = split_trained(decoder, config.optim.frozen)
        self._frozen = _commit_to_devices(cast_params(frozen, decoder.dtype))
        # The decoder now holds the cast parameters. This frees those in param_dtype.
        nnx.update(decoder, self._frozen)
        self._reference = _commit_to_devices(
            jax.tree.map(lambda x: x.copy(), cast_params(params, decoder.dtype))
        )
        optimizer = make_optimizer(config.optim)
        self._schedule = make_schedule(config.optim)
        opt_state = init_optimizer(optimizer, params, mesh)
        average = jax.tree.map(lambda x: x.copy(), params) if config.average_last else None
        self._critic = None
        # Empty without a critic, so that the checkpoint has no entry for it.
        critic_state: list[CriticState] = []
        if config.critic is not None and value_model is not None:
            self._critic, *critic_state = make_critic(value_model, config.critic, config.objective, mesh)
        self.state = _commit_to_devices((params, opt_state, average, *critic_state))
        self._updater = Updater(graph, optimizer, config.objective, mesh)

    @property
    def state(self) -> tuple[PyTree, ...]:
        """Parameters, optimiser state, average of the parameters (None without averaging), and the critic's state if there is
        a critic. `update` donates these buffers."""
        return self._params, self._opt_state, self._average, *self._critic_state

    @state.setter
    def state(self, state: tuple[PyTree, ...]) -> None:
        self._params, self._opt_state, self._average, *self._critic_state = state

    @property
    def policy_params(self) -> PyTree:
        """All parameters of the current policy, which samples episodes."""
        return nnx.merge_state(self._params, self._frozen)

    @property
    def learned_params(self) -> PyTree:
        """All parameters of the policy to evaluate and to save: the average if there is one, else the current policy."""
        return nnx.merge_state(self._params if self._average is None else self._average, self._frozen)

    @property
    def reference_params(self) -> PyTree:
        """All parameters of the reference, which is the initial policy."""
        return nnx.merge_state(self._reference, self._frozen)

    def compute_advantages(
        self, trajectories: list[Trajectory], left_out: Bool[np.ndarray, "N"], recipe: Recipe
    ) -> LearningBatch:
        """Compute the advantages that the loss uses.

        Without a critic the recipe computes the advantages, over all trajectories of the selected groups. If the KL is in the
        reward, the KL penalties are subtracted from the advantages (`Updater.token_advantages`). With a critic GAE estimates the
        advantages from the rewards per token; if the KL is in the reward, the KL penalties are subtracted from these rewards.
        In both cases the advantages are whitened if `ObjectiveConfig.whiten` is set.

        Trajectories without a policy token are not learned from. (An episode whose first logits were not finite has none.)

        Args:
            trajectories: all trajectories of the selected groups.
            left_out: see `LearningBatch`.
            recipe: computes the advantages of a run without a critic.
        """
        nonempty = np.flatnonzero([t.policy_tokens > 0 for t in trajectories])
        if not len(nonempty):
            return LearningBatch(left_out)
        learned = [trajectories[i] for i in nonempty]
        reference_logprobs = self._updater.reference_logprobs(self._reference, self._frozen, learned)
        if self._critic is None:
            advantages = recipe.advantages(trajectories)[nonempty]
            final = self._updater.token_advantages(learned, advantages, reference_logprobs)
            return LearningBatch(left_out, learned, final, float(advantages.std()), reference_logprobs)
        penalties = None if reference_logprobs is None else reference_logprobs.kl_penalties
        values = self._critic.estimate(self._critic_state[0], learned, penalties)
        return LearningBatch(
            left_out, learned, values.advantages, values.advantage_std, reference_logprobs, values
        )

    def update(self, step: int, batch: LearningBatch) -> UpdateResult:
        """Update the critic, if there is one, and the policy; then the average of the parameters.

        The policy is not updated in the first `config.critic_warmup` steps. An empty batch changes nothing but the average.

        Args:
            step: number of the step, from 0.
            batch: what to learn from.
        """
        skipped_before, metrics = self._skipped, {"train/advantage_std": batch.advantage_std}
        if self._critic is not None and batch.values is not None:
            self._critic_state[0], critic_metrics = self._critic.update(
                self._critic_state[0], batch.trajectories, batch.values
            )
            metrics |= {f"critic/{name}": value for name, value in critic_metrics.items()}
        if batch.trajectories and step >= self.config.critic_warmup:
            self._params, self._opt_state, policy_metrics = self._updater(
                self._params,
                self._opt_state,
                self._reference,
                self._frozen,
                batch.trajectories,
                batch.advantages,
                batch.reference_logprobs,
            )
            metrics |= {f"train/{name}": value for name, value in policy_metrics.items()}
        metrics["train/lr"] = self.learning_rate
        self._update_average(step + 1)
        return UpdateResult(metrics, self._skipped == skipped_before)

    def _update_average(self, steps: int) -> None:
        """Add the parameters after `steps` updates to their average. Does nothing without averaging."""
        if self._average is not None:
            # Before `average_start` the count is 1: the mean is just the current parameters.
            count = max(1, steps - self.config.average_start)
            self._average = running_mean(self._average, self._params, count)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the policy's last optimiser step that was not skipped; 0 before the first."""
        applied = applied_updates(self._opt_state)
        return float(self._schedule(applied - 1)) if applied else 0.0

    @property
    def _skipped(self) -> list[float]:
        """Numbers of skipped optimiser steps since the start of the run: of the policy, and of the critic if there is one."""
        critic_opt_states = [opt_state for _, opt_state in self._critic_state]
        return [float(skipped_updates(state)) for state in (self._opt_state, *critic_opt_states)]
