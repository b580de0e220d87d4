"""One policy update: trajectories into length-bucketed packed rows, gradients summed over them, one optimiser step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float, PyTree

from rrl.errors import UserError, at_least, one_of
from rrl.parallel.mesh import data_shards, put_rows, use_mesh
from rrl.parallel.rules import constrain_state
from rrl.rl.advantages import low_spread
from rrl.rl.batch import Batch
from rrl.rl.logprobs import token_logprobs
from rrl.rl.losses import AGGREGATIONS, clipped_objective, kl_k3, sequence_weights
from rrl.rl.optim import skipped_updates
from rrl.rollout.trajectory import POLICY, Trajectory
from rrl.train.pack import pack

SUMS = ("kl", "entropy", "ratio", "clip_fraction", "logp_gap", "tokens", "loss")
"""What is summed over the tokens of an update."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The policy objective; defaults are R-Search's GRPO."""

    kl_coef: float = 0.001
    """Weight of the k3 estimate of KL(policy || reference) in the loss."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "token_mean"
    """What the loss is a mean over: policy tokens, or sequences of token means ("sequence_mean")."""
    drop_spread: float | None = None
    """Leave out groups whose total rewards lie within this of each other (0: are all equal), and with them their KL;
    None: no group."""
    minibatches: int = 1
    """Optimiser steps a rollout batch, each on its share of the groups."""
    microbatch_tokens: int = 8192
    """Tokens whose activations exist at a time."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Row lengths that are compiled; the last is the longest trajectory."""

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise UserError(f"objective.lengths={self.lengths} must be increasing row lengths")
        at_least(1, self, "minibatches", "microbatch_tokens", where="objective.")
        at_least(0, self, "kl_coef", "clip_low", "clip_high", where="objective.")
        if self.drop_spread is not None:
            at_least(0, self, "drop_spread", where="objective.")
        one_of(AGGREGATIONS, self, "aggregation", where="objective.")

    def rows(self, length: int, shards: int = 1) -> int:
        """Rows of this length in a microbatch: the same number, at least one, on each of the data shards."""
        return shards * max(1, self.microbatch_tokens // (length * shards))

    def left_out(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Which scored trajectories of a step the update does not see."""
        if self.drop_spread is None:
            return np.zeros(len(trajectories), bool)
        totals = np.array([t.rewards["total"] for t in trajectories])
        return low_spread(totals, np.array([t.group for t in trajectories], np.int64), self.drop_spread)


def microbatches(
    trajectories: Sequence[Trajectory],
    advantages: Float[np.ndarray, "N"],
    config: ObjectiveConfig,
    shards: int = 1,
) -> tuple[list[Batch], float]:
    """Packs trajectories into rows of few lengths; returns the batches and what the summed loss is divided by.

    Short trajectories that do not fill a batch of their length move up to the next one, so that only the last is padded.
    """
    counts = np.array([t.policy_tokens for t in trajectories], np.int64)
    weights, total = sequence_weights(counts, config.aggregation)
    sizes = np.array([len(t.tokens) for t in trajectories])
    if sizes.max(initial=0) > config.lengths[-1]:
        raise UserError(
            f"a trajectory of {sizes.max()} tokens is longer than the longest of objective.lengths={config.lengths}"
        )
    batches: list[Batch] = []
    waiting: list[int] = []
    for place, length in enumerate(config.lengths):
        low = config.lengths[place - 1] if place else 0
        waiting += np.flatnonzero((sizes > low) & (sizes <= length)).tolist()
        rows = config.rows(length, shards)
        chosen = [trajectories[i] for i in waiting]
        packed = pack(
            [t.tokens for t in chosen],
            [t.roles == POLICY for t in chosen],
            length,
            multiple=rows,
            extras={
                "old_logp": [t.logps for t in chosen],
                "advantage": [
                    np.full(len(t.tokens), advantages[i], np.float32) for i, t in zip(waiting, chosen)
                ],
                "weight": [np.full(len(t.tokens), weights[i], np.float32) for i, t in zip(waiting, chosen)],
            },
        )
        used = int((packed.row.max() + 1) if len(chosen) else 0)
        last = place == len(config.lengths) - 1
        full = used // rows if not last else -(-used // rows)
        for index in range(full):
            span = slice(index * rows, (index + 1) * rows)
            batches.append(jax.tree.map(lambda x, span=span: x[span], packed.batch))
        waiting = [i for i, row in zip(waiting, packed.row, strict=True) if row >= full * rows]
    return batches, total


class Updater:
    """The jitted pieces of an update for one model graph, as `split_trained` gives it: `accumulate` adds a microbatch's
    gradient to the sum, `apply` takes the optimiser's step.

    With a mesh of several devices, rows are split over its axes data and fsdp, and everything that is shaped like a
    parameter lies where `rrl.parallel.rules` puts that.
    """

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
            params: PyTree, reference: PyTree, fixed: PyTree, batch: Batch
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            scores = token_logprobs(nnx.merge(graph, params, fixed), batch, entropy=True)
            old = batch.extras["old_logp"]
            objective, ratio, clipped = clipped_objective(
                scores.logp,
                old,
                batch.extras["advantage"],
                clip_low=config.clip_low,
                clip_high=config.clip_high,
            )
            before = jax.lax.stop_gradient(token_logprobs(nnx.merge(graph, reference, fixed), batch).logp)
            kl = kl_k3(scores.logp, before)
            mask = batch.loss.astype(jnp.float32)
            value = jnp.sum(mask * batch.extras["weight"] * (objective + config.kl_coef * kl))
            assert scores.entropy is not None
            sums = {
                "kl": jnp.sum(mask * kl),
                "entropy": jnp.sum(mask * scores.entropy),
                "ratio": jnp.sum(mask * ratio),
                "clip_fraction": jnp.sum(mask * clipped),
                "logp_gap": jnp.sum(mask * jnp.abs(scores.logp - old)),
                "tokens": jnp.sum(mask),
            }
            return value, sums

        def accumulate(
            params: PyTree,
            reference: PyTree,
            fixed: PyTree,
            grads: PyTree,
            sums: dict[str, jax.Array],
            batch: Batch,
        ) -> tuple[PyTree, dict[str, jax.Array]]:
            (value, new), grad = jax.value_and_grad(loss, has_aux=True)(params, reference, fixed, batch)
            new, grad = new | {"loss": value}, constrain_state(grad)
            return jax.tree.map(jnp.add, grads, grad), {name: sums[name] + new[name] for name in new}

        def apply(
            params: PyTree, opt_state: optax.OptState, grads: PyTree, total: jax.Array
        ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda g: g / total, grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = {"grad_norm": optax.global_norm(grads), "skipped": skipped_updates(opt_state)}
            return optax.apply_updates(params, updates), opt_state, metrics

        self.accumulate: Callable[..., Any] = jax.jit(accumulate, donate_argnums=(3, 4))
        self.apply: Callable[..., Any] = jax.jit(apply, donate_argnums=(0, 1))

    def __call__(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        reference: PyTree,
        fixed: PyTree,
        trajectories: Sequence[Trajectory],
        advantages: Float[np.ndarray, "N"],
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Updates on all trajectories; the buffers of `params` and `opt_state` are donated.

        `params` and `reference` are trained parameters now and at the start, `fixed` the others, which both models share
        (`rrl.rl.optim.split_trained`).

        Returns new parameters, optimiser state, and means over policy tokens: kl, entropy, ratio, clip_fraction,
        logp_gap (|log-prob here - log-prob of the sampler|; before the first step it is their numerical gap).
        """
        groups = np.array([t.group for t in trajectories])
        names = np.unique(groups)
        metrics: dict[str, float] = {}
        shares = np.array_split(names, min(self.config.minibatches, len(names)))
        with use_mesh(self.mesh):
            for share in shares:
                inside = np.flatnonzero(np.isin(groups, share))
                batches, total = microbatches(
                    [trajectories[i] for i in inside.tolist()], advantages[inside], self.config, self.shards
                )
                grads = jax.tree.map(lambda x: jnp.zeros_like(x, device=x.sharding), params)
                sums = {name: jnp.zeros(()) for name in SUMS}
                for batch in batches:
                    grads, sums = self.accumulate(
                        params, reference, fixed, grads, sums, put_rows(batch, self.mesh)
                    )
                params, opt_state, extra = self.apply(params, opt_state, grads, jnp.float32(total))
                found = {name: float(value) for name, value in jax.device_get({**sums, **extra}).items()}
                tokens = max(found.pop("tokens"), 1.0)
                means = {n: v / tokens for n, v in found.items() if n not in ("loss", "grad_norm", "skipped")}
                means |= {"loss": found["loss"] / total, "grad_norm": found["grad_norm"]}
                metrics = {n: metrics.get(n, 0.0) + v / len(shares) for n, v in means.items()}
                metrics["skipped"] = found["skipped"]
        return params, opt_state, metrics
