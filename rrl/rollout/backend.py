"""`Backend`: how an engine uses its kind of devices. The rest of the engine is the same on all devices.

The defaults are those of accelerators. CPUs have subclasses (`rrl.rollout.cpu`). `rrl.rollout.backends.select_backend` chooses.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.kernels import GenerationKernels


class StepShapes(NamedTuple):
    """Shapes of the steps that a program may run. Rows and chunks have bitwise the same results in all of them."""

    widths: tuple[int, ...]
    """Numbers of rows that a decode step may compute, largest first (`rrl.rollout.decoding.DecodeSettings`)."""
    attention_batches: tuple[int, ...]
    """Numbers of rows that may read a cache block in one matrix product of attention, largest first (`DecodeSettings`)."""
    chunk_counts: tuple[int, ...]
    """Numbers of chunks that may be prefilled together, largest first (`rrl.rollout.prefilling.PrefillSettings`)."""
    step_tokens: int
    """Tokens of a decode step over all rows, including draft tokens. 0: no drafts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How an engine uses its devices."""

    workers: int = 1
    """Number of episode loops that run at the same time, each in its own thread. Each has an equal part of the rows, and they
    share the requests."""
    compiler_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """XLA's compiler options for the rollout's programs."""
    computes_on_host: bool = False
    """Whether the devices compute on the cores of this process, so that its CPU time shows whether they work."""
    slots_last: bool = False
    """Layout of the cache (`rrl.models.cache.KVCache`)."""
    prefill_attention_batches: tuple[int, ...] = ()
    """Value of `rrl.rollout.prefilling.PrefillSettings.attention_batches`."""
    embeds_in_batches: bool = False
    """Whether the query encoder embeds only as many queries as there are (`rrl.rollout.query_encoder.QueryEncoder.embed`)."""
    probes_shapes: bool = False
    """Whether smaller shapes of steps, and drafts, are used only if a test finds that they change no bits
    (`rrl.rollout.backends.find_shapes`). Otherwise all steps have the largest shapes, and drafts are not tested."""

    def kernels(self, dtype: DTypeLike) -> GenerationKernels | None:
        """Return the kernels of a cache of this dtype; None: XLA computes everything."""
        return None

    def computes_layers(self, dtype: DTypeLike) -> bool:
        """Return whether kernels compute whole layers. They skip padding, so that padding takes no time then."""
        return False

    def product_format(self, dtype: DTypeLike) -> str:
        """Return the number format of the layers' matrix products, such as "float32".

        Args:
          dtype: of the computation.
        """
        return jnp.dtype(dtype).name

    def prepare(self, model: Decoder) -> Decoder:
        """Return a decoder whose weights are prepared for generation. Called once, before the loop over tokens."""
        return model

    def prepared_bytes(self, dtype: DTypeLike, lora: bool) -> float:
        """Return the bytes of the copies of parameters that `prepare` makes, over all workers.

        Args:
          dtype: of the computation.
          lora: whether the model has adapters.
        """
        return 0.0


def without_kernels(weights: str) -> None:
    """Raise UserError unless `EngineConfig.weights` is "auto".

    Call it where no kernels compute the layers: then the number format cannot be chosen.
    """
    if weights != "auto":
        raise UserError(
            f"weights={weights} of a rollout section needs the CPU kernels, which this device, mesh, model or compute.dtype does "
            "not use; set weights=auto there"
        )
