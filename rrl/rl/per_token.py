"""Per-token outputs of a model for trajectories, without a gradient: `PerTokenFunction`."""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from rrl.data.trajectory import Trajectory
from rrl.parallel.mesh import data_shards, put_rows, use_mesh
from rrl.parallel.threads import map_in_threads, parallel_microbatches_on
from rrl.rl.batch import Batch
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.packing import pack_trajectories


class PerTokenFunction:
    """A jitted function from a microbatch to per-token arrays, applied to trajectories."""

    def __init__(
        self,
        function: Callable[[PyTree, PyTree, Batch], dict[str, Float[Array, "B T"]]],
        config: ObjectiveConfig,
        mesh: Mesh | None = None,
    ) -> None:
        """`function` takes trained parameters, frozen parameters and a microbatch, and returns arrays [B, T] by name."""
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
        frozen: PyTree,
        trajectories: Sequence[Trajectory],
        extras: Mapping[str, Sequence[Float[np.ndarray, "T"]]] | None = None,
    ) -> dict[str, list[Float[np.ndarray, "T"]]]:
        """The arrays by name, each as one array per trajectory.

        Args:
          params: trained parameters.
          frozen: parameters that are not trained (`rrl.rl.optim.split_trained`).
          trajectories: the trajectories.
          extras: per-token arrays of each trajectory, by name; they become `Batch.extras`.
        """

        def run(batch: Batch) -> dict[str, np.ndarray]:
            return jax.device_get(self.program(params, frozen, put_rows(batch, self.mesh)))

        with use_mesh(self.mesh):
            packed = pack_trajectories(trajectories, self.config, data_shards(self.mesh), extras)
            outputs = map_in_threads(self.parallel_microbatches, run, packed.batches)
        names = outputs[0] if outputs else ()
        return {name: packed.unpack([part[name] for part in outputs], trajectories) for name in names}
