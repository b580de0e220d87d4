"""One policy update: trajectories into length-bucketed packed rows, gradients summed over them, optimiser steps."""

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
"""One number a trajectory, or one a token (read on policy tokens only)."""


class ReferenceLogprobs(NamedTuple):
    """What the reference says of each trajectory, 0 where a token is not the policy's."""

    logps: list[Float[np.ndarray, "T"]]
    kl_penalties: list[Float[np.ndarray, "T"]]
    """kl_coef times the estimate between the sampler and the reference."""


def microbatches(
    trajectories: Sequence[Trajectory],
    advantages: Advantages,
    config: ObjectiveConfig,
    shards: int = 1,
    old_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
    reference_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
) -> tuple[list[Batch], float]:
    """Packs trajectories into rows of few lengths; returns the batches and what the summed loss is divided by.

    `old_logps` are those that the ratio starts from; None: the sampler's. `reference_logps` are the reference's, where
    `config.extras` has them.
    """
    counts = np.array([t.policy_tokens for t in trajectories], np.int64)
    weights, total = sequence_weights(
        counts, config.aggregation, np.array([t.group for t in trajectories]), config.constant_tokens
    )

    def along(values: Sequence[Any] | np.ndarray) -> list[np.ndarray]:
        return [
            np.broadcast_to(np.asarray(value, np.float32), len(t.tokens))
            for value, t in zip(values, trajectories, strict=True)
        ]

    extras: dict[str, Sequence[np.ndarray]] = {
        "old_logp": [t.logps for t in trajectories] if old_logps is None else old_logps,
        "advantage": along(advantages),
        "weight": along(weights),
    }
    if "sampled_logp" in config.extras:
        extras["sampled_logp"] = [t.sampled_logps for t in trajectories]
    if reference_logps is not None:
        extras["reference_logp"] = reference_logps
    return pack_trajectories(trajectories, config, shards, extras).buckets.batches, total


class Updater:
    """The policy's update for one model graph, as `split_trained` gives it: `accumulator` holds its jitted programs."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        config: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.shards = data_shards(mesh)

        def loss(
            params: PyTree, frozen: tuple[PyTree, PyTree], batch: Batch
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            reference, fixed = frozen
            scores = token_logprobs(nnx.merge(graph, params, fixed), batch, entropy=True)
            if config.kl_in_reward:
                before = batch.extras["reference_logp"]
            else:
                before = token_logprobs(nnx.merge(graph, reference, fixed), batch).logp
            return policy_loss(scores, jax.lax.stop_gradient(before), batch, config)

        self.accumulator = GradientAccumulator(
            loss, optimizer, config.sums, mesh, config.parallel_microbatches
        )

        def logps(params: PyTree, fixed: PyTree, batch: Batch) -> dict[str, jax.Array]:
            return {"logp": token_logprobs(nnx.merge(graph, params, fixed), batch).logp}

        def kl(reference: PyTree, fixed: PyTree, batch: Batch) -> dict[str, jax.Array]:
            before = logps(reference, fixed, batch)["logp"]
            found = kl_estimate(batch.extras["old_logp"], before, config.kl_estimator)
            return {"logp": before, "kl": jnp.where(batch.loss_mask, config.kl_coef * found, 0.0)}

        self.logps = PerTokenFunction(logps, config, mesh)
        self.penalty = PerTokenFunction(kl, config, mesh)

    def reference_logprobs(
        self, reference: PyTree, fixed: PyTree, trajectories: Sequence[Trajectory]
    ) -> ReferenceLogprobs | None:
        """What the reward of each token pays for the KL, and the reference's log-probabilities, which the update takes from
        here; None where the reward pays nothing (then the update asks the reference itself)."""
        if not self.config.kl_in_reward:
            return None
        found = self.penalty(reference, fixed, trajectories, {"old_logp": [t.logps for t in trajectories]})
        return ReferenceLogprobs(found["logp"], found["kl"])

    def token_advantages(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Float[np.ndarray, "N"],
        before: ReferenceLogprobs | None = None,
    ) -> Advantages:
        """What each token is learned from, given the recipe's advantages: less the KL still to come where the reward pays for
        it (`before`), whitened where the objective asks for that; else they stay as they are."""
        if before is None and not self.config.whiten:
            return advantages
        penalties = (
            [np.zeros(len(t.tokens), np.float32) for t in trajectories]
            if before is None
            else before.kl_penalties
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
        before: ReferenceLogprobs | None = None,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Updates on all trajectories, in `config.epochs` passes; the buffers of `params` and `opt_state` are donated.

        `params` and `reference` are trained parameters now and at the start, `fixed` the others, which both models share
        (`rrl.rl.optim.split_trained`). `before` is what the method of that name gives; None: it is asked here.

        Returns new parameters, optimiser state, and means over policy tokens, and over the steps with a finite gradient where
        there is one: kl (from the reference), step_kl (k3 of where the ratio starts from here), entropy, ratio,
        clip_fraction, importance (where it is weighed). And logp_gap, |trainer's log-prob - sampler's| before anything has
        moved: over the first minibatch, or over all where importance is weighed.
        """
        config = self.config
        old = [t.logps for t in trajectories]
        gap: dict[str, float] = {}
        if config.importance_cap is not None:
            old = self.logps(params, fixed, trajectories)["logp"]
            gaps = [np.abs(o - t.logps)[t.roles == POLICY] for o, t in zip(old, trajectories, strict=True)]
            gap = {"logp_gap": float(np.concatenate(gaps).mean())}
        if before is None:
            before = self.reference_logprobs(reference, fixed, trajectories)
        with use_mesh(self.mesh):
            groups = np.array([t.group for t in trajectories])
            names = np.unique(groups)
            packed = []
            for share in np.array_split(names, min(config.minibatches, len(names))):
                inside = np.flatnonzero(np.isin(groups, share)).tolist()
                packed.append(
                    microbatches(
                        [trajectories[i] for i in inside],
                        [advantages[i] for i in inside],
                        config,
                        self.shards,
                        [old[i] for i in inside],
                        None if before is None else [before.logps[i] for i in inside],
                    )
                )
            steps: list[dict[str, float]] = []
            for batches, total in packed * config.epochs:
                params, opt_state, found = self.accumulator.step(
                    params, opt_state, (reference, fixed), batches, total
                )
                tokens, whole = max(found.pop("tokens"), 1.0), ("loss", "grad_norm", "skipped")
                steps.append({n: v if n in whole else v / tokens for n, v in found.items()})
        finite = [step for step in steps if math.isfinite(step["grad_norm"])] or steps
        metrics = {name: float(np.mean([step[name] for step in finite])) for name in steps[0]}
        metrics |= {"logp_gap": steps[0]["logp_gap"], "skipped": steps[-1]["skipped"], **gap}
        return params, opt_state, metrics
