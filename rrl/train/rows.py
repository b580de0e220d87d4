"""Trajectories in packed rows of few lengths, to a model and back: per-token numbers without a gradient."""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from rrl.errors import UserError
from rrl.parallel.mesh import data_shards, put_rows, use_mesh
from rrl.rl.batch import Batch
from rrl.rollout.trajectory import POLICY, Trajectory
from rrl.train.objective import ObjectiveConfig
from rrl.train.pack import Buckets, pack_buckets


def bucketed(
    trajectories: Sequence[Trajectory],
    config: ObjectiveConfig,
    shards: int = 1,
    extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
) -> Buckets:
    """Trajectories in packed rows, whose targets are the policy's tokens, with per-token arrays beside them.

    Each context is a sequence of its own, as the policy saw it. Raises UserError for one longer than every length.
    """
    contexts = [(index, part) for index, t in enumerate(trajectories) for part in t.contexts]
    longest = max((part.stop - part.start for _, part in contexts), default=0)
    if longest > config.lengths[-1]:
        raise UserError(
            f"a trajectory of {longest} tokens is longer than the longest of objective.lengths={config.lengths}"
        )

    def cut(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [values[index][part] for index, part in contexts]

    return pack_buckets(
        cut([t.tokens for t in trajectories]),
        cut([t.roles == POLICY for t in trajectories]),
        config.lengths,
        [config.rows(length, shards) for length in config.lengths],
        extras={name: cut(values) for name, values in (extras or {}).items()},
    )


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

    def __call__(
        self,
        params: PyTree,
        fixed: PyTree,
        trajectories: Sequence[Trajectory],
        extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
    ) -> dict[str, list[Float[np.ndarray, "T"]]]:
        """What the function says of every token of each trajectory, by name; `extras` stand beside the tokens."""
        with use_mesh(self.mesh):
            buckets = bucketed(trajectories, self.config, data_shards(self.mesh), extras)
            found = [
                jax.device_get(self.program(params, fixed, put_rows(batch, self.mesh)))
                for batch in buckets.batches
            ]
        sizes = [part.stop - part.start for t in trajectories for part in t.contexts]
        names = found[0] if found else ()
        contexts = {name: iter(buckets.unpack([part[name] for part in found], sizes)) for name in names}
        return {
            name: [np.concatenate([next(parts) for _ in t.contexts]) for t in trajectories]
            for name, parts in contexts.items()
        }
