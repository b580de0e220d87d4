"""CPU kernels for generation (`layers.cc`): decoder layers, cache attention, cache copies and token sampling.

XLA on CPU copies each layer's weights out of the stack and each block of the cache before it multiplies. It computes padding
rows too, and needs some microseconds to start each of the thirty operations of a layer. The kernels read weights and cache in
place and compute all layers in one call; `cpu_draw` computes logits, probabilities and samples in one call. Large weights are
packed first (`rrl.models.cpu.packed`). A token's result depends bitwise only on the token and the earlier tokens of its row,
not on other rows or the number of tokens in the call. This holds while the cache has no NaN.

The C++ code is compiled for this machine when it is first needed (`rrl.models.cpu.library`). The kernels have no gradient and
do not support `jax.vmap`.
"""

import functools
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig
from rrl.models.cpu.library import ATTENTION, COPY, DRAW, LAYERS, library
from rrl.models.cpu.packed import MATRICES, ROW_MAJOR, PackedMatrix, format_number

log = logging.getLogger(__name__)
WEIGHTS = (
    *("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"),
    *("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"),
)
"""Names of the layer weights, in the order of the kernel's arguments."""
LANES = 16
"""The head dimension must be a multiple of this; for `cpu_layers`, the hidden and MLP widths too."""


def cpu_attention(
    q: Float[Array, "P T N H"],
    k: Float[Array, "L blocks R K H slot"],
    v: Float[Array, "L blocks R K slot H"],
    layer: Int[Array, ""],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
    slots: int,
) -> Float[Array, "P T N H"]:
    """Attention over one layer of a cache: each query attends to the slots up to its own position.

    Call `can_attend` first; it registers the kernel with JAX. All arrays are float32.

    Args:
        q: queries, already scaled.
        k, v, layer, rows: see `rrl.models.attention.cache_attention`.
        positions: position of each query. The output is 0 for a position below 0 or not below `slots`.
        slots: of the cache.
    """
    cache_rows = jnp.arange(len(q), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    numbers = layer.astype(jnp.int32), positions.astype(jnp.int32), cache_rows
    return call(q, k, v, *numbers, slots=np.int32(slots))


def cpu_layers(
    x: Float[Array, "P T D"],
    rotary: tuple[Float[Array, "P T H/2"], Float[Array, "P T H/2"]],
    weights: Mapping[str, Float[Array, "L ..."] | PackedMatrix],
    k: Float[Array, "L blocks R K H slot"],
    v: Float[Array, "L blocks R K slot H"],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
    *,
    config: DecoderConfig,
    slots: int,
    last_layer_attends: bool,
    threads: int = 1,
) -> tuple[Float[Array, "P T D"], tuple[Array, Array]]:
    """Runs all layers of a decoder on new tokens.

    Call `can_compute` first; it checks the model and registers the kernel with JAX.

    Args:
        x: input of the first layer; all arrays except `positions` and `rows` are float32.
        rotary: cosine and sine of each token's angles.
        weights: of all layers, by their names in `rrl.models.decoder.Layer`. Either all MATRICES are packed, in one format,
            or none.
        k, v, positions, rows: see `cpu_attention`.
        config: shape of the model.
        slots: of the cache.
        last_layer_attends: False: the last layer only writes its keys and values, and the returned hidden states are meaningless.
        threads: maximum number of threads; the result is bitwise independent of it.

    Returns:
        The last layer's output, 0 for positions below 0 or not below `slots`; and k and v with the new tokens.
    """
    cache_rows = jnp.arange(len(x), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    empty = jnp.zeros(0, jnp.float32)
    formats = {
        part.format if isinstance(part := weights[name], PackedMatrix) else ROW_MAJOR for name in MATRICES
    }
    if len(formats) > 1:
        raise ValueError(f"the matrices have different formats: {', '.join(sorted(formats))}")
    ordered = [_argument(weights.get(name, empty)) for name in WEIGHTS]
    first_args = positions.astype(jnp.int32), cache_rows, x, *rotary
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (x, k, v)]
    aliases = {len(first_args): 1, len(first_args) + 1: 2}
    call = jax.ffi.ffi_call(LAYERS, shapes, input_output_aliases=aliases)
    numbers = {"slots": slots, "heads": config.heads, "mlp": config.mlp, "threads": threads}
    numbers["format"] = format_number(formats.pop())
    options = {name: np.int32(number) for name, number in numbers.items()} | {
        "eps": np.float32(config.rms_eps)
    }
    out, *pair = call(*first_args, k, v, *ordered, last_layer_attends=last_layer_attends, **options)
    return out, tuple(pair)


def _argument(weights: Array | PackedMatrix) -> Array:
    """The kernel's argument for some weights."""
    return weights.data if isinstance(weights, PackedMatrix) else weights.astype(jnp.float32)


def cpu_copy(
    k: Float[Array, "L blocks R K H slot"],
    v: Float[Array, "L blocks R K slot H"],
    source: Int[Array, "P"],
    target: Int[Array, "P"],
    begin: Int[Array, "P"],
    end: Int[Array, "P"],
    *,
    threads: int = 1,
) -> tuple[Array, Array]:
    """Copies blocks begin[p]..end[p]-1 of row `source[p]` to row `target[p]`, in all layers.

    Call `can_attend` first; it registers the kernel with JAX. All sources are read before any target is written. Entries
    whose source or target is not a row are ignored. `threads` is the maximum number of threads.
    """
    indices = [part.astype(jnp.int32) for part in (source, target, begin, end)]
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (k, v)]
    call = jax.ffi.ffi_call(COPY, shapes, input_output_aliases={len(indices): 0, len(indices) + 1: 1})
    return tuple(call(*indices, k, v, threads=np.int32(threads)))


