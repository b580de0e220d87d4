"""The critic of PPO: values of every policy token, advantages from them by GAE, and its own update."""

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
from rrl.rl.accumulate import GradientAccumulator
from rrl.rl.advantages import whiten
from rrl.rl.batch import Batch
from rrl.rl.batching import PerTokenFunction, pack_trajectories, packed_token_counts
from rrl.rl.gae import before_token, gae
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, init_optimizer, make_optimizer, split_trained
from rrl.rl.packing import even_shares
from rrl.rl.values import MOMENTS, explained_variance, value_loss, value_moments

CriticState = tuple[PyTree, PyTree]
"""Trained parameters and the state of their optimiser."""


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's critic; defaults are R-Search's (gamma = lambda = 1)."""

    optim: OptimConfig
    layers: int = 0
    """The body: so many of the policy's layers, from the first; 0: all."""
    discount: float = 1.0
    """gamma."""
    gae_lambda: float = 1.0
    """lambda."""
    across_contexts: bool = False
    """Whether a context's last token is followed by the next context's first, so that a step answers for those after it (R3-RAG,
    Eq. 8 over steps). False: each context is an episode of its own (R3-RAG as released), and where answering at once is often
    right by luck the policy learns to search less."""
    clip: float | None = 0.5
    """How far a value may usefully move in one batch; None: any distance."""
    epochs: int = 1
    minibatches: int = 1
    """Optimiser steps an epoch, each on its share of the trajectories, about as many tokens each."""
    warmup_steps: int = 0
    """Updates, counted from the start, in which the critic learns and the policy waits."""

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
        """Optimiser steps a rollout batch."""
        return self.epochs * self.minibatches

    def body(self, policy: DecoderConfig) -> DecoderConfig:
        """The critic's shape, given the policy's; UserError for more layers than that has."""
        if self.layers > policy.layers:
            raise UserError(
                f"critic.layers={self.layers} must be at most {policy.layers}, the policy's (0: all of them)"
            )
        return dataclasses.replace(policy, layers=self.layers or policy.layers)


@dataclasses.dataclass(frozen=True)
class ValueEstimate:
    """What the critic says of finished trajectories: one array of its token length each, read on policy tokens."""

    values: list[Float[np.ndarray, "T"]]
    """V of the state in which the token was chosen."""
    returns: list[Float[np.ndarray, "T"]]
    """What V should have been: advantage + value."""
    advantages: list[Float[np.ndarray, "T"]]
    advantage_std: float
    """Their standard deviation over the policy tokens of the batch, before they were whitened."""


