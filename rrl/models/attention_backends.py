"""Attention over a packed batch with a kernel chosen by platform: two kernels in XLA, cuDNN's, or TPU's splash attention.

Read `packed_attention` first. All kernels give the same result up to rounding: a token attends to itself and to the earlier
tokens of its segment that are in the trunk or in its own branch.
"""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.errors import UserError
from rrl.models.attention import Window, causal_attention, in_window, visible
from rrl.models.block_attention import block_attention
from rrl.parallel.mesh import ROW_AXES
from rrl.parallel.rules import fit

AttentionBackend = Literal["blocks", "xla", "cudnn", "splash"]
"""blocks: for CPUs; computes small blocks one after another and skips those without a common segment or branch. xla: few large
operations, for float32 on a GPU. cudnn: NVIDIA GPUs. splash: TPUs."""
_NO_BRANCHES = "attention=splash does not support shared prefixes: set objective.share_prefixes=False or compute.attention=xla"
LANES = 128
"""Splash attention needs lengths and head dimensions that are multiples of this."""


def choose_backend(name: str, platform: str, dtype: DTypeLike, branches: bool = False) -> AttentionBackend:
    """Chooses the kernel for a platform and checks that it runs there.

    Args:
        name: a kernel, or "auto" for the fastest one that runs there.
        platform: "cpu", "gpu" or "tpu".
        dtype: of the computation.
        branches: whether segments will have branches (`packed_attention`).

    Raises:
        UserError: the name is unknown, or the kernel does not support this platform, this dtype or branches.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if name == "auto":
        fastest: dict[str, AttentionBackend] = {
            "cpu": "blocks",
            "gpu": "cudnn" if half else "xla",
            "tpu": "xla" if branches else "splash",
        }
        return fastest.get(platform, "xla")
    if name not in get_args(AttentionBackend):
        raise UserError(
            f"attention={name!r} is unknown; choose one of auto, {', '.join(get_args(AttentionBackend))}"
        )
    if name == "splash" and platform != "tpu":
        raise UserError(f"attention=splash runs on TPUs only, but this is a {platform}; choose xla or auto")
    if name == "splash" and branches:
        raise UserError(_NO_BRANCHES)
    if name == "cudnn" and (platform != "gpu" or not half):
        raise UserError(
            f"attention=cudnn needs an NVIDIA GPU and bfloat16 or float16, but this is a {platform} and {jnp.dtype(dtype)}; "
            "choose xla or auto"
        )
    return name  # type: ignore[return-value]


def packed_attention(
    backend: AttentionBackend,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
    window: Window | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments and their branches, with the given kernel.

    Args: see `rrl.models.attention.causal_attention`.

    Raises:
        UserError: the kernel is splash, which does not support branches.
    """
    if backend == "cudnn":
        return cudnn_attention(q, k, v, segment_ids, branches, window)
    if backend == "splash":
        if branches is not None:
            raise UserError(_NO_BRANCHES)
        return splash_attention(q, k, v, segment_ids, window)
    if backend == "blocks":
        return shard_map_kernel(block_attention, q, k, v, segment_ids, branches, window)
    return causal_attention(q, k, v, segment_ids, branches, window)


def shard_map_kernel(
    kernel: Callable[..., Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    branches: Int[Array, "B T"] | None = None,
    window: Window | None = None,
) -> Float[Array, "B T N H"]:
    """Runs a kernel under `shard_map`, since XLA cannot partition the kernel itself.

    The kernel gets q, k, v, segment ids, branches, and the window's positions and size; the last three may be None. Rows are
    split over the axes data and fsdp of the current mesh, heads over tensor. If the tensor axis does not divide the
    number of key heads, they are repeated for each query head.
    """
    segments = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    labels = (segments, branches, *((None, None) if window is None else (window.positions, window.size)))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, *labels)
    if k.shape[2] % mesh.shape["tensor"]:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    # Axes that do not divide their dimension are dropped.
    spec = fit("attention", PartitionSpec(ROW_AXES, None, "tensor", None), k.shape, mesh)
    rows = PartitionSpec(*spec[:2])
    return jax.shard_map(
        kernel,
        in_specs=(spec, spec, spec, rows, rows, rows, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, *labels)


def cudnn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
    window: Window | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """cuDNN's flash attention. Segments, branches and the window are passed as a mask [B, 1, T, T]."""
    mask = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    if branches is not None:
        allowed = visible(branches, branches)[:, None]
        mask = allowed if mask is None else mask & allowed
    if window is not None:
        near = in_window(window, window.positions, window.positions)[:, None]
        mask = near if mask is None else mask & near
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=1.0, is_causal=True, implementation=implementation
    )


def splash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    window: Window | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """TPU's splash attention on the current mesh.

    A window counts columns, which is the same as positions, since segments have no branches.

    Lengths and head dimensions are padded to multiples of 128. `interpret` emulates the kernel on any platform, slowly.
    """
    length, width = q.shape[1], q.shape[3]
    segments = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    pad_length, pad_width = -length % LANES, -width % LANES
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad_length), (0, 0), (0, pad_width))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, pad_length)), constant_values=-1)

    def attend(width: int | None) -> Callable[..., Array]:
        return functools.partial(
            shard_map_kernel, functools.partial(_splash, interpret=interpret, window=width)
        )

    if window is None:
        out = attend(None)(q, k, v, segments)
    else:
        out = jax.lax.cond(window.slides, attend(window.width), attend(None), q, k, v, segments)
    return out[:, :length, :, :width]


def _splash(
    q: Array, k: Array, v: Array, segments: Array, *labels: None, interpret: bool, window: int | None
) -> Array:
    """The kernel on one device, mapped over rows. `labels` are all None; `window` is the number of visible columns."""
    length, heads = q.shape[1:3]
    block = next(size for size in (512, 256, LANES) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    shape = (length, length)
    one_head = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    mask = splash.MultiHeadMask([one_head] * heads)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)

    def one_row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        return kernel(q, k, v, splash.SegmentIds(segments, segments)).swapaxes(0, 1)

    return jax.vmap(one_row)(q, k, v, segments)
