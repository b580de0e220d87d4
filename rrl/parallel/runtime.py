"""Setup of a process before JAX starts: the thread pool's size, huge pages, and the cache of compiled programs."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path

from rrl.parallel.permissions import private_folder

log = logging.getLogger(__name__)
THREADS_PER_DEVICE = 4
"""Minimal number of threads in XLA's CPU pool per (virtual) device. It is small because a pool with many more threads than cores
costs a third of the speed."""


def prepare_host(callbacks: bool = True) -> None:
    """Sets the size of XLA's CPU thread pool. Call it before jax is first imported, in every launcher, notebook and test run.

    On CPU, XLA runs host callbacks in its own thread pool, which has one thread per core. With two cores, a callback whose
    operands reach about 128 KiB waits for a copy that has no free thread, and the program hangs. XLA reads the pool's size
    from the variable NPROC when it starts.

    Args:
        callbacks: whether the program has host callbacks. False leaves one thread per core, which is fastest, and removes the
            NPROC that an earlier call with True set. A child process inherits NPROC from its parent.
    """
    current = os.environ.get("NPROC", "")
    if not callbacks:
        if current == str(_pool_threads()):
            del os.environ["NPROC"]
        return
    is_enough = current.isdigit() and int(current) >= _pool_threads()
    if not is_enough and "jax" in sys.modules:
        warnings.warn(
            f"jax was imported before rrl could set NPROC={_pool_threads()}; on CPU, rollouts with retrieval may hang. "
            f"Call rrl.parallel.runtime.prepare_host() before importing jax, or set NPROC={_pool_threads()} in the shell.",
            stacklevel=2,
        )
    if not is_enough:
        os.environ["NPROC"] = str(_pool_threads())


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool_threads() -> int:
    """Number of threads in XLA's pool.

    It is two more than the cores, because callbacks that wait for a copy may block one thread per core. It is at least
    `THREADS_PER_DEVICE` for each virtual device in XLA_FLAGS.
    """
    devices = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max((os.cpu_count() or 1) + 2, THREADS_PER_DEVICE * (int(devices[1]) if devices else 1))


def use_huge_pages() -> None:
    """Restarts this process with huge pages for malloc, if Linux offers them on request and GLIBC_TUNABLES is not set.

    XLA on CPU allocates its large buffers anew for each program. With pages of 4 KiB, mapping them takes a fifth of an
    update's time. The C library reads the setting before Python starts, which is why the process must restart.
    """
    try:
        on_request = "[madvise]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return
    if on_request and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cache_folder() -> Path:
    """Folder for compiled code: `rrl` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrl"


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Stores compiled programs on disk, so that later starts are fast.

    JAX executes the programs that it finds there. So if other users may write to the folder (`rrl.parallel.permissions`), or it
    cannot be created, the cache stays off and a warning gives the reason.

    Args:
        folder: the cache's folder; None: the subfolder `jax` of `cache_folder()`.

    Returns:
        The folder, or None if the cache is off.
    """
    import jax

    folder = cache_folder() / "jax" if folder is None else Path(folder)
    try:
        folder = private_folder(folder)
    except OSError as error:
        log.warning(
            "Compiled programs are not cached in %s, so every start compiles them again: %s. Restrict write permission to your "
            "user and delete the folder's contents, or set XDG_CACHE_HOME to a private folder.",
            folder,
            error,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
