"""Low-rank adapters (LoRA; Hu et al., 2021): trained matrices A and B add (alpha / rank) A B to a frozen kernel W.

The adapters are `nnx.LoRAParam`s of the decoder itself. All other parameters stay frozen. B starts at 0, so that the model's
outputs do not change at first.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx

from rrl.errors import UserError, at_least
from rrl.models.decoder import LORA_A, LORA_B, Decoder

KERNEL_INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1, "head": 1}
"""Linear layer -> number of leading axes of its kernel that are inputs, without the layer axis."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The linear layers that get adapters, and the adapters' size."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, all parameters are trained."""
    alpha: float = 32.0
    """The adapters' output is scaled by alpha / rank."""
    layers: str = "layers/.*"
    """Regular expression. Linear layers whose whole name matches get adapters: layers/q, layers/k, layers/v, layers/o,
    layers/gate, layers/up, layers/down, head."""

    def __post_init__(self) -> None:
        at_least(0, self, "rank", where="lora.")
        if self.alpha <= 0:
            raise UserError(f"lora.alpha={self.alpha} must be above 0")
        try:
            re.compile(self.layers)
        except re.error as error:
            raise UserError(f"lora.layers={self.layers!r} is not a regular expression: {error}") from error


def add_lora(decoder: Decoder, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Adds adapters to the selected linear layers, in place. The model's outputs do not change, since B starts at 0.

    A is drawn from N(0, 1 / inputs). Adapters have the dtype of their kernel. With rank 0 nothing is added.

    Raises:
        UserError: the regular expression matches no linear layer of this model.
    """
    if not config.rank:
        return
    kernels = _kernels(decoder)
    selected = [name for name in kernels if re.fullmatch(config.layers, name)]
    if not selected:
        raise UserError(
            f"lora.layers={config.layers!r} matches no linear layer; this model has {', '.join(kernels)}"
        )
    for name in selected:
        module, short, kernel = kernels[name]
        stack, inputs, outputs = _split_axes(name, kernel.shape)
        draw = jax.random.normal(rngs.params(), (*stack, *inputs, config.rank), jnp.float32)
        a = (draw * math.prod(inputs) ** -0.5).astype(kernel.dtype)
        setattr(module, short + LORA_A, nnx.LoRAParam(a))
        setattr(
            module, short + LORA_B, nnx.LoRAParam(jnp.zeros((*stack, config.rank, *outputs), kernel.dtype))
        )
    decoder.lora_scale = decoder.layers.lora_scale = config.alpha / config.rank


def has_lora(decoder: Decoder) -> bool:
    """Whether any layer has adapters."""
    return bool(jax.tree.leaves(nnx.state(decoder, nnx.LoRAParam)))


def merge_lora(decoder: Decoder) -> Decoder:
    """Returns the model with its adapters added to the kernels, for export. A decoder without adapters is returned itself.

    The sums are computed in float32 and rounded to the wider dtype of kernel and adapters. Kernels without adapters are
    shared, not copied.
    """
    if not has_lora(decoder):
        return decoder
    result = nnx.clone(decoder, variables=False)
    for name, (module, short, kernel) in _kernels(result).items():
        if not hasattr(module, short + LORA_A):
            continue
        a, b = (getattr(module, short + part)[...] for part in (LORA_A, LORA_B))
        dtype = jnp.result_type(kernel, a, b)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        stack, _, _ = _split_axes(name, kernel.shape)
        flat_a, flat_b = a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, b.shape[len(stack)], -1)
        change = (decoder.lora_scale * (flat_a @ flat_b)).reshape(kernel.shape)
        setattr(module, short, nnx.Param((kernel.astype(jnp.float32) + change).astype(dtype)))
        delattr(module, short + LORA_A)
        delattr(module, short + LORA_B)
    return result


def _kernels(decoder: Decoder) -> dict[str, tuple[nnx.Module, str, jax.Array]]:
    """Linear layers by whole name: the module that holds the kernel, the kernel's name in it, and the kernel."""
    kernels: dict[str, tuple[nnx.Module, str, jax.Array]] = {}
    for short in KERNEL_INPUT_AXES:
        module: nnx.Module = decoder if short == "head" else decoder.layers
        if hasattr(module, short):
            name = short if short == "head" else f"layers/{short}"
            kernels[name] = (module, short, getattr(module, short)[...])
    return kernels


def _split_axes(
    name: str, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Splits a kernel's shape into layer, input and output axes."""
    layers = 1 if name.startswith("layers/") else 0
    inputs = layers + KERNEL_INPUT_AXES[name.rpartition("/")[2]]
    return shape[:layers], shape[layers:inputs], shape[inputs:]
