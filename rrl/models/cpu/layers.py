"""A decoder's layers, and its draws, on a processor: `layers.cc`, compiled for the machine at hand when it is first needed.

XLA on CPU copies each layer's weights out of the stack and each block of the cache before it multiplies, computes rows that
are not there, and takes some microseconds to begin each of the thirty operations of a layer. The kernel reads weights and cache
where they lie, and does all layers at once; likewise logits, their probabilities and the draw of a token. A token's bits depend
on its row's past alone: neither on its neighbours nor on how many tokens come with it, as long as the cache holds numbers only.
It has no gradient, and no rule for `jax.vmap`.
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
from rrl.parallel.private import private_folder, refuse_shared
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
"""In the kernel's order."""
LANES = 16
"""A head's width must be a multiple of it; for all layers, the hidden state's and the MLP's too."""
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
    """Each query attends to a layer's slots up to its own position; q must be scaled already. Where the position is no slot
    (below 0, or not below `slots`), zeros. The other arguments are those of `rrl.models.attention.cache_attention`; all arrays
    are float32.

    Call `can_attend` before: it makes the kernel known to JAX.
    """
    which = jnp.arange(len(q), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    called = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    numbers = layer.astype(jnp.int32), positions.astype(jnp.int32), which
    return called(q, k, v, *numbers, slots=np.int32(slots))


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
    last_reads: bool,
    threads: int = 1,
) -> tuple[Float[Array, "P T D"], tuple[Array, Array]]:
    """What comes out of a decoder's last layer, and the cache with these tokens' keys and values.

    Zeros come out for what has no slot (a position below 0, or not below `slots`).

    Args:
        x: what goes into the first layer; all arrays but `positions` and `rows` are float32.
        rotary: cosine and sine of each token's angles.
        weights: of all layers, by their names in `rrl.models.decoder.Layer`.
        k, v, positions, rows: as those of `cpu_attention`.
        slots: of the cache.
        eps: of the norms.
        last_reads: whether the last layer does more than write its keys and values; if not, what comes out means nothing.
        threads: most that compute; bits don't depend on it.

    Call `can_compute` before: it makes the kernel known to JAX.
    """
    which = jnp.arange(len(x), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    empty = jnp.zeros(0, jnp.float32)
    named = [weights.get(name, empty).astype(jnp.float32) for name in WEIGHTS]
    before = positions.astype(jnp.int32), which, x, *rotary
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (x, k, v)]
    aliases = {len(before): 1, len(before) + 1: 2}
    called = jax.ffi.ffi_call(LAYERS, shapes, input_output_aliases=aliases)
    numbers = {"slots": np.int32(slots), "eps": np.float32(eps), "threads": np.int32(threads)}
    out, *pair = called(*before, k, v, *named, last_reads=last_reads, **numbers)
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
    """The cache with the blocks from `begin[p]` on, before `end[p]`, of row `source[p]` in row `target[p]`, all of them as they
    were; what is no row is left out. `threads` is the most that copy.

    Call `can_attend` before: it makes the kernel known to JAX.
    """
    which = [part.astype(jnp.int32) for part in (source, target, begin, end)]
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (k, v)]
    called = jax.ffi.ffi_call(COPY, shapes, input_output_aliases={len(which): 0, len(which) + 1: 1})
    return tuple(called(*which, k, v, threads=np.int32(threads)))


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
    """A token for each hidden state, as `rrl.rollout.sampling.sample` draws it from the logits hidden @ table, each by a number
    in [0, 1): among the `top_k` likeliest (0: all), and of these the fewest that make up `top_p`. And its log-probabilities. At
    temperature 0 it is greedy. D and V must be multiples of LANES; it computes in float32.

    Call `can_attend` before: it makes the kernel known to JAX.
    """
    shapes = [jax.ShapeDtypeStruct(uniform.shape, dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    called = jax.ffi.ffi_call(DRAW, shapes)
    hidden, table = (part.astype(jnp.float32) for part in (hidden, table))
    numbers = {"top_p": np.float32(top_p), "top_k": np.int32(top_k), "threads": np.int32(threads)}
    return tuple(called(hidden, table, uniform, temperature, **numbers))


def can_compute(config: DecoderConfig, dtype: DTypeLike) -> bool:
    """Whether the kernel is there, and made for such numbers and shapes (see `can_attend`)."""
    whole = config.hidden % LANES == 0 == config.mlp % LANES
    return whole and can_attend(dtype, config.head_dim)


def can_attend(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether the kernel is there, and made for such numbers and heads. It is compiled at the first call, once per machine; where
    it can't be, a warning says why, and XLA is to attend."""
    return jnp.dtype(dtype) == jnp.float32 and head_dim % LANES == 0 and _register()


@functools.cache
def _register() -> bool:
    """Whether JAX knows the kernel from here on."""
    try:
        library = _loaded()
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning(
            "The kernel for processors could not be compiled; rollouts here take longer with XLA's. "
            "Install a C++ compiler (g++ or clang++), or name one in CXX. %s",
            said,
        )
        return False
    return True


def _loaded() -> ctypes.CDLL:
    """The compiled kernel from the user's cache, or, where others may write to that, compiled into a folder of its own.

    Raises what `_library` raises, and PermissionError where others may write to the folder for temporary files, too.
    """
    folder = cache_folder() / "kernels"
    try:
        folder = private_folder(folder)
    except OSError as error:
        log.warning(
            "The kernel for processors is not kept in %s, so that each start compiles it anew: %s. Remove what others may have "
            "written, or set XDG_CACHE_HOME to a folder of your own.",
            folder,
            error,
        )
        with tempfile.TemporaryDirectory(prefix="rrl-kernels-") as apart:
            return ctypes.CDLL(
                str(_library(private_folder(Path(apart))))
            )  # once loaded, it needs its file no more
    return ctypes.CDLL(str(_library(folder)))


def _library(folder: Path) -> Path:
    """The compiled kernel in a folder, where it stays; compiled, unless it is there and nobody else may have written it. Where
    there is no compiler, what another one has made of it.

    Raises:
        OSError: there is no compiler, or the folder can't be written.
        subprocess.SubprocessError: the compiler fails.
        ValueError: CXX can't be read.
    """
    sources = SOURCE.read_text(), HEADER.read_text()
    name = f"layers-{_short(*sources, NATIVE, FLAGS, importlib.metadata.version('jaxlib'), processor())}"
    wished = shlex.split(os.environ.get("CXX", ""))
    if wished and not shutil.which(wished[0]):
        log.warning("CXX=%s: there is no such program here; another compiler is looked for", wished[0])
    named = wished, ["c++"], ["g++"], ["clang++"]
    compiler = next((words for words in named if words and shutil.which(words[0])), None)
    if compiler is None:
        if kept := [file for file in sorted(folder.glob(f"{name}-*.so")) if _is_ours(file)]:
            return kept[0]
        raise FileNotFoundError("There is no C++ compiler.")
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    library = folder / f"{name}-{_short(version, compiler)}.so"
    if not _is_ours(library):
        with tempfile.TemporaryDirectory(dir=folder) as apart:
            made = Path(apart) / library.name
            command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made)]
            try:
                subprocess.run([*command, NATIVE], check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError:  # a compiler that does not know the machine
                subprocess.run(command, check=True, capture_output=True, text=True)
            made.chmod(0o700)  # whatever the umask
            content = made.read_bytes()
            seal = Path(apart) / _seal(library).name
            for file, data in ((made, content), (seal, hashlib.sha256(content).hexdigest().encode())):
                with file.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
            seal.chmod(0o600)
            os.replace(seal, _seal(library))
            os.replace(made, library)  # whole, for whoever else starts
    return library


def _seal(library: Path) -> Path:
    """The file with the SHA-256 of a compiled kernel: to load one that a power failure left in part would end the process."""
    return library.with_suffix(".sha256")


def _is_ours(library: Path) -> bool:
    """Whether it is there as it was compiled, and nobody else may have written it."""
    try:
        refuse_shared(library)
        refuse_shared(_seal(library))
        if hashlib.sha256(library.read_bytes()).hexdigest() != _seal(library).read_text():
            log.warning("%s is not what was compiled there: it is compiled again", library)
            return False
    except FileNotFoundError:
        return False
    except PermissionError as error:
        log.warning("A compiled kernel is not loaded: %s", error)
        return False
    return True


def _short(*known: object) -> str:
    """A name for what is known."""
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def processor() -> str:
    """What tells machines apart that share a home folder, but not all instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = "model name", "flags", "Features"
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