def cpu_draw(
    hidden: Float[Array, "B D"],
    table: Float[Array, "D V"] | PackedMatrix,
    uniform: Float[Array, "B"],
    temperature: Float[Array, "B"],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    threads: int = 1,
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
    """Samples a token from the logits hidden @ table, like `rrl.rollout.sampling.sample`.

    Call `can_attend` first; it registers the kernel with JAX. D and V must be multiples of LANES; it computes in float32.

    Args:
        hidden: hidden states.
        table: unembedding table; if packed, one matrix.
        uniform: a random number in [0, 1) for each token, for inverse-CDF sampling.
        temperature: 0 is greedy.
        top_p: samples from the smallest set of most likely tokens whose total probability is at least this.
        top_k: samples from this many most likely tokens; 0: all.
        threads: maximum number of threads.

    Returns:
        Token ids; their log-probabilities at temperature 1 among all tokens; and their log-probabilities with temperature,
        top-k and top-p, 0 if greedy.
    """
    shapes = [jax.ShapeDtypeStruct(uniform.shape, dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    call = jax.ffi.ffi_call(DRAW, shapes)
    name, width = (
        (table.format, table.width) if isinstance(table, PackedMatrix) else (ROW_MAJOR, table.shape[1])
    )
    numbers = {"top_k": top_k, "vocabulary": width, "format": format_number(name), "threads": threads}
    options = {name: np.int32(number) for name, number in numbers.items()} | {"top_p": np.float32(top_p)}
    return tuple(call(hidden.astype(jnp.float32), _argument(table), uniform, temperature, **options))


def can_compute(config: DecoderConfig, dtype: DTypeLike) -> bool:
    """Whether `cpu_layers` supports this model and dtype; compiles the kernels at the first call (see `can_attend`)."""
    aligned = config.hidden % LANES == 0 == config.mlp % LANES
    return aligned and supports(config) and can_attend(dtype, config.head_dim)


def supports(config: DecoderConfig) -> bool:
    """Whether the kernels compute what layers of this family need. If not, it logs so once; the caller must then use XLA."""
    family = config.family
    unsupported = (
        bool(config.windows) or family.post_norms or family.norms_add_one or family.activation != "silu"
    )
    if unsupported:
        _log_unsupported(config.model_type, bool(config.windows))
    return not unsupported


@functools.cache
def _log_unsupported(model_type: str, windows: bool) -> None:
    log.info(
        "The CPU kernels do not support %s%s, so rollouts use XLA, which is slower.",
        model_type,
        " with sliding windows" if windows else "",
    )


def can_attend(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether `cpu_attention` supports this dtype and head dimension.

    The first call compiles the kernels, once per machine, and registers them with JAX. If that fails, it logs a warning with
    the reason and returns False; the caller must then use XLA.
    """
    return jnp.dtype(dtype) == jnp.float32 and head_dim % LANES == 0 and library() is not None
