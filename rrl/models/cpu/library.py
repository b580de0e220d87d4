"""Compiles the CPU kernels (`layers.cc`) for this machine, caches the library in the user's cache folder, and loads it."""

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
from pathlib import Path

import jax

from rrl.parallel.permissions import check_private, private_folder
from rrl.parallel.runtime import cache_folder

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("layers.cc")
HEADERS = tuple(SOURCE.with_name(f"{name}.h") for name in ("attention", "packed", "products", "sampling"))
ATTENTION, LAYERS, COPY, DRAW, PACK = TARGETS = (
    *("rrl_cache_attention", "rrl_layers", "rrl_copy_rows", "rrl_draw", "rrl_pack"),
)
"""Names of the kernels."""
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
NATIVE = "-march=native"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, whose kernels are registered with JAX; None, with a warning in the log, if it cannot be compiled."""
    try:
        library = _load_library()
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        library.rrl_supports_format.restype = ctypes.c_bool
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning(
            "The CPU kernels could not be compiled, so rollouts use XLA, which is slower. "
            "Install a C++ compiler (g++ or clang++), or set CXX to one. %s",
            reason,
        )
        return None
    return library


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
    sources = [file.read_text() for file in (SOURCE, *HEADERS)]
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
