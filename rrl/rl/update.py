"""The policy update: trajectories become microbatches, and each optimiser step uses the gradient summed over several of them.

Read `Updater.__call__` first. The loss of a microbatch is `rrl.rl.losses.policy_loss`. `GradientAccumulator` also updates the
critic.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, PyTree

from rrl.data.trajectory import POLICY, Trajectory
from rrl.parallel.mesh import data_shards, put_rows, use_mesh
from rrl.parallel.rules import constrain_state
from rrl.parallel.threads import map_in_threads, parallel_microbatches_on
from rrl.rl.advantages import subtract_penalty_to_go, whiten
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.losses import kl_estimate, policy_loss, sequence_weights
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import skipped_updates
from rrl.rl.packing import pack_trajectories
from rrl.rl.per_token import PerTokenFunction

Advantages = Float[np.ndarray, "N"] | Sequence[Float[np.ndarray, "T"]]
"""One number per trajectory, or one per token (used on policy tokens only)."""
Minibatch = tuple[list[Batch], float]
"""The microbatches of one optimiser step, and the number that their summed loss is divided by."""
Loss = Callable[[PyTree, PyTree, Batch], tuple[jax.Array, dict[str, jax.Array]]]
"""(trained parameters, constants, microbatch) -> (loss summed over tokens, other sums by name).

The constants are a pytree of all other arrays that the loss uses, such as frozen parameters. They get no gradient.
"""


class ReferenceLogprobs(NamedTuple):
    """Log-probabilities under the reference policy, and KL penalties from them.

    Each has one array per trajectory, which is 0 on tokens that the policy did not write.
    """

    logps: list[Float[np.ndarray, "T"]]
    kl_penalties: list[Float[np.ndarray, "T"]]
    """Per-token penalties: kl_coef times the estimated KL(sampler || reference)."""


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
            params: PyTree, constants: tuple[PyTree, PyTree], batch: Batch
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            reference, frozen = constants
            scores = token_logprobs(nnx.merge(graph, params, frozen), batch, entropy=True)
            if config.kl_in_reward:
                reference_logp = batch.extras["reference_logp"]
            else:
                reference_logp = token_logprobs(nnx.merge(graph, reference, frozen), batch).logp
            return policy_loss(scores, jax.lax.stop_gradient(reference_logp), batch, config)

        self.accumulator = GradientAccumulator(
            loss, optimizer, config.sum_names, mesh, config.parallel_microbatches
        )

        def logps(params: PyTree, frozen: PyTree, batch: Batch) -> dict[str, jax.Array]:
            return {"logp": token_logprobs(nnx.merge(graph, params, frozen), batch).logp}

        def reference_logp_and_kl(reference: PyTree, frozen: PyTree, batch: Batch) -> dict[str, jax.Array]:
            logp = logps(reference, frozen, batch)["logp"]
            estimate = kl_estimate(batch.extras["old_logp"], logp, config.kl_estimator)
            return {"logp": logp, "kl": jnp.where(batch.loss_mask, config.kl_coef * estimate, 0.0)}

        self.logps = PerTokenFunction(logps, config, mesh)
        self.reference_logp_and_kl = PerTokenFunction(reference_logp_and_kl, config, mesh)

    def reference_logprobs(
        self, reference: PyTree, frozen: PyTree, trajectories: Sequence[Trajectory]
    ) -> ReferenceLogprobs | None:
        """The reference's log-probabilities and the KL penalties of each token; None unless the KL is in the reward.

        If it is None, the update computes the reference's log-probabilities itself.
        """
        if not self.config.kl_in_reward:
            return None
        old_logps = [t.logps for t in trajectories]
        outputs = self.reference_logp_and_kl(reference, frozen, trajectories, {"old_logp": old_logps})
        return ReferenceLogprobs(outputs["logp"], outputs["kl"])

    def token_advantages(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Float[np.ndarray, "N"],
        reference_logprobs: ReferenceLogprobs | None = None,
    ) -> Advantages:
        """Turns the recipe's advantages, one per trajectory, into those of the loss.

        If the KL is in the reward, subtracts from each token's advantage the KL penalties from this token to the end of the
        trajectory. If `ObjectiveConfig.whiten` is set, whitens over the policy tokens of the batch. If neither applies,
        returns the advantages unchanged.
        """
        if reference_logprobs is None and not self.config.whiten:
            return advantages
        penalties = (
            [np.zeros(len(t.tokens), np.float32) for t in trajectories]
            if reference_logprobs is None
            else reference_logprobs.kl_penalties
        )
        per_token = subtract_penalty_to_go(advantages, penalties)
        if not self.config.whiten:
            return per_token
        return whiten(per_token, [t.roles == POLICY for t in trajectories])

    def __call__(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        reference: PyTree,
        frozen: PyTree,
        trajectories: Sequence[Trajectory],
        advantages: Advantages,
        reference_logprobs: ReferenceLogprobs | None = None,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Trains on all trajectories for `config.epochs` epochs; donates the buffers of `params` and `opt_state`.

        Args:
          params: trained parameters.
          opt_state: optimiser state.
          reference: values of the trained parameters at the start of the run; with `frozen` they are the reference policy.
          frozen: frozen parameters, which policy and reference share (`rrl.rl.optim.split_trained`).
          trajectories: scored trajectories to learn from.
          advantages: from `token_advantages` or the critic.
          reference_logprobs: from the method of that name; None: computed here if needed.

        Returns:
          New parameters, new optimiser state, and metrics, which `_update_metrics` explains.
        """
        config = self.config
        old_logps = [t.logps for t in trajectories]
        sampling_diff: dict[str, float] = {}
        if config.importance_cap is not None:
            # The loss then compares the trainer with itself, so the sampler's difference is measured here.
            old_logps = self.logps(params, frozen, trajectories)["logp"]
            differences = [
                np.abs(old - t.logps)[t.roles == POLICY]
                for old, t in zip(old_logps, trajectories, strict=True)
            ]
            sampling_diff = {"sampling_logp_diff": float(np.concatenate(differences).mean())}
        if reference_logprobs is None:
            reference_logprobs = self.reference_logprobs(reference, frozen, trajectories)
        minibatches = self._pack_minibatches(trajectories, advantages, old_logps, reference_logprobs)
        steps: list[dict[str, float]] = []
        with use_mesh(self.mesh):
            for batches, divisor in minibatches * config.epochs:
                params, opt_state, sums = self.accumulator.step(
                    params, opt_state, (reference, frozen), batches, divisor
                )
                steps.append(sums)
        return params, opt_state, _update_metrics(steps) | sampling_diff

    def _pack_minibatches(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Advantages,
        old_logps: Sequence[Float[np.ndarray, "T"]],
        reference_logprobs: ReferenceLogprobs | None,
    ) -> list[Minibatch]:
        """The minibatches of one epoch: each has the trajectories of some of the groups."""
        groups = np.array([t.group for t in trajectories])
        group_ids = np.unique(groups)
        minibatches = []
        for ids in np.array_split(group_ids, min(self.config.minibatches, len(group_ids))):
            members = np.flatnonzero(np.isin(groups, ids)).tolist()
            minibatches.append(
                pack_minibatch(
                    [trajectories[i] for i in members],
                    [advantages[i] for i in members],
                    self.config,
                    self.shards,
                    [old_logps[i] for i in members],
                    None if reference_logprobs is None else [reference_logprobs.logps[i] for i in members],
                )
            )
        return minibatches


