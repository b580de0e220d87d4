"""The backends of CPUs: `CpuBackend` for a mesh of several CPU devices, `SingleCpuBackend` for one. Read `cpu_backend` first."""

import dataclasses

from jax.sharding import Mesh
from jax.typing import DTypeLike

from rrl.models.config import DecoderConfig
from rrl.models.cpu.kernels import CpuKernels, cpu_kernels
from rrl.models.decoder import Decoder
from rrl.models.lora import merge_lora
from rrl.parallel.runtime import available_cores
from rrl.rollout.backend import Backend
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.workers import compiler_options, worker_count


def cpu_backend(config: EngineConfig, decoder_config: DecoderConfig, mesh: Mesh) -> "CpuBackend":
    """Return the backend of a mesh of CPU devices.

    Raises:
      UserError: `config.workers` does not fit one CPU (`rrl.rollout.cpu.workers.worker_count`).
    """
    if mesh.size > 1:
        return CpuBackend(decoder_config=decoder_config)
    workers = worker_count(config, decoder_config)
    return SingleCpuBackend(
        decoder_config=decoder_config,
        threads=available_cores() if workers == 1 else 1,
        workers=workers,
        compiler_options=compiler_options(workers),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuBackend(Backend):
    """Several CPU devices: the kernels compute the attention of each device's rows, XLA the rest."""

    decoder_config: DecoderConfig
    """The policy's shape."""
    threads: int = 1
    """Maximum number of threads of a kernel."""
    computes_on_host: bool = True
    slots_last: bool = True

    def kernels(self, dtype: DTypeLike) -> CpuKernels | None:
        return cpu_kernels(self.decoder_config, dtype, self.threads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleCpuBackend(CpuBackend):
    """One CPU device: several workers, the kernels compute whole layers, and a probe finds the shapes of the steps."""

    prefill_attention_batches: tuple[int, ...] = (1,)
    embeds_in_batches: bool = True
    probes_shapes: bool = True

    def computes_layers(self, dtype: DTypeLike) -> bool:
        kernels = self.kernels(dtype)
        return kernels is not None and kernels.computes_layers(self.decoder_config, dtype)

    def prepare(self, model: Decoder) -> Decoder:
        """Return the decoder with its adapters added to the weights if the kernels compute the layers, and with a transposed copy
        of a tied embedding table. Each worker holds its own copies."""
        if self.computes_layers(model.dtype):
            model = merge_lora(model)
        if model.config.tie_embeddings:
            model.transposed_embedding = model.embedding[...].T
        return model