class Critic:
    """A critic for one value model; its state is the caller's (`make_critic` gives the first). `accumulator` holds the jitted
    programs of its update."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        fixed: PyTree,
        optimizer: optax.GradientTransformation,
        config: CriticConfig,
        objective: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """`objective` says how trajectories are packed, and whether advantages are whitened."""
        self.config, self.objective, self.mesh, self.fixed = config, objective, mesh, fixed

        def values(params: PyTree, fixed: PyTree, batch: Batch) -> jax.Array:
            found = nnx.merge(graph, params, fixed).values(
                batch.tokens,
                positions=batch.positions,
                segment_ids=batch.segment_ids,
                branches=batch.branches,
            )
            return before_token(found)

        def estimate(params: PyTree, fixed: PyTree, batch: Batch) -> dict[str, jax.Array]:
            return {"value": values(params, fixed, batch)}

        def loss(params: PyTree, fixed: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            old, returns = batch.extras["value"], batch.extras["return"]
            found, clipped = value_loss(values(params, fixed, batch), old, returns, clip=config.clip)
            mask = batch.loss_mask.astype(jnp.float32)
            sums = value_moments(old, returns, mask) | {"clip_fraction": jnp.sum(mask * clipped)}
            return jnp.sum(mask * found), sums

        self._estimate = PerTokenFunction(estimate, objective, mesh)
        self.accumulator = GradientAccumulator(
            loss, optimizer, (*MOMENTS, "clip_fraction"), mesh, objective.parallel_microbatches
        )

    def estimate(
        self,
        state: CriticState,
        trajectories: Sequence[Trajectory],
        penalties: Sequence[Float[np.ndarray, "T"]] | None = None,
    ) -> ValueEstimate:
        """Values, returns and advantages (whitened over the policy tokens of the batch where the objective says so).

        A token's reward is what is paid there (`Trajectory.token_rewards`), less its entry in `penalties` (the KL).
        """
        rewards = [t.token_rewards for t in trajectories]
        if penalties is not None:
            rewards = [paid - penalty for paid, penalty in zip(rewards, penalties, strict=True)]
        values = self._estimate(state[0], self.fixed, trajectories)["value"]
        advantages, returns = self._gae(values, rewards, trajectories)
        own = [t.roles == POLICY for t in trajectories]
        values = [np.where(mask, value, 0.0) for mask, value in zip(own, values, strict=True)]
        spread = float(np.concatenate([a[mask] for a, mask in zip(advantages, own, strict=True)]).std())
        if self.objective.whiten:
            advantages = whiten(advantages, own)
        return ValueEstimate(values, returns, advantages, spread)

    def _gae(
        self,
        values: Sequence[Float[np.ndarray, "T"]],
        rewards: Sequence[Float[np.ndarray, "T"]],
        trajectories: Sequence[Trajectory],
    ) -> tuple[list[Float[np.ndarray, "T"]], list[Float[np.ndarray, "T"]]]:
        """Advantages and returns over the policy tokens of each context, or of all contexts of a trajectory."""
        sizes = [len(t.tokens) for t in trajectories]
        width = self.objective.row_lengths[-1]
        width *= -(-max(sizes) // width)  # few widths, so that few programs are compiled

        def rows(parts: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack([np.pad(part, (0, width - len(part))) for part in parts])

        def episodes(trajectory: Trajectory) -> Int[np.ndarray, "T"]:
            at = np.arange(len(trajectory.tokens))
            if self.config.across_contexts:
                return np.ones_like(at)
            return np.searchsorted(trajectory.starts, at, side="right")

        found = gae(
            rows(rewards),
            rows(values),
            rows([t.roles == POLICY for t in trajectories]),
            rows([episodes(t) for t in trajectories]),
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        advantages, returns = (
            [row[:size] for row, size in zip(np.asarray(part), sizes, strict=True)] for part in found
        )
        return advantages, returns

    def update(
        self, state: CriticState, trajectories: Sequence[Trajectory], estimate: ValueEstimate
    ) -> tuple[CriticState, dict[str, float]]:
        """Moves the values towards the returns; donates the buffers of `state`.

        Returns the new state, and: loss (mean over policy tokens), clip_fraction, grad_norm, skipped, and
        explained_variance, value and return as they were before this update.
        """
        config = self.config
        packed: list[tuple[list[Batch], int]] = []
        for share in self._shares(trajectories):
            chosen = [trajectories[i] for i in share]
            extras = {
                "value": [estimate.values[i] for i in share],
                "return": [estimate.returns[i] for i in share],
            }
            rows = pack_trajectories(chosen, self.objective, data_shards(self.mesh), extras)
            packed.append((rows.buckets.batches, max(sum(t.policy_tokens for t in chosen), 1)))
        found: list[dict[str, float]] = []
        params, opt_state = state
        with use_mesh(self.mesh):
            for batches, total in packed * config.epochs:
                params, opt_state, sums = self.accumulator.step(params, opt_state, self.fixed, batches, total)
                found.append(sums | {"clip_fraction": sums["clip_fraction"] / total})
        once = {name: sum(sums[name] for sums in found[: len(packed)]) for name in MOMENTS}
        tokens = max(once["count"], 1.0)
        metrics: dict[str, Any] = {
            name: float(np.mean([sums[name] for sums in found]))
            for name in ("loss", "clip_fraction", "grad_norm")
        }
        return (params, opt_state), metrics | {
            "skipped": found[-1]["skipped"],
            "explained_variance": explained_variance(once),
            "return": once["return"] / tokens,
            "value": (once["return"] - once["error"]) / tokens,
        }

    def _shares(self, trajectories: Sequence[Trajectory]) -> list[Int[np.ndarray, "n"]]:
        """Trajectories of each of the batch's steps, about as many tokens of the rows for each; those that may lie in one tree
        are kept together."""
        sizes = packed_token_counts(trajectories, self.objective)
        if not self.objective.share_prefixes:
            return even_shares(sizes, self.config.minibatches)
        _, groups = np.unique([t.group for t in trajectories], return_inverse=True)
        sums = np.bincount(groups, weights=sizes).astype(np.int64)
        return [np.flatnonzero(np.isin(groups, some)) for some in even_shares(sums, self.config.minibatches)]


def make_critic(
    model: ValueModel, config: CriticConfig, objective: ObjectiveConfig, mesh: Mesh | None = None
) -> tuple[Critic, CriticState]:
    """A critic and its first state, whose buffers are the model's (updates donate them)."""
    graph, params, fixed = split_trained(model, config.optim.frozen)
    optimizer = make_optimizer(config.optim)
    state = params, init_optimizer(optimizer, params, mesh)
    return Critic(graph, fixed, optimizer, config, objective, mesh), state
