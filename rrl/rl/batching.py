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
from rrl.parallel.streams import beside, streams_on
from rrl.rl.batch import Batch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.packing import Buckets, pack_buckets
from rrl.rl.prefix_tree import Layout, layouts


@dataclasses.dataclass(frozen=True)
class Rows:
    """Trajectories in packed rows, and the way back."""

    buckets: Buckets
    layouts: list[Layout]
    """Each sequence of the rows."""

    def unpack(
        self, values: Sequence[Float[np.ndarray, "B T"]], trajectories: Sequence[Trajectory]
    ) -> list[Float[np.ndarray, "T"]]:
        """Per-token values of each trajectory from those of the batches; those of tokens that contexts have in common are read
        where the trunk has them."""
        sizes = [len(t.tokens) for t in trajectories]
        found = np.zeros(sum(sizes), np.float32)
        parts = self.buckets.unpack(values, [len(layout.tokens) for layout in self.layouts])
        for layout, part in zip(self.layouts, parts, strict=True):
            found[layout.held] = part[layout.columns]
        return np.split(found, np.cumsum(sizes, dtype=int))[:-1]


def bucketed(
    trajectories: Sequence[Trajectory],
    config: ObjectiveConfig,
    shards: int = 1,
    extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
) -> Rows:
    """Trajectories in packed rows, whose targets are the policy's tokens, with per-token arrays beside them.

    Each context is a sequence of its own, as the policy saw it, or a branch of one (`rrl.rl.prefix_tree`). Raises UserError for
    one longer than every length.
    """
    most = config.lengths[-1]
    longest = max((part.stop - part.start for t in trajectories for part in t.contexts), default=0)
    if longest > most:
        raise UserError(
            f"a trajectory of {longest} tokens is longer than the longest of objective.lengths={config.lengths}"
        )
    laid = layouts(trajectories, config.share_prefixes, most)

    def cut(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = np.concatenate([*values]) if trajectories else np.empty(0)
        return [flat[layout.tokens] for layout in laid]

    buckets = pack_buckets(
        cut([t.tokens for t in trajectories]),
        cut([t.roles == POLICY for t in trajectories]),
        config.lengths,
        [config.rows(length, shards) for length in config.lengths],
        positions=[layout.positions for layout in laid],
        branches=[layout.branches for layout in laid] if config.share_prefixes else None,
        extras={name: cut(values) for name, values in (extras or {}).items()},
    )
    return Rows(buckets, laid)


def packed_sizes(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> Int[np.ndarray, "N"]:
    """How many tokens of the rows each trajectory takes, packed with these others: what contexts have in common may lie there
    once, for one of them."""
    whose = np.repeat(np.arange(len(trajectories)), [len(t.tokens) for t in trajectories])
    sizes = np.zeros(len(trajectories), np.int64)
    for layout in layouts(trajectories, config.share_prefixes, config.lengths[-1]):
        sizes += np.bincount(whose[layout.tokens], minlength=len(sizes))
    return sizes


class Scorer:
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
        self.streams = streams_on(mesh, config.streams)

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
            rows = bucketed(trajectories, self.config, data_shards(self.mesh), extras)
            found = beside(self.streams, one, rows.buckets.batches)
        names = found[0] if found else ()
        return {name: rows.unpack([part[name] for part in found], trajectories) for name in names}
