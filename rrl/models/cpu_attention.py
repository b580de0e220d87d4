"""Attention to a key-value cache on a processor: `cpu_attention.cc`, compiled for the machine at hand when it is first needed.

XLA on CPU copies each block of the cache before it multiplies, and writes scores and weights to memory between its loops. The
kernel reads the cache where it lies, once. A query's bits depend on its row's past alone: neither on its neighbours nor on how
many tokens come with it.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rrl.parallel.runtime import cache_folder

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_suffix(".cc")
TARGET = "rrl_cache_attention"
LANES = 16
"""A head's width must be a multiple of it."""
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
    """Each query attends to a layer's slots up to its own position; q must be scaled already. Where the position is no slot (not
    below `slots`), zeros. The other arguments are those of `rrl.models.attention.cache_attention`; all arrays are float32.

    Call `can_attend` before: it makes the kernel known to JAX.
    """
    which = jnp.arange(len(q), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    called = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    numbers = layer.astype(jnp.int32), positions.astype(jnp.int32), which
    return called(q, k, v, *numbers, slots=np.int32(slots))


def can_attend(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether the kernel is there, and made for such numbers and heads. It is compiled at the first call, once per machine; where
    it can't be, a warning says why, and XLA is to attend."""
    return jnp.dtype(dtype) == jnp.float32 and head_dim % LANES == 0 and _register()


@functools.cache
def _register() -> bool:
    """Whether JAX knows the kernel from here on."""
    try:
        library = ctypes.CDLL(str(_library(cache_folder() / "kernels")))
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(library, TARGET)), platform="cpu")
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning(
            "The attention kernel for processors could not be compiled; rollouts here take longer with XLA's. "
            "Install a C++ compiler (g++ or clang++), or name one in CXX. %s",
            said,
        )
        return False
    return True


def _library(folder: Path) -> Path:
    """The compiled kernel in a folder, where it stays; compiled, unless it is there.

    Raises:
        OSError: there is no compiler, or the folder can't be written.
        subprocess.SubprocessError: the compiler fails.
    """
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None
    )
    if compiler is None:
        raise FileNotFoundError("There is no C++ compiler.")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    known = SOURCE.read_text(), version, FLAGS, importlib.metadata.version("jaxlib"), _processor()
    library = folder / f"attention-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as apart:
            made = Path(apart) / library.name
            command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made)]
            try:
                subprocess.run([*command, NATIVE], check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError:  # a compiler that does not know the machine
                subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(made, library)  # whole, for whoever else starts
    return library


def _processor() -> str:
    """What tells machines apart that share a home folder, but not all instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = "model name", "flags", "Features"
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
