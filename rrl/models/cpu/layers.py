"""CPU kernels for generation (`layers.cc`): decoder layers, cache attention, cache copies and token sampling.

XLA on CPU copies each layer's weights out of the stack and each block of the cache before it multiplies. It computes padding
rows too, and needs some microseconds to start each of the thirty operations of a layer. The kernels read weights and cache in
place and compute all layers in one call; `cpu_draw` computes logits, probabilities and samples in one call. A token's
result depends bitwise only on the token and the earlier tokens of its row, not on other rows or the number of tokens in the
call. This holds while the cache has no NaN.

The C++ code is compiled for this machine when it is first needed. The kernels have no gradient and do not support `jax.vmap`.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig
from rrl.parallel.permissions import check_private, private_folder
from rrl.parallel.runtime import cache_folder

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".cc")
HEADER = SOURCE.with_name("products.h")
TARGETS = "rrl_cache_attention", "rrl_layers", "rrl_copy_rows", "rrl_draw"
ATTENTION, LAYERS, COPY, DRAW = TARGETS
WEIGHTS = (
    *("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"),
    *("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"),
)
"""Names of the layer weights, in the order of the kernel's arguments."""
LANES = 16
"""The head dimension must be a multiple of this; for `cpu_layers`, the hidden and MLP widths too."""
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
NATIVE = "-march=native"


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
    weights: Mapping[str, Float[Array, "L ..."]],
    k: Float[Array, "L blocks R K H slot"],
    v: Float[Array, "L blocks R K slot H"],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
    *,
    slots: int,
    eps: float,
    last_layer_attends: bool,
    threads: int = 1,
) -> tuple[Float[Array, "P T D"], tuple[Array, Array]]:
    """Runs all layers of a decoder on new tokens.

    Call `can_compute` first; it checks the model and registers the kernel with JAX.

    Args:
        x: input of the first layer; all arrays except `positions` and `rows` are float32.
        rotary: cosine and sine of each token's angles.
        weights: of all layers, by their names in `rrl.models.decoder.Layer`.
        k, v, positions, rows: see `cpu_attention`.
        slots: of the cache.
        eps: of the norms.
        last_layer_attends: False: the last layer only writes its keys and values, and the returned hidden states are meaningless.
        threads: maximum number of threads; the result is bitwise independent of it.

    Returns:
        The last layer's output, 0 for positions below 0 or not below `slots`; and k and v with the new tokens.
    """
    cache_rows = jnp.arange(len(x), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    empty = jnp.zeros(0, jnp.float32)
    ordered = [weights.get(name, empty).astype(jnp.float32) for name in WEIGHTS]
    first_args = positions.astype(jnp.int32), cache_rows, x, *rotary
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (x, k, v)]
    aliases = {len(first_args): 1, len(first_args) + 1: 2}
    call = jax.ffi.ffi_call(LAYERS, shapes, input_output_aliases=aliases)
    numbers = {"slots": np.int32(slots), "eps": np.float32(eps), "threads": np.int32(threads)}
    out, *pair = call(*first_args, k, v, *ordered, last_layer_attends=last_layer_attends, **numbers)
    return out, tuple(pair)


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
    table: Float[Array, "D V"],
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
        table: unembedding table.
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
    hidden, table = (part.astype(jnp.float32) for part in (hidden, table))
    numbers = {"top_p": np.float32(top_p), "top_k": np.int32(top_k), "threads": np.int32(threads)}
    return tuple(call(hidden, table, uniform, temperature, **numbers))


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
    return jnp.dtype(dtype) == jnp.float32 and head_dim % LANES == 0 and _register()


@functools.cache
def _register() -> bool:
    """Compiles and registers the kernels; returns False and logs a warning if that fails."""
    try:
        library = _load_library()
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning(
            "The CPU kernels could not be compiled, so rollouts use XLA, which is slower. "
            "Install a C++ compiler (g++ or clang++), or set CXX to one. %s",
            reason,
        )
        return False
    return True


def _load_library() -> ctypes.CDLL:
    """Loads the compiled kernels from the user's cache.

    If other users may write to the cache, compiles the kernels into a private temporary folder instead.

    Raises:
        PermissionError: other users may write to the temporary folder too.
        OSError, subprocess.SubprocessError, ValueError: see `_compiled_library`.
    """
    folder = cache_folder() / "kernels"
    try:
        folder = private_folder(folder)
    except OSError as error:
        log.warning(
            "The compiled CPU kernels are not cached in %s, so every start compiles them again: %s. Restrict write permission "
            "to your user and delete the folder's contents, or set XDG_CACHE_HOME to a private folder.",
            folder,
            error,
        )
        with tempfile.TemporaryDirectory(prefix="rrl-kernels-") as temporary:
            # After loading, the file is no longer needed.
            return ctypes.CDLL(str(_compiled_library(private_folder(Path(temporary)))))
    return ctypes.CDLL(str(_compiled_library(folder)))


def _compiled_library(folder: Path) -> Path:
    """Path of the compiled library in a folder; compiles it unless `_is_trusted` accepts an existing one.

    Without a compiler, uses a library that an earlier compiler made from the same source.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.SubprocessError: the compiler fails.
        ValueError: CXX cannot be parsed.
    """
    sources = SOURCE.read_text(), HEADER.read_text()
    name = f"layers-{_digest(*sources, NATIVE, FLAGS, importlib.metadata.version('jaxlib'), processor())}"
    requested = shlex.split(os.environ.get("CXX", ""))
    if requested and not shutil.which(requested[0]):
        log.warning("CXX=%s: no such program; trying other compilers", requested[0])
    candidates = requested, ["c++"], ["g++"], ["clang++"]
    compiler = next((argv for argv in candidates if argv and shutil.which(argv[0])), None)
    if compiler is None:
        if compiled := [file for file in sorted(folder.glob(f"{name}-*.so")) if _is_trusted(file)]:
            return compiled[0]
        raise FileNotFoundError("There is no C++ compiler.")
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    library = folder / f"{name}-{_digest(version, compiler)}.so"
    if not _is_trusted(library):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary) / library.name
            command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(output)]
            try:
                subprocess.run([*command, NATIVE], check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError:  # the compiler does not support -march=native
                subprocess.run(command, check=True, capture_output=True, text=True)
            output.chmod(0o700)  # independent of the umask
            content = output.read_bytes()
            checksum = Path(temporary) / _checksum_file(library).name
            for file, data in ((output, content), (checksum, hashlib.sha256(content).hexdigest().encode())):
                with file.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
            checksum.chmod(0o600)
            os.replace(checksum, _checksum_file(library))
            os.replace(output, library)  # atomic, since other processes may start
    return library


def _checksum_file(library: Path) -> Path:
    """File with the SHA-256 of a library. A library that a power failure truncated would crash the process when loaded."""
    return library.with_suffix(".sha256")


def _is_trusted(library: Path) -> bool:
    """Whether a library exists, is unchanged since it was compiled, and cannot have been written by other users."""
    try:
        check_private(library)
        check_private(_checksum_file(library))
        if hashlib.sha256(library.read_bytes()).hexdigest() != _checksum_file(library).read_text():
            log.warning("%s differs from what was compiled; compiling it again", library)
            return False
    except FileNotFoundError:
        return False
    except PermissionError as error:
        log.warning("A compiled CPU kernel is not loaded, since other users could have changed it: %s", error)
        return False
    return True


def _digest(*values: object) -> str:
    """A short hash of values, for file names."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def processor() -> str:
    """CPU model and instruction sets. They distinguish machines that share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = "model name", "flags", "Features"
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
