"""The policy update: packs trajectories into microbatches, sums gradients over them, and takes optimiser steps.

Read `Updater.__call__` first.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from rrl.data.trajectory import POLICY, Trajectory
from rrl.parallel.mesh import data_shards, use_mesh
from rrl.rl.accumulate import GradientAccumulator
from rrl.rl.advantages import subtract_penalty_to_go, whiten
from rrl.rl.batch import Batch
from rrl.rl.batching import PerTokenFunction, pack_trajectories
from rrl.rl.logprobs import token_logprobs
from rrl.rl.losses import kl_estimate, sequence_weights
from rrl.rl.objective import ObjectiveConfig, policy_loss

Advantages = Float[np.ndarray, "N"] | Sequence[Float[np.ndarray, "T"]]
"""One number per trajectory, or one per token (used on policy tokens only)."""


class ReferenceLogprobs(NamedTuple):
    """Log-probabilities under the reference policy, and KL penalties from them.

    Each has one array per trajectory, which is 0 on tokens that the policy did not write.
    """

    logps: list[Float[np.ndarray, "T"]]
    kl_penalties: list[Float[np.ndarray, "T"]]
    """Per-token penalties: kl_coef times the estimated KL(sampler || reference)."""


def microbatches(
    trajectories: Sequence[Trajectory],
    advantages: Advantages,
    config: ObjectiveConfig,
    shards: int = 1,
    old_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
    reference_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
) -> tuple[list[Batch], float]:
    """Packs the trajectories of one optimiser step into microbatches.

    Args:
      trajectories: to learn from.
      advantages: one per trajectory or one per token.
      config: the objective.
      shards: number of devices over which the rows of a microbatch are split.
      old_logps: log-probabilities that the ratio is taken against; None: `Trajectory.logps`, the
        sampler's at temperature 1 without truncation. The importance weights use `Trajectory.sampled_logps` instead, which
        belong to the distribution that tokens were sampled from.
      reference_logps: the reference's log-probabilities; needed if `config.extras` contains "reference_logp".

    Returns:
      The microbatches, and the number that the summed loss is divided by.
    """
    counts = np.array([t.policy_tokens for t in trajectories], np.int64)
    weights, divisor = sequence_weights(
        counts, config.aggregation, np.array([t.group for t in trajectories]), config.constant_tokens
    )

    def per_token(values: Sequence[Any] | np.ndarray) -> list[np.ndarray]:
        return [
            np.broadcast_to(np.asarray(value, np.float32), len(t.tokens))
            for value, t in zip(values, trajectories, strict=True)
        ]

    extras: dict[str, Sequence[np.ndarray]] = {
        "old_logp": [t.logps for t in trajectories] if old_logps is None else old_logps,
        "advantage": per_token(advantages),
        "weight": per_token(weights),
    }
    if "sampled_logp" in config.extras:
        extras["sampled_logp"] = [t.sampled_logps for t in trajectories]
    if reference_logps is not None:
        extras["reference_logp"] = reference_logps
    return pack_trajectories(trajectories, config, shards, extras).buckets.batches, divisor


class Updater:
    """The policy's update for one model graph (from `rrl.rl.optim.split_trained`); it holds the jitted programs."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        config: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """Builds the programs; nothing is compiled yet. `mesh` None: the default device."""
        self.config = config
        self.mesh = mesh
        self.shards = data_shards(mesh)

        def loss(
            params: PyTree, frozen: tuple[PyTree, PyTree], batch: Batch
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            reference, fixed = frozen
            scores = token_logprobs(nnx.merge(graph, params, fixed), batch, entropy=True)
            if config.kl_in_reward:
                reference_logp = batch.extras["reference_logp"]
            else:
                reference_logp = token_logprobs(nnx.merge(graph, reference, fixed), batch).logp
            return policy_loss(scores, jax.lax.stop_gradient(reference_logp), batch, config)

        self.accumulator = GradientAccumulator(
            loss, optimizer, config.sums, mesh, config.parallel_microbatches
        )

        def logps(params: PyTree, fixed: PyTree, batch: Batch) -> dict[str, jax.Array]:
            return {"logp": token_logprobs(nnx.merge(graph, params, fixed), batch).logp}

        def reference_values(reference: PyTree, fixed: PyTree, batch: Batch) -> dict[str, jax.Array]:
            logp = logps(reference, fixed, batch)["logp"]
            estimate = kl_estimate(batch.extras["old_logp"], logp, config.kl_estimator)
            return {"logp": logp, "kl": jnp.where(batch.loss_mask, config.kl_coef * estimate, 0.0)}

        self.logps = PerTokenFunction(logps, config, mesh)
        self.reference_values = PerTokenFunction(reference_values, config, mesh)

    def reference_logprobs(
        self, reference: PyTree, fixed: PyTree, trajectories: Sequence[Trajectory]
    ) -> ReferenceLogprobs | None:
        """The reference's log-probabilities and the KL penalties of each token; None unless the KL is in the reward.

        If it is None, the update computes the reference's log-probabilities itself.
        """
        if not self.config.kl_in_reward:
            return None
        old_logps = [t.logps for t in trajectories]
        values = self.reference_values(reference, fixed, trajectories, {"old_logp": old_logps})
        return ReferenceLogprobs(values["logp"], values["kl"])

    def token_advantages(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Float[np.ndarray, "N"],
        reference_logprobs: ReferenceLogprobs | None = None,
    ) -> Advantages:
        """Turns the recipe's advantages into those of the loss.

        If the KL is in the reward, subtracts the KL penalties from each token to the end. If `ObjectiveConfig.whiten` is
        set, whitens over the policy tokens of the batch. Otherwise returns the advantages unchanged.
        """
        if reference_logprobs is None and not self.config.whiten:
            return advantages
        penalties = (
            [np.zeros(len(t.tokens), np.float32) for t in trajectories]
            if reference_logprobs is None
            else reference_logprobs.kl_penalties
        )
        tokens = subtract_penalty_to_go(advantages, penalties)
        return whiten(tokens, [t.roles == POLICY for t in trajectories]) if self.config.whiten else tokens

    def __call__(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        reference: PyTree,
        fixed: PyTree,
        trajectories: Sequence[Trajectory],
        advantages: Advantages,
        reference_logprobs: ReferenceLogprobs | None = None,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Trains on all trajectories for `config.epochs` epochs; donates the buffers of `params` and `opt_state`.

        Args:
          params: trained parameters.
          opt_state: optimiser state.
          reference: values of the trained parameters at the start of the run; with `fixed` they are the reference policy.
          fixed: frozen parameters, which policy and reference share (`rrl.rl.optim.split_trained`).
          trajectories: scored trajectories to learn from.
          advantages: from `token_advantages` or the critic.
          reference_logprobs: from the method of that name; None: computed here if needed.

        Returns:
          New parameters, new optimiser state, and metrics. Except for the last two, a metric is the mean over the optimiser
          steps with a finite gradient; over all steps if no gradient is finite.
            loss, grad_norm: of each step.
            kl, entropy, ratio, clip_fraction: means over policy tokens; kl is that from the reference.
            approx_kl: mean over policy tokens of the k3 estimate of KL(old policy || current policy).
            importance: mean truncated importance weight; only with `config.importance_cap`.
            sampling_logp_diff: mean |trainer's log-probability - sampler's| over policy tokens, measured before the first step. With
              `config.importance_cap` over all trajectories, otherwise over those of the first minibatch.
            skipped: number of updates skipped since the start of the run.
        """
        config = self.config
        old = [t.logps for t in trajectories]
        gap: dict[str, float] = {}
        if config.importance_cap is not None:
            old = self.logps(params, fixed, trajectories)["logp"]
            gaps = [np.abs(o - t.logps)[t.roles == POLICY] for o, t in zip(old, trajectories, strict=True)]
            gap = {"sampling_logp_diff": float(np.concatenate(gaps).mean())}
        if reference_logprobs is None:
            reference_logprobs = self.reference_logprobs(reference, fixed, trajectories)
        with use_mesh(self.mesh):
            groups = np.array([t.group for t in trajectories])
            group_ids = np.unique(groups)
            packed = []
            for share in np.array_split(group_ids, min(config.minibatches, len(group_ids))):
                inside = np.flatnonzero(np.isin(groups, share)).tolist()
                packed.append(
                    microbatches(
                        [trajectories[i] for i in inside],
                        [advantages[i] for i in inside],
                        config,
                        self.shards,
                        [old[i] for i in inside],
                        None if reference_logprobs is None else [reference_logprobs.logps[i] for i in inside],
                    )
                )
            steps: list[dict[str, float]] = []
            for batches, divisor in packed * config.epochs:
                params, opt_state, sums = self.accumulator.step(
                    params, opt_state, (reference, fixed), batches, divisor
                )
                tokens, not_sums = max(sums.pop("tokens"), 1.0), ("loss", "grad_norm", "skipped")
                steps.append({n: v if n in not_sums else v / tokens for n, v in sums.items()})
        finite = [step for step in steps if math.isfinite(step["grad_norm"])] or steps
        metrics = {name: float(np.mean([step[name] for step in finite])) for name in steps[0]}
        metrics |= {
            "sampling_logp_diff": steps[0]["sampling_logp_diff"],
            "skipped": steps[-1]["skipped"],
            **gap,
        }
        return params, opt_state, metrics