def pack_minibatch(
    trajectories: Sequence[Trajectory],
    advantages: Advantages,
    config: ObjectiveConfig,
    shards: int = 1,
    old_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
    reference_logps: Sequence[Float[np.ndarray, "T"]] | None = None,
) -> Minibatch:
    """Packs the trajectories of one optimiser step into microbatches, with the arrays that the loss needs.

    Args:
      trajectories: to learn from.
      advantages: one per trajectory or one per token.
      config: the objective.
      shards: number of devices over which the rows of a microbatch are split.
      old_logps: log-probabilities that the ratio is taken against; None: `Trajectory.logps`, the
        sampler's at temperature 1 over the full vocabulary. The importance weights use `Trajectory.sampled_logps` instead:
        those of the distribution that tokens were sampled from (with temperature, top-k and top-p).
      reference_logps: the reference's log-probabilities; needed if `config.extra_names` contains "reference_logp".
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
    if "sampled_logp" in config.extra_names:
        extras["sampled_logp"] = [t.sampled_logps for t in trajectories]
    if reference_logps is not None:
        extras["reference_logp"] = reference_logps
    return pack_trajectories(trajectories, config, shards, extras).batches, divisor


def _update_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of an update from the sums of its optimiser steps (`GradientAccumulator.step`).

    Except for the last two, a metric is the mean over the optimiser steps with a finite gradient; over all steps if no gradient
    is finite.
      loss, grad_norm: of each step.
      kl, entropy, ratio, clip_fraction: means over policy tokens; kl is that from the reference.
      approx_kl: mean over policy tokens of the k3 estimate of KL(old policy || current policy).
      importance: mean truncated importance weight; only with `ObjectiveConfig.importance_cap`.
      sampling_logp_diff: mean |trainer's log-probability - sampler's| over policy tokens, measured before the first step. With
        `ObjectiveConfig.importance_cap` over all trajectories (`Updater.__call__`), otherwise over those of the first minibatch.
      skipped: number of optimiser steps skipped since the start of the run.
    """
    not_summed = ("loss", "grad_norm", "skipped")
    means = [
        {
            name: value if name in not_summed else value / max(sums["tokens"], 1.0)
            for name, value in sums.items()
            if name != "tokens"
        }
        for sums in steps
    ]
    finite = [step for step in means if math.isfinite(step["grad_norm"])] or means
    metrics = {name: float(np.mean([step[name] for step in finite])) for name in means[0]}
    return metrics | {"sampling_logp_diff": means[0]["sampling_logp_diff"], "skipped": means[-1]["skipped"]}


