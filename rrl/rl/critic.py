"""PPO's critic: values of policy tokens, advantages by GAE, and the update of the value model. Read `Critic` first."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from rrl.data.trajectory import POLICY, Trajectory
from rrl.errors import UserError, at_least
from rrl.models.config import DecoderConfig
from rrl.models.heads import ValueModel
from rrl.parallel.mesh import data_shards, use_mesh
from rrl.rl.advantages import whiten
from rrl.rl.batch import Batch
from rrl.rl.gae import gae, values_before_tokens
from rrl.rl.minibatches import balanced_minibatches
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, init_optimizer, make_optimizer, split_trained
from rrl.rl.packing import pack_trajectories
from rrl.rl.per_token import PerTokenFunction
from rrl.rl.update import GradientAccumulator, Minibatch
from rrl.rl.values import MOMENTS, explained_variance, value_loss, value_moments

CriticState = tuple[PyTree, PyTree]
"""(trained parameters, optimiser state)."""


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's critic; the defaults are R-Search's (gamma = lambda = 1)."""

    optim: OptimConfig
    layers: int = 0
    """Number of the policy's first layers that the value model uses; 0: all."""
    discount: float = 1.0
    """gamma, the discount per policy token."""
    gae_lambda: float = 1.0
    """lambda of generalised advantage estimation."""
    across_contexts: bool = False
    """True: GAE runs over the whole trajectory, so that a step is credited with the rewards of later steps (R3-RAG, Eq. 8).
    False: GAE runs over each context separately (R3-RAG as released). Then a search gets no credit for the answer that it
    makes possible. If lucky guesses are often rewarded, the policy learns to search less."""
    clip: float | None = 0.5
    """Value clipping: a value that has moved by more than this towards its return gets no gradient
    (`rrl.rl.values.value_loss`); None: no clipping. In a config the default is "auto", which is this times the weight of the
    recipe's total (`rrl.setup.automatic`)."""
    epochs: int = 1
    """Passes over a rollout batch."""
    minibatches: int = 1
    """Optimiser steps per epoch. Each gets a part of the trajectories, with nearly equal numbers of tokens."""
    warmup_steps: int = 0
    """Number of first updates in which only the critic learns and the policy stays as it is."""

    def __post_init__(self) -> None:
        for field in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(f"critic.{field}={getattr(self, field)} must lie in 0..1")
        if self.clip is not None:
            at_least(0, self, "clip", where="critic.")
        at_least(1, self, "epochs", "minibatches", where="critic.")
        at_least(0, self, "layers", "warmup_steps", where="critic.")

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps per rollout batch."""
        return self.epochs * self.minibatches

    def decoder_config(self, policy: DecoderConfig) -> DecoderConfig:
        """The config of the value model's decoder, given the policy's. Raises UserError if `layers` exceeds the policy's."""
        if self.layers > policy.layers:
            raise UserError(
                f"critic.layers={self.layers} must be at most {policy.layers}, the policy's (0: all of them)"
            )
        return policy.first_layers(self.layers or policy.layers)


@dataclasses.dataclass(frozen=True)
class ValueEstimate:
    """The critic's estimates for finished trajectories: one array per trajectory, defined on policy tokens."""

    values: list[Float[np.ndarray, "T"]]
    """V of the state in which each token was chosen."""
    returns: list[Float[np.ndarray, "T"]]
    """Regression targets of V: advantage + value."""
    advantages: list[Float[np.ndarray, "T"]]
    advantage_std: float
    """Standard deviation of the advantages over the policy tokens of the batch, before whitening."""


