"""Low-rank adapters (Hu et al., 2021): beside a frozen kernel W, trained A and B add (alpha / rank) A B to it.

The adapters live in the decoder as `nnx.LoRAParam`, so that one module holds both: everything else stays frozen, and the
start of training is the same module with B = 0.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx

from rrl.errors import UserError, at_least
from rrl.models.decoder import LORA_A, LORA_B, Decoder

LINEAR = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1, "head": 1}
"""Linear layers, with the number of leading axes that each kernel contracts over (not counting the layer axis)."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which linear layers get adapters, and how large."""

    rank: int = 0
    """Width r of the adapters; 0: none, all parameters are trained."""
    alpha: float = 32.0
    """What they add is scaled by alpha / rank."""
    layers: str = "layers/.*"
    """Regular expression that a linear layer's whole name must match: layers/q, /k, /v, /o, /gate, /up, /down, head."""

    def __post_init__(self) -> None:
        at_least(0, self, "rank", where="lora.")
        if self.alpha <= 0:
            raise UserError(f"lora.alpha={self.alpha} must be above 0")
        try:
            re.compile(self.layers)
        except re.error as error:
            raise UserError(f"lora.layers={self.layers!r} is no regular expression: {error}") from error


def add_lora(decoder: Decoder, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Gives the chosen linear layers adapters, in place; the model's outputs do not change, since B starts at 0.

    A is drawn from N(0, 1 / inputs). Adapters have the dtype of their kernel. Rank 0 does nothing.

    Raises:
        UserError: the regular expression matches no linear layer of this model.
    """
    if not config.rank:
        return
    kernels = _kernels(decoder)
    chosen = [name for name in kernels if re.fullmatch(config.layers, name)]
    if not chosen:
        raise UserError(
            f"lora.layers={config.layers!r} matches no linear layer; this model has {', '.join(kernels)}"
        )
    for name in chosen:
        home, short, kernel = kernels[name]
        stack, inputs, outputs = _parts(name, kernel.shape)
        draw = jax.random.normal(rngs.params(), (*stack, *inputs, config.rank), jnp.float32)
        a = (draw * math.prod(inputs) ** -0.5).astype(kernel.dtype)
        setattr(home, short + LORA_A, nnx.LoRAParam(a))
        setattr(home, short + LORA_B, nnx.LoRAParam(jnp.zeros((*stack, config.rank, *outputs), kernel.dtype)))
    decoder.lora_scale = decoder.layers.lora_scale = config.alpha / config.rank


def has_lora(decoder: Decoder) -> bool:
    """Whether any layer has adapters."""
    return bool(jax.tree.leaves(nnx.state(decoder, nnx.LoRAParam)))


def merge_lora(decoder: Decoder) -> Decoder:
    """The same model with its adapters added into the kernels: what is exported. Without adapters, the decoder itself.

    Sums are in float32 and rounded to the wider dtype of kernel and adapters; kernels without adapters are shared, not copied.
    """
    if not has_lora(decoder):
        return decoder
    alone = nnx.clone(decoder, variables=False)
    for name, (home, short, kernel) in _kernels(alone).items():
        if not hasattr(home, short + LORA_A):
            continue
        a, b = (getattr(home, short + part)[...] for part in (LORA_A, LORA_B))
        dtype = jnp.result_type(kernel, a, b)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        stack, _, _ = _parts(name, kernel.shape)
        flat_a, flat_b = a.reshape(*stack, -1, a.shape[-1]), b.reshape(*stack, b.shape[len(stack)], -1)
        change = (decoder.lora_scale * (flat_a @ flat_b)).reshape(kernel.shape)
        setattr(home, short, nnx.Param((kernel.astype(jnp.float32) + change).astype(dtype)))
        delattr(home, short + LORA_A)
        delattr(home, short + LORA_B)
    return alone


def _kernels(decoder: Decoder) -> dict[str, tuple[nnx.Module, str, jax.Array]]:
    """Every linear layer of a model: the module it lives in, its name there, and its kernel."""
    found: dict[str, tuple[nnx.Module, str, jax.Array]] = {}
    for short in LINEAR:
        home: nnx.Module = decoder if short == "head" else decoder.layers
        if hasattr(home, short):
            name = short if short == "head" else f"layers/{short}"
            found[name] = (home, short, getattr(home, short)[...])
    return found


def _parts(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The axes of a kernel: layers, inputs, outputs."""
    layers = 1 if name.startswith("layers/") else 0
    inputs = layers + LINEAR[name.rpartition("/")[2]]
    return shape[:layers], shape[layers:inputs], shape[inputs:]