class GradientAccumulator:
    """Three jitted programs for one optimiser step over several microbatches. Read `step` first.

    `accumulate` adds the gradient and the metrics of one microbatch to running sums. `add` adds the running sums of two
    threads. `apply` divides the gradient sum and takes the optimiser step.

    On a mesh of several devices, rows are split over the axes data and fsdp. Gradients and optimiser state are sharded
    like their parameters (`rrl.parallel.rules`). Call `step` within `use_mesh`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        sum_names: Sequence[str],
        mesh: Mesh | None = None,
        parallel_microbatches: int = 1,
    ) -> None:
        """Builds the programs; nothing is compiled yet.

        Args:
          loss: see `Loss`.
          optimizer: its state must count skipped steps (`rrl.rl.optim.make_optimizer`).
          sum_names: names of the sums that `loss` returns.
          mesh: devices; None: the default device.
          parallel_microbatches: see `ObjectiveConfig`.
        """
        self.mesh = mesh
        self.sum_names = (*sum_names, "loss")
        self.parallel_microbatches = parallel_microbatches_on(mesh, parallel_microbatches)

        def accumulate(
            params: PyTree, constants: PyTree, grads: PyTree, sums: dict[str, jax.Array], batch: Batch
        ) -> tuple[PyTree, dict[str, jax.Array]]:
            (value, batch_sums), grad = jax.value_and_grad(loss, has_aux=True)(params, constants, batch)
            batch_sums, grad = batch_sums | {"loss": value}, constrain_state(grad)
            sums = {name: sums[name] + batch_sums[name] for name in batch_sums}
            return jax.tree.map(jnp.add, grads, grad), sums

        def apply(
            params: PyTree, opt_state: optax.OptState, grads: PyTree, divisor: jax.Array
        ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = {"grad_norm": optax.global_norm(grads), "skipped": skipped_updates(opt_state)}
            return optax.apply_updates(params, updates), opt_state, metrics

        self.accumulate: Callable[..., Any] = jax.jit(accumulate, donate_argnums=(2, 3))
        self.apply: Callable[..., Any] = jax.jit(apply, donate_argnums=(0, 1))
        self.add: Callable[..., Any] = jax.jit(lambda *parts: jax.tree.map(jnp.add, *parts), donate_argnums=0)

    def step(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        constants: PyTree,
        batches: Sequence[Batch],
        divisor: float,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Takes one optimiser step on the loss summed over `batches` and divided by `divisor`.

        Donates `params` and `opt_state`. `constants` are those of `Loss`.

        Returns:
          New parameters, new optimiser state, and metrics: the sums by name, "loss" divided by `divisor`, "grad_norm", and
          "skipped" (optimiser steps skipped since the start because their gradient was not finite).
        """
        # The initial zeros have the same sharding as the outputs of `accumulate`. Otherwise its second call would compile again.
        sharding = jax.tree.leaves(params)[0].sharding
        replicated = (
            NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
        )
        threads = min(self.parallel_microbatches, len(batches)) or 1
        batches_of_thread = [batches[thread::threads] for thread in range(threads)]

        def zeros() -> tuple[PyTree, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda x: jnp.zeros_like(x, device=x.sharding), params)
            return grads, {name: jnp.zeros((), device=replicated) for name in self.sum_names}

        def accumulate_all(carry: tuple[PyTree, dict[str, jax.Array]], batches: Sequence[Batch]) -> Any:
            for batch in batches:
                carry = self.accumulate(params, constants, *carry, put_rows(batch, self.mesh))
                # Each thread waits for its own result. If it only queued programs, the CPU device would run those of all threads
                # one after another.
                if threads > 1:
                    jax.block_until_ready(carry[1])
            return carry

        partial = map_in_threads(
            threads, accumulate_all, [zeros() for _ in range(threads)], batches_of_thread
        )
        grads, sums = partial[0]
        for part in partial[1:]:
            grads, sums = self.add((grads, sums), part)
        params, opt_state, extra = self.apply(params, opt_state, grads, jnp.float32(divisor))
        metrics = {name: float(value) for name, value in jax.device_get({**sums, **extra}).items()}
        return params, opt_state, metrics | {"loss": metrics["loss"] / divisor}
