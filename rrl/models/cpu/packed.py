"""Packed weight matrices for the CPU kernels (`packed.h`).

Products with a large row-major matrix spend half of their time on copying its columns into contiguous memory. A packed matrix is
copied once, and may have a smaller number format:

- float32: the same product as with XLA, except for the order of the sum.
- bfloat16: weights and inputs of a product are rounded to bfloat16; sums are float32. A decode step reads half of the memory.
  Needs AVX512_BF16.
- int8: symmetric rounding, with one scale per output (weights) and one per token (inputs); sums are exact. A decode step reads a
  quarter of the memory. Needs AVX512_VNNI.

Norms, softmax, RoPE, the residual stream and the cache remain float32 in all formats.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from rrl.models.cpu.library import PACK, library
from rrl.models.decoder import TABLE, Decoder

ROW_MAJOR = "row_major"
FORMATS = (ROW_MAJOR, "float32", "bfloat16", "int8")
"""All formats, in the order of `Format` in packed.h. Row-major matrices are not packed."""
BITS = {"float32": 32, "bfloat16": 16, "int8": 8}
"""Bits of a number in each packed format."""
INSTRUCTIONS = {"bfloat16": "AVX512_BF16", "int8": "AVX512_VNNI"}
"""The processor's extension that a format needs."""
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""The weights of a layer that may be packed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """Matrices [inner, width] of L layers, in a packed format."""

    data: UInt8[Array, "L bytes"]
    format: str = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})
    """Columns of a matrix."""


def format_number(name: str) -> int:
    """The kernels' number of a format."""
    return FORMATS.index(name)


def supports_format(name: str) -> bool:
    """Whether this CPU has the instructions of a packed format. False if the kernels cannot be compiled."""
    kernels = library()
    return kernels is not None and kernels.rrl_supports_format(format_number(name))


def packed_bytes(inner: int, width: int, name: str) -> int:
    """Bytes of a packed matrix [inner, width]; int8 adds a scale and a sum for each column."""
    return inner * width * BITS[name] // 8 + (8 * width if name == "int8" else 0)


def pack(
    matrices: Float[Array, "L ..."],
    name: str,
    *,
    inner_axes: int = 1,
    transposed: bool = False,
    threads: int = 1,
) -> PackedMatrix:
    """Packs the matrices of L layers.

    Args:
        matrices: [L, inner..., width...], converted to float32. The products of the inner and of the output axes must be
            multiples of 16.
        name: a packed format. Call `supports_format` first; it registers the kernels with JAX.
        inner_axes: number of axes over which a product sums; 1 if `transposed`.
        transposed: the output axis comes first: [L, width, inner].
        threads: maximum number of threads.

    Raises:
        ValueError: the sizes are no multiples of 16.
    """
    layers, *axes = matrices.shape
    inner, width = math.prod(axes[:inner_axes]), math.prod(axes[inner_axes:])
    if inner % 16 or width % 16:
        raise ValueError(f"a matrix of {inner} x {width} cannot be packed: both must be multiples of 16")
    flat = matrices.reshape(layers, inner, width).astype(jnp.float32)
    if transposed:
        inner, width = width, inner
    out = jax.ShapeDtypeStruct((layers, packed_bytes(inner, width, name)), jnp.uint8)
    call = jax.ffi.ffi_call(PACK, out)
    numbers = {"format": np.int32(format_number(name)), "threads": np.int32(threads)}
    data = call(flat, transposed=transposed, **numbers)
    return PackedMatrix(data, name, width)


def pack_decoder(decoder: Decoder, name: str, threads: int = 1) -> None:
    """Sets `Decoder.kernel_weights` to packed copies of the layers' matrices and of the unembedding table.

    The table is left out if the vocabulary is no multiple of 16.

    Args:
        decoder: a model without adapters, for which `rrl.models.cpu.layers.can_compute` is True.
        name: a packed format for which `supports_format` is True.
        threads: maximum number of threads.
    """
    packed = {
        matrix: pack(
            getattr(decoder.layers, matrix)[...], name, inner_axes=2 if matrix == "o" else 1, threads=threads
        )
        for matrix in MATRICES
    }
    if decoder.config.vocab_size % 16 == 0:
        tied = decoder.config.tie_embeddings
        table = (decoder.embedding if tied else decoder.head)[...][None]
        packed[TABLE] = pack(table, name, transposed=tied, threads=threads)
    decoder.kernel_weights = nnx.data(packed)
