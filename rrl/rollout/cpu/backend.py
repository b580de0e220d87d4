"""The backends of CPUs: `CpuBackend` for a mesh of several CPU devices, `SingleCpuBackend` for one. Read `cpu_backend` first."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rrl.errors import UserError
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.models.cpu.kernels import CpuKernels, cpu_kernels
from rrl.models.cpu.packed import INSTRUCTIONS, PackedMatrix, pack_decoder, supports_format
from rrl.models.decoder import TABLE, Decoder
from rrl.models.lora import merge_lora
from rrl.parallel.runtime import available_cores
from rrl.rollout.backend import Backend, without_kernels
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.workers import compiler_options, weights_dominate, worker_count


def cpu_backend(config: EngineConfig, decoder_config: DecoderConfig, mesh: Mesh) -> "CpuBackend":
    """Return the backend of a mesh of CPU devices.

    Raises:
      UserError: `config.workers` does not fit one CPU (`rrl.rollout.cpu.workers.worker_count`), or `config.weights` is
        set for several CPU devices, which allow only "auto".
    """
    if mesh.size > 1:
        without_kernels(config.weights)
        return CpuBackend(decoder_config=decoder_config)
    workers = worker_count(config, decoder_config)
    return SingleCpuBackend(
        decoder_config=decoder_config,
        threads=available_cores() if workers == 1 else 1,
        workers=workers,
        weights=config.weights,
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
    """One CPU device: one or several workers, the kernels compute whole layers, and a probe finds the shapes of the steps."""

    prefill_attention_batches: tuple[int, ...] = (1,)
    embeds_in_batches: bool = True
    probes_shapes: bool = True
    weights: str = "auto"
    """`EngineConfig.weights`."""

    def computes_layers(self, dtype: DTypeLike) -> bool:
        kernels = self.kernels(dtype)
        return kernels is not None and kernels.computes_layers(self.decoder_config, dtype)

    def product_format(self, dtype: DTypeLike) -> str:
        """Return the number format of the matrix products: that of packed matrices (`packed_format`), else `dtype`.

        Raises:
          UserError: see `prepare`.
        """
        return self.packed_format(dtype) or super().product_format(dtype)

    def prepare(self, model: Decoder) -> Decoder:
        """Return the decoder with copies of its weights that save time at each token. Each worker holds its own copies.

        If the kernels compute the layers, adapters are added to the weights. The result is packed if `packed_format` returns a
        format. A tied embedding table that is not packed gets a transposed copy.

        Raises:
          UserError: this device, model or processor does not support `weights`.
        """
        if self.computes_layers(model.dtype):
            model = merge_lora(model)
        if name := self.packed_format(model.dtype):
            pack_decoder(model, name, self.threads)
        if model.config.tie_embeddings and TABLE not in (model.kernel_weights or {}):
            model.transposed_embedding = model.embedding[...].T
        return model

    def prepared_bytes(self, dtype: DTypeLike, lora: bool) -> float:
        def copies() -> tuple[dict[str, PackedMatrix], jax.Array | None]:
            decoder = Decoder(self.decoder_config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
            model = self.prepare(decoder)
            return dict(model.kernel_weights or {}), model.transposed_embedding

        matrices, transposed = jax.eval_shape(copies)
        table = matrices.pop(TABLE, None)
        packed, tables = (
            sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
            for part in (matrices, (table, transposed))
        )
        if not (lora and self.computes_layers(dtype)):
            return float(self.workers * (packed + tables))
        # Weights with added adapters are temporary: each matrix is freed when it is packed. So they need less memory than all
        # merged and all packed matrices together. Compiled programs were compared with this estimate: the larger of the two, plus
        # the smaller one or a third of the merged matrices.
        merged = jnp.dtype(dtype).itemsize * matrix_parameters(self.decoder_config)
        return self.workers * (tables + max(merged, packed) + min(packed, merged / 3))

    def packed_format(self, dtype: DTypeLike) -> str | None:
        """Return the format in which the kernels get the matrices (`rrl.models.cpu.packed`); None: they are not packed.

        Raises:
          UserError: see `prepare`.
        """
        name, is_large = self.weights, weights_dominate(self.decoder_config)
        if not self.computes_layers(dtype):
            without_kernels(name)
            return None
        if name == "unpacked" or (name in ("auto", "float32") and not is_large):
            return None
        if name == "auto":
            return "bfloat16" if supports_format("bfloat16") else "float32"
        if not supports_format(name):
            raise UserError(
                f"weights={name} of a rollout section needs a processor with {INSTRUCTIONS[name]}; set weights=auto there"
            )
        return name
