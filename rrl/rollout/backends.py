"""Selects what depends on the kind of devices: the backend of a mesh, and the shapes of the steps of a program.

The engine uses these two functions and the class `Backend` only.
"""

from jax.sharding import Mesh
from jaxtyping import PyTree

from rrl.models.config import DecoderConfig
from rrl.rollout.backend import Backend, StepShapes, without_kernels
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.backend import cpu_backend
from rrl.rollout.cpu.shape_probe import find_cpu_shapes
from rrl.rollout.programs import RolloutPrograms


def select_backend(config: EngineConfig, decoder_config: DecoderConfig, mesh: Mesh) -> Backend:
    """Return the backend for a policy of this shape on these devices.

    Raises:
      UserError: `config.workers` or `config.weights` does not fit the devices.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu:
        return cpu_backend(config, decoder_config, mesh)
    without_kernels(config.weights)
    return Backend()


def find_shapes(programs: RolloutPrograms, params: PyTree) -> StepShapes:
    """Return the shapes that the programs may use. Call it before building their loops.

    Without a probe these are the largest shapes, which the programs have already.
    """
    return find_cpu_shapes(programs, params) if programs.backend.probes_shapes else programs.shapes
