"""Packs trajectories into rows of a few lengths, runs a function on them, and unpacks its per-token outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from rrl.data.trajectory import POLICY, Trajectory
from rrl.errors import UserError
from rrl.parallel.mesh import data_shards, put_rows, use_mesh
from rrl.parallel.threads import map_in_threads, parallel_microbatches_on
from rrl.rl.batch import Batch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.packing import Buckets, pack_buckets
from rrl.rl.prefix_tree import PrefixTree, prefix_trees


@dataclasses.dataclass(frozen=True)
class PackedTrajectories:
    """Trajectories in packed rows, and where each of their tokens is."""

    buckets: Buckets
    prefix_trees: list[PrefixTree]
    """One per packed sequence, in the order in which they were packed."""

    def unpack(
        self, values: Sequence[Float[np.ndarray, "B T"]], trajectories: Sequence[Trajectory]
    ) -> list[Float[np.ndarray, "T"]]:
        """Per-token values of each trajectory, from the outputs of all batches.

        Contexts that share tokens read the shared values from the trunk of their tree.
        """
        sizes = [len(t.tokens) for t in trajectories]
        flat = np.zeros(sum(sizes), np.float32)
        parts = self.buckets.unpack(values, [len(tree.tokens) for tree in self.prefix_trees])
        for tree, part in zip(self.prefix_trees, parts, strict=True):
            flat[tree.covered] = part[tree.columns]
        return np.split(flat, np.cumsum(sizes, dtype=int))[:-1]


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    config: ObjectiveConfig,
    shards: int = 1,
    extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
) -> PackedTrajectories:
    """Packs trajectories into rows; the policy's tokens are the targets.

    A context is a prompt and the tokens that follow it until the next prompt. A trajectory has one context, or several if
    its recipe builds a new prompt for each step (`Trajectory.contexts`). Each context becomes one sequence, or with
    `config.share_prefixes` possibly a branch of a prefix tree (`rrl.rl.prefix_tree`).

    Args:
      trajectories: the trajectories to pack.
      config: row lengths, tokens per microbatch, and whether prefixes are shared.
      shards: number of devices over which the rows of a batch are split.
      extras: per-token arrays of each trajectory, by name.

    Raises:
      UserError: a context is longer than the longest row.
    """
    max_length = config.row_lengths[-1]
    longest = max((context.stop - context.start for t in trajectories for context in t.contexts), default=0)
    if longest > max_length:
        raise UserError(
            f"a context of {longest} tokens is longer than the longest of objective.row_lengths={config.row_lengths}"
        )
    trees = prefix_trees(trajectories, config.share_prefixes, max_length)

    def per_sequence(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = np.concatenate([*values]) if trajectories else np.empty(0)
        return [flat[tree.tokens] for tree in trees]

    buckets = pack_buckets(
        per_sequence([t.tokens for t in trajectories]),
        per_sequence([t.roles == POLICY for t in trajectories]),
        config.row_lengths,
        [config.rows_per_microbatch(length, shards) for length in config.row_lengths],
        positions=[tree.positions for tree in trees],
        branches=[tree.branches for tree in trees] if config.share_prefixes else None,
        extras={name: per_sequence(values) for name, values in (extras or {}).items()},
    )
    return PackedTrajectories(buckets, trees)


def packed_token_counts(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> Int[np.ndarray, "N"]:
    """Number of tokens that each trajectory adds to the packed rows if all trajectories are packed together.

    A prefix that several contexts share counts once, for the trajectory that contains the trunk.
    """
    owner = np.repeat(np.arange(len(trajectories)), [len(t.tokens) for t in trajectories])
    sizes = np.zeros(len(trajectories), np.int64)
    for tree in prefix_trees(trajectories, config.share_prefixes, config.row_lengths[-1]):
        sizes += np.bincount(owner[tree.tokens], minlength=len(sizes))
    return sizes


class PerTokenFunction:
    """A jitted function that maps packed rows to per-token values without a gradient, applied to trajectories."""

    def __init__(
        self,
        function: Callable[[PyTree, PyTree, Batch], dict[str, Float[Array, "B T"]]],
        config: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """`function` takes trained parameters, fixed parameters and a microbatch, and returns arrays [B, T] by name."""
        self.config = config
        self.mesh = mesh
        # Outputs are replicated, so that every process can read them whole.
        single = mesh is None or mesh.size == 1
        shardings = None if single else NamedSharding(mesh, PartitionSpec())
        self.program: Callable[..., dict[str, Array]] = jax.jit(function, out_shardings=shardings)
        self.parallel_microbatches = parallel_microbatches_on(mesh, config.parallel_microbatches)

    def __call__(
        self,
        params: PyTree,
        fixed: PyTree,
        trajectories: Sequence[Trajectory],
        extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
    ) -> dict[str, list[Float[np.ndarray, "T"]]]:
        """Values of every token of each trajectory, by name.

        Args:
          params: trained parameters.
          fixed: parameters that are not trained (`rrl.rl.optim.split_trained`).
          trajectories: the trajectories.
          extras: per-token arrays of each trajectory, by name; they become `Batch.extras`.
        """

        def run(batch: Batch) -> dict[str, np.ndarray]:
            return jax.device_get(self.program(params, fixed, put_rows(batch, self.mesh)))

        with use_mesh(self.mesh):
            packed = pack_trajectories(trajectories, self.config, data_shards(self.mesh), extras)
            outputs = map_in_threads(self.parallel_microbatches, run, packed.buckets.batches)
        names = outputs[0] if outputs else ()
        return {name: packed.unpack([part[name] for part in outputs], trajectories) for name in names}