class Critic:
    """PPO's critic for one value model. The caller holds its state; `make_critic` returns the initial one."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        frozen: PyTree,
        optimizer: optax.GradientTransformation,
        config: CriticConfig,
        objective: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """Builds the programs; nothing is compiled yet.

        Args:
          graph: the value model's, from `split_trained`.
          frozen: its parameters that are not trained, from `split_trained`.
          optimizer: of the trained parameters.
          config: the critic's.
          objective: sets how trajectories are packed and whether advantages are whitened.
          mesh: devices; None: the default device.
        """
        self.config, self.objective, self.mesh, self.frozen = config, objective, mesh, frozen

        def values(params: PyTree, frozen: PyTree, batch: Batch) -> jax.Array:
            values_after = nnx.merge(graph, params, frozen).values(
                batch.tokens,
                positions=batch.positions,
                segment_ids=batch.segment_ids,
                branches=batch.branches,
            )
            return values_before_tokens(values_after)

        def named_values(params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, jax.Array]:
            return {"value": values(params, frozen, batch)}

        def loss(params: PyTree, frozen: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            old, returns = batch.extras["value"], batch.extras["return"]
            losses, clipped = value_loss(values(params, frozen, batch), old, returns, clip=config.clip)
            mask = batch.loss_mask.astype(jnp.float32)
            sums = value_moments(old, returns, mask) | {"clip_fraction": jnp.sum(mask * clipped)}
            return jnp.sum(mask * losses), sums

        self._token_values = PerTokenFunction(named_values, objective, mesh)
        self.accumulator = GradientAccumulator(
            loss, optimizer, (*MOMENTS, "clip_fraction"), mesh, objective.parallel_microbatches
        )

    def estimate(
        self,
        state: CriticState,
        trajectories: Sequence[Trajectory],
        penalties: Sequence[Float[np.ndarray, "T"]] | None = None,
    ) -> ValueEstimate:
        """Computes values, returns and advantages.

        Advantages are whitened over the policy tokens of the batch if `ObjectiveConfig.whiten` is set.

        Args:
          state: the critic's.
          trajectories: finished and scored.
          penalties: per-token KL penalties, subtracted from `Trajectory.token_rewards`; None: no penalty.
        """
        rewards = [t.token_rewards for t in trajectories]
        if penalties is not None:
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        values = self._token_values(state[0], self.frozen, trajectories)["value"]
        advantages, returns = self._gae(values, rewards, trajectories)
        masks = [t.roles == POLICY for t in trajectories]
        values = [np.where(mask, value, 0.0) for mask, value in zip(masks, values, strict=True)]
        advantage_std = float(
            np.concatenate([a[mask] for a, mask in zip(advantages, masks, strict=True)]).std()
        )
        if self.objective.whiten:
            advantages = whiten(advantages, masks)
        return ValueEstimate(values, returns, advantages, advantage_std)

    def _gae(
        self,
        values: Sequence[Float[np.ndarray, "T"]],
        rewards: Sequence[Float[np.ndarray, "T"]],
        trajectories: Sequence[Trajectory],
    ) -> tuple[list[Float[np.ndarray, "T"]], list[Float[np.ndarray, "T"]]]:
        """Advantages and returns of each trajectory. A segment of GAE is a context, or with `across_contexts` a trajectory."""
        sizes = [len(t.tokens) for t in trajectories]
        width = self.objective.row_lengths[-1]
        width *= -(-max(sizes) // width)  # multiples of the longest row, so that few programs are compiled

        def padded(parts: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(part, (0, width - len(part))) for part in parts])

        def segment_ids(trajectory: Trajectory) -> Int[np.ndarray, "T"]:
            columns = np.arange(len(trajectory.tokens))
            if self.config.across_contexts:
                return np.ones_like(columns)
            return np.searchsorted(trajectory.starts, columns, side="right")

        estimates = gae(
            padded(rewards),
            padded(values),
            padded([t.roles == POLICY for t in trajectories]),
            padded([segment_ids(t) for t in trajectories]),
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        advantages, returns = (
            [row[:size] for row, size in zip(np.asarray(part), sizes, strict=True)] for part in estimates
        )
        return advantages, returns

    def update(
        self, state: CriticState, trajectories: Sequence[Trajectory], estimate: ValueEstimate
    ) -> tuple[CriticState, dict[str, float]]:
        """Trains the value model to predict the returns; donates the buffers of `state`.

        Returns:
          The new state, and metrics: loss (mean over policy tokens), clip_fraction, grad_norm and skipped; and
          explained_variance, value and return, which are measured with the values before this update.
        """
        minibatches = self._pack_minibatches(trajectories, estimate)
        steps: list[dict[str, float]] = []
        params, opt_state = state
        with use_mesh(self.mesh):
            for batches, divisor in minibatches * self.config.epochs:
                params, opt_state, sums = self.accumulator.step(
                    params, opt_state, self.frozen, batches, divisor
                )
                steps.append(sums | {"clip_fraction": sums["clip_fraction"] / divisor})
        first_epoch = {name: sum(sums[name] for sums in steps[: len(minibatches)]) for name in MOMENTS}
        tokens = max(first_epoch["count"], 1.0)
        metrics: dict[str, Any] = {
            name: float(np.mean([sums[name] for sums in steps]))
            for name in ("loss", "clip_fraction", "grad_norm")
        }
        return (params, opt_state), metrics | {
            "skipped": steps[-1]["skipped"],
            "explained_variance": explained_variance(first_epoch),
            "return": first_epoch["return"] / tokens,
            # The mean value: `value_moments` defines error = return - value.
            "value": (first_epoch["return"] - first_epoch["error"]) / tokens,
        }

    def _pack_minibatches(
        self, trajectories: Sequence[Trajectory], estimate: ValueEstimate
    ) -> list[Minibatch]:
        """The minibatches of one epoch; the loss of each is divided by its number of policy tokens."""
        minibatches = []
        for members in balanced_minibatches(trajectories, self.objective, self.config.minibatches):
            chosen = [trajectories[i] for i in members]
            extras = {
                "value": [estimate.values[i] for i in members],
                "return": [estimate.returns[i] for i in members],
            }
            packed = pack_trajectories(chosen, self.objective, data_shards(self.mesh), extras)
            minibatches.append((packed.batches, max(sum(t.policy_tokens for t in chosen), 1)))
        return minibatches


def make_critic(
    model: ValueModel, config: CriticConfig, objective: ObjectiveConfig, mesh: Mesh | None = None
) -> tuple[Critic, CriticState]:
    """Returns a critic and its initial state.

    The state uses the buffers of `model`. The first update donates them, so `model` must not be used after it.
    """
    graph, params, frozen = split_trained(model, config.optim.frozen)
    optimizer = make_optimizer(config.optim)
    state = params, init_optimizer(optimizer, params, mesh)
    return Critic(graph, frozen, optimizer, config, objective, mesh), state
