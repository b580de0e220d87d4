"""The trained state of an RL run (policy, optimiser, critic), and one update from trajectories: `Learner.learn`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.models.decoder import Decoder, cast_params
from rrl.models.heads import ValueModel
from rrl.rl.critic import CriticState, make_critic
from rrl.rl.optim import (
    init_optimizer,
    make_optimizer,
    make_schedule,
    running_mean,
    skipped_updates,
    split_trained,
    taken_updates,
)
from rrl.rl.update import Advantages, Updater
from rrl.train.rl_config import RLConfig


def learned_params_path(settings: Mapping[str, Any]) -> str:
    """Return the path of the final policy's parameters within a checkpoint's state, given the run's config.json."""
    return "[2]" if settings["average_last"] else "[0]"


@dataclasses.dataclass(frozen=True)
class LearnResult:
    """The result of `Learner.learn`."""

    metrics: dict[str, float]
    """critic/... and train/... of the updates that were made."""
    advantages: Advantages
    """Advantages of the trajectories' tokens."""
    finite: bool
    """False if a gradient was not finite, so that its update was skipped."""


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
        graph, params, fixed = split_trained(decoder, config.optim.frozen)
        self._fixed = _commit_to_devices(cast_params(fixed, decoder.dtype))
        nnx.update(decoder, self._fixed)  # frees the copy in the wider dtype
        self._reference = _commit_to_devices(
            jax.tree.map(lambda x: x.copy(), cast_params(params, decoder.dtype))
        )
        optimizer = make_optimizer(config.optim)
        self._schedule = make_schedule(config.optim)
        opt_state = init_optimizer(optimizer, params, mesh)
        average = jax.tree.map(lambda x: x.copy(), params) if config.average_last else None
        self._critic = None
        critic_state: list[
            CriticState
        ] = []  # empty without a critic, so that the checkpoint has no entry for it
        if config.critic is not None and value_model is not None:
            self._critic, *critic_state = make_critic(value_model, config.critic, config.objective, mesh)
        self.state = _commit_to_devices((params, opt_state, average, *critic_state))
        self._updater = Updater(graph, optimizer, config.objective, mesh)

    @property
    def state(self) -> tuple[PyTree, ...]:
        """Parameters, optimiser state, average of the parameters (None without averaging), and the critic's state if there is
        a critic. `learn` donates these buffers."""
        return self._params, self._opt_state, self._average, *self._critic_state

    @state.setter
    def state(self, state: tuple[PyTree, ...]) -> None:
        self._params, self._opt_state, self._average, *self._critic_state = state

    @property
    def policy_params(self) -> PyTree:
        """All parameters of the current policy, which samples episodes."""
        return nnx.merge_state(self._params, self._fixed)

    @property
    def learned_params(self) -> PyTree:
        """All parameters of the policy to evaluate and to save: the average if there is one, else the current policy."""
        return nnx.merge_state(self._params if self._average is None else self._average, self._fixed)

    @property
    def reference_params(self) -> PyTree:
        """All parameters of the reference, which is the initial policy."""
        return nnx.merge_state(self._reference, self._fixed)

    def learn(
        self, step: int, trajectories: Sequence[Trajectory], advantages: Float[np.ndarray, "N"]
    ) -> LearnResult:
        """Update the policy, and the critic if there is one, from the trajectories of a step.

        The policy is not updated in the first `config.critic_warmup` steps. The metric advantage_std is the standard deviation
        over trajectories, or over policy tokens if a critic gives the advantages.

        Args:
            step: number of the step, from 0.
            trajectories: N trajectories.
            advantages: [N] the recipe's advantages; a critic replaces them.
        """
        skipped, metrics = self._skipped, dict[str, float]()
        token_advantages: Advantages
        reference_logprobs = self._updater.reference_logprobs(self._reference, self._fixed, trajectories)
        if self._critic is None:
            advantage_std = float(advantages.std())
            token_advantages = self._updater.token_advantages(trajectories, advantages, reference_logprobs)
        else:
            penalties = None if reference_logprobs is None else reference_logprobs.kl_penalties
            estimate = self._critic.estimate(self._critic_state[0], trajectories, penalties)
            token_advantages, advantage_std = estimate.advantages, estimate.advantage_std
            self._critic_state[0], critic_metrics = self._critic.update(
                self._critic_state[0], trajectories, estimate
            )
            metrics |= {f"critic/{name}": value for name, value in critic_metrics.items()}
        if step >= self.config.critic_warmup:
            self._params, self._opt_state, policy_metrics = self._updater(
                self._params,
                self._opt_state,
                self._reference,
                self._fixed,
                trajectories,
                token_advantages,
                reference_logprobs,
            )
            metrics |= {f"train/{name}": value for name, value in policy_metrics.items()}
        metrics["train/advantage_std"] = advantage_std  # before whitening, after which it is 1
        return LearnResult(metrics, token_advantages, self._skipped == skipped)

    def update_average(self, steps: int) -> None:
        """Add the parameters after `steps` updates to their average. Does nothing without averaging."""
        if self._average is not None:
            count = max(1, steps - self.config.average_start)
            self._average = running_mean(self._average, self._params, count)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update that was not skipped; 0 before the first."""
        taken = taken_updates(self._opt_state)
        return float(self._schedule(taken - 1)) if taken else 0.0

    @property
    def _skipped(self) -> list[float]:
        """Updates skipped since the start of the run, of the policy and of the critic."""
        return [
            float(skipped_updates(state)) for state in (self._opt_state, *(v[1] for v in self._critic_state))
        ]
