"""What must be set up on a host before JAX starts: its thread pool, and where compiled programs are kept."""

import os
import sys
import warnings
from pathlib import Path

CPU_THREADS = 32
"""Threads of XLA's pool on CPU."""


def prepare_host() -> None:
    """Call before jax is first imported, in every launcher, notebook and test run.

    On CPU, XLA runs host callbacks on its own thread pool, which is as wide as the machine has cores. With two cores, a
    callback whose operands reach about 128 KiB waits for a copy that has no thread left to run on: the program stands
    still for ever. XLA reads the width from the variable NPROC when it starts.
    """
    wide = os.environ.get("NPROC", "").isdigit() and int(os.environ["NPROC"]) >= CPU_THREADS
    if not wide and "jax" in sys.modules:
        warnings.warn(
            f"jax was imported before rrl could set NPROC={CPU_THREADS}; on CPU, rollouts with retrieval may hang. "
            f"Call rrl.parallel.runtime.prepare_host() before importing jax, or set NPROC={CPU_THREADS} in the shell.",
            stacklevel=2,
        )
    if not wide:
        os.environ["NPROC"] = str(CPU_THREADS)


def enable_compilation_cache(folder: str | Path | None = None) -> Path:
    """Keeps compiled programs on disk, so that a second start is fast; returns the folder.

    Args:
        folder: None: `rrl/jax` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache).
    """
    import jax

    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrl" / "jax"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder
