"""Trajectories in packed rows of few lengths, to a model and back: per-token numbers without a gradient."""

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
    """Trajectories in packed rows, and the way back."""

    buckets: Buckets
    prefix_trees: list[PrefixTree]
    """Each sequence of the rows."""

    def unpack(
        self, values: Sequence[Float[np.ndarray, "B T"]], trajectories: Sequence[Trajectory]
    ) -> list[Float[np.ndarray, "T"]]:
        """Per-token values of each trajectory from those of the batches; those of tokens that contexts have in common are read
        where the trunk has them."""
        sizes = [len(t.tokens) for t in trajectories]
        found = np.zeros(sum(sizes), np.float32)
        parts = self.buckets.unpack(values, [len(tree.tokens) for tree in self.prefix_trees])
        for tree, part in zip(self.prefix_trees, parts, strict=True):
            found[tree.covered] = part[tree.columns]
        return np.split(found, np.cumsum(sizes, dtype=int))[:-1]


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    config: ObjectiveConfig,
    shards: int = 1,
    extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
) -> PackedTrajectories:
    """Trajectories in packed rows, whose targets are the policy's tokens, with per-token arrays beside them.

    Each context is a sequence of its own, as the policy saw it, or a branch of one (`rrl.rl.prefix_tree`). Raises UserError for
    one longer than every length.
    """
    most = config.row_lengths[-1]
    longest = max((part.stop - part.start for t in trajectories for part in t.contexts), default=0)
    if longest > most:
        raise UserError(
            f"a trajectory of {longest} tokens is longer than the longest of objective.row_lengths={config.row_lengths}"
        )
    laid = prefix_trees(trajectories, config.share_prefixes, most)

    def cut(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = np.concatenate([*values]) if trajectories else np.empty(0)
        return [flat[tree.tokens] for tree in laid]

    buckets = pack_buckets(
        cut([t.tokens for t in trajectories]),
        cut([t.roles == POLICY for t in trajectories]),
        config.row_lengths,
        [config.rows_per_microbatch(length, shards) for length in config.row_lengths],
        positions=[tree.positions for tree in laid],
        branches=[tree.branches for tree in laid] if config.share_prefixes else None,
        extras={name: cut(values) for name, values in (extras or {}).items()},
    )
    return PackedTrajectories(buckets, laid)


def packed_token_counts(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> Int[np.ndarray, "N"]:
    """How many tokens of the rows each trajectory takes, packed with these others: what contexts have in common may lie there
    once, for one of them."""
    whose = np.repeat(np.arange(len(trajectories)), [len(t.tokens) for t in trajectories])
    sizes = np.zeros(len(trajectories), np.int64)
    for tree in prefix_trees(trajectories, config.share_prefixes, config.row_lengths[-1]):
        sizes += np.bincount(whose[tree.tokens], minlength=len(sizes))
    return sizes


class PerTokenFunction:
    """A jitted function of packed rows, applied to all trajectories of a step."""

    def __init__(
        self,
        function: Callable[[PyTree, PyTree, Batch], dict[str, Float[Array, "B T"]]],
        config: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """`function` takes parameters in two parts (as they are split for training) and a microbatch."""
        self.config = config
        self.mesh = mesh
        # Whole on each device, so that every process reads all of it.
        alone = mesh is None or mesh.size == 1
        places = None if alone else NamedSharding(mesh, PartitionSpec())
        self.program: Callable[..., dict[str, Array]] = jax.jit(function, out_shardings=places)
        self.parallel_microbatches = parallel_microbatches_on(mesh, config.parallel_microbatches)

    def __call__(
        self,
        params: PyTree,
        fixed: PyTree,
        trajectories: Sequence[Trajectory],
        extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
    ) -> dict[str, list[Float[np.ndarray, "T"]]]:
        """What the function says of every token of each trajectory, by name; `extras` stand beside the tokens."""

        def one(batch: Batch) -> dict[str, np.ndarray]:
            return jax.device_get(self.program(params, fixed, put_rows(batch, self.mesh)))

        with use_mesh(self.mesh):
            rows = pack_trajectories(trajectories, self.config, data_shards(self.mesh), extras)
            found = map_in_threads(self.parallel_microbatches, one, rows.buckets.batches)
        names = found[0] if found else ()
        return {name: rows.unpack([part[name] for part in found], trajectories) for name in names}
