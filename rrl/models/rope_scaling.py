"""Scalings of RoPE for contexts longer than those of pretraining: linear, Llama 3.1's and YaRN, as in transformers.

A scaling changes the angles per position. YaRN also multiplies cosines and sines by a factor, and so the attention scores by
its square.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.models.hf_fields import integer, positive


@dataclasses.dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor` (Hugging Face's rope_type "linear")."""

    factor: float

    @property
    def rotation_scale(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def scale(self, inverse: Float[np.ndarray, "H/2"], theta: float) -> Float[np.ndarray, "H/2"]:
        """Scales the frequencies `inverse` (inv_freq in transformers) of a RoPE with base `theta`."""
        return (inverse / np.float32(self.factor)).astype(np.float32)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], max_positions: int) -> "LinearScaling":
        """Reads the fields of Hugging Face's RoPE object. `max_positions` is the model's max_position_embeddings."""
        return cls(positive(rope, "factor"))

    def to_hf(self) -> dict[str, Any]:
        """Hugging Face's RoPE object."""
        return {"rope_type": "linear", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the low RoPE frequencies (Hugging Face's rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def rotation_scale(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def scale(self, inverse: Float[np.ndarray, "H/2"], theta: float) -> Float[np.ndarray, "H/2"]:
        """Scales the frequencies `inverse` (inv_freq in transformers) of a RoPE with base `theta`."""
        wavelength = 2 * np.pi / inverse
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = np.clip((self.original_max_position_embeddings / wavelength - low) / (high - low), 0.0, 1.0)
        return (inverse * (smooth + (1 - smooth) / self.factor)).astype(np.float32)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], max_positions: int) -> "Llama3Scaling":
        """Reads the fields of Hugging Face's RoPE object. `max_positions` is the model's max_position_embeddings."""
        known = [field.name for field in dataclasses.fields(cls)]
        if missing := set(known) - rope.keys():
            raise UserError(
                f"config.json: RoPE scaling 'llama3' lacks the fields {', '.join(sorted(missing))}"
            )
        factor, low, high = (positive(rope, field) for field in known[:3])
        if high <= low:
            raise UserError(
                f"config.json: RoPE scaling 'llama3' has high_freq_factor={high:g}, which must be above "
                f"low_freq_factor={low:g}"
            )
        return cls(factor, low, high, integer(rope, known[3]))

    def to_hf(self) -> dict[str, Any]:
        """Hugging Face's RoPE object."""
        return {"rope_type": "llama3", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023; Hugging Face's rope_type "yarn"): low frequencies are divided by `factor`, high ones stay."""

    factor: float
    original_max_position_embeddings: int
    """Context length of pretraining."""
    beta_fast: float = 32.0
    """Frequencies with more rotations than this within the original context stay."""
    beta_slow: float = 1.0
    """Frequencies with fewer rotations than this within the original context are divided by `factor`; between the two, a ramp
    over the dimensions interpolates."""
    attention_factor: float | None = None
    """Factor of cosines and sines; None: derived from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""

    @property
    def rotation_scale(self) -> float:
        """Factor of cosines and sines."""

        def derived(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return derived(self.mscale) / derived(self.mscale_all_dim)
        return derived(1.0)

    def scale(self, inverse: Float[np.ndarray, "H/2"], theta: float) -> Float[np.ndarray, "H/2"]:
        """Scales the frequencies `inverse` (inv_freq in transformers) of a RoPE with base `theta`."""
        head_dim = 2 * len(inverse)

        def dimension(rotations: float) -> float:
            """The (fractional) pair of dimensions that rotates this often within the original context."""
            wavelength = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # as in transformers: a step instead of a ramp
        ramp = np.clip((np.arange(len(inverse), dtype=np.float32) - low) / (high - low), 0, 1)
        return (inverse / np.float32(self.factor) * ramp + inverse * (1 - ramp)).astype(np.float32)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], max_positions: int) -> "YarnScaling":
        """Reads the fields of Hugging Face's RoPE object. `max_positions` is the model's max_position_embeddings."""
        original = integer(rope, "original_max_position_embeddings", max_positions)
        optional = {
            field: positive(rope, field)
            for field in ("attention_factor", "mscale", "mscale_all_dim")
            if rope.get(field) is not None
        }
        if not isinstance(truncate := rope.get("truncate", True), bool):
            raise UserError(
                f"config.json: RoPE scaling 'yarn' has truncate={truncate!r}; it must be true or false"
            )
        scaling = cls(
            positive(rope, "factor", max_positions / original),
            original,
            positive(rope, "beta_fast", 32.0),
            positive(rope, "beta_slow", 1.0),
            truncate=truncate,
            **optional,
        )
        if scaling.beta_fast < scaling.beta_slow:
            raise UserError(
                f"config.json: RoPE scaling 'yarn' has beta_fast={scaling.beta_fast:g}, which must be at least "
                f"beta_slow={scaling.beta_slow:g}"
            )
        return scaling

    def to_hf(self) -> dict[str, Any]:
        """Hugging Face's RoPE object."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {"rope_type": "yarn", **fields}


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS: Mapping[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
"""Hugging Face's rope_type -> scaling."""


def read_rope(
    rope: Mapping[str, Any], default_theta: float, max_positions: int
) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling from one of Hugging Face's RoPE objects.

    Args:
        rope: rope_parameters of transformers 5 or rope_scaling of transformers 4.
        default_theta: base if the object has none.
        max_positions: the model's max_position_embeddings.

    Raises:
        UserError: the kind of scaling is not supported, or a field of it is missing or wrong.
    """
    theta = positive(rope, "rope_theta", default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UserError(
            f"config.json: RoPE scaling rope_type={kind!r} is not supported; it must be one of default, "
            f"{', '.join(SCALINGS)}"
        )
    return theta, SCALINGS[kind].from_hf(rope, max_positions)
