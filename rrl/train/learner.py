"""What a run of reinforcement learning has learned so far, and one step of learning from trajectories."""

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
    """Where in the state of a checkpoint the parameters are that the run has to show, by its config.json."""
    return "[2]" if settings["average_last"] else "[0]"


@dataclasses.dataclass(frozen=True)
class LearnResult:
    """What came of learning from the trajectories of a step."""

    metrics: dict[str, float]
    """critic/... and train/..., of those that learned."""
    advantages: Advantages
    """What the tokens were learned from, or will be when the policy no longer waits for its critic."""
    finite: bool
    """False where a gradient was not finite and its update was left out."""


def _commit_to_devices(tree: PyTree) -> PyTree:
    """Bound to its devices, as what comes of an update and what a checkpoint gives back are: a program is compiled anew for
    arrays that are not."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


class Learner:
    """The policy, its optimiser, the mean of its parameters and its critic, as far as a run has them; and its start, which is
    the frozen reference. `state` is what changes, and all that a checkpoint has to hold."""

    def __init__(
        self,
        config: RLConfig,
        decoder: Decoder,
        mesh: Mesh | None = None,
        value_model: ValueModel | None = None,
    ) -> None:
        """Starts from `decoder`, whose frozen parameters are narrowed to its dtype in place, and where there is a critic from
        `value_model`. Raises UserError for one of config.critic and `value_model` without the other."""
        if (config.critic is None) != (value_model is None):
            raise UserError("train.critic and a value model go together; give both or neither")
        self.config = config
        graph, params, fixed = split_trained(decoder, config.optim.frozen)
        self._fixed = _commit_to_devices(cast_params(fixed, decoder.dtype))
        nnx.update(decoder, self._fixed)  # lets go of the wider copy
        self._reference = _commit_to_devices(
            jax.tree.map(lambda x: x.copy(), cast_params(params, decoder.dtype))
        )
        optimizer = make_optimizer(config.optim)
        self._rate = make_schedule(config.optim)
        opt_state = init_optimizer(optimizer, params, mesh)
        average = jax.tree.map(lambda x: x.copy(), params) if config.average_last else None
        self._critic = None
        values: list[
            CriticState
        ] = []  # the critic's, where there is one: a checkpoint without holds nothing of it
        if config.critic is not None and value_model is not None:
            self._critic, *values = make_critic(value_model, config.critic, config.objective, mesh)
        self.state = _commit_to_devices((params, opt_state, average, *values))
        self._updater = Updater(graph, optimizer, config.objective, mesh)

    @property
    def state(self) -> tuple[PyTree, ...]:
        """Parameters, state of the optimiser, mean of the parameters (None where none is taken), and where there is a critic
        its parameters and state of their optimiser. Learning donates these buffers."""
        return self._params, self._opt_state, self._average, *self._values

    @state.setter
    def state(self, state: tuple[PyTree, ...]) -> None:
        self._params, self._opt_state, self._average, *self._values = state

    @property
    def policy_params(self) -> PyTree:
        """All parameters of what acts."""
        return nnx.merge_state(self._params, self._fixed)

    @property
    def learned_params(self) -> PyTree:
        """All parameters of what the run has to show so far."""
        return nnx.merge_state(self._params if self._average is None else self._average, self._fixed)

    @property
    def reference_params(self) -> PyTree:
        """All parameters of the reference."""
        return nnx.merge_state(self._reference, self._fixed)

    def learn(
        self, step: int, trajectories: Sequence[Trajectory], advantages: Float[np.ndarray, "N"]
    ) -> LearnResult:
        """Learns from the trajectories of a step (counted from 0), given the recipe's advantages, which a critic replaces; the
        policy waits for the first `config.critic_warmup` steps. The metric advantage_std is over trajectories, with a critic over
        policy tokens."""
        skipped, metrics = self._skipped, dict[str, float]()
        credit: Advantages
        before = self._updater.reference_logprobs(self._reference, self._fixed, trajectories)
        if self._critic is None:
            spread = float(advantages.std())
            credit = self._updater.token_advantages(trajectories, advantages, before)
        else:
            penalties = None if before is None else before.kl_penalties
            estimate = self._critic.estimate(self._values[0], trajectories, penalties)
            credit, spread = estimate.advantages, estimate.advantage_std
            self._values[0], found = self._critic.update(self._values[0], trajectories, estimate)
            metrics |= {f"critic/{name}": value for name, value in found.items()}
        if step >= self.config.critic_warmup:
            self._params, self._opt_state, found = self._updater(
                self._params,
                self._opt_state,
                self._reference,
                self._fixed,
                trajectories,
                credit,
                before,
            )
            metrics |= {f"train/{name}": value for name, value in found.items()}
        metrics["train/advantage_std"] = spread  # as it was before whitening, after which it is 1
        return LearnResult(metrics, credit, self._skipped == skipped)

    def update_average(self, steps: int) -> None:
        """Takes the parameters as they are after so many steps into their mean, where one is taken."""
        if self._average is not None:
            count = max(1, steps - self.config.average_start)
            self._average = running_mean(self._average, self._params, count)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update that was taken; 0 before the first."""
        taken = taken_updates(self._opt_state)
        return float(self._rate(taken - 1)) if taken else 0.0

    @property
    def _skipped(self) -> list[float]:
        """Updates that were left out since the start, of the policy and of the critic."""
        return [float(skipped_updates(state)) for state in (self._opt_state, *(v[1] for v in self._values))]
