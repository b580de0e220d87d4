"""What must be set up on a host before JAX starts: its thread pool, and where compiled programs are kept."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path

from rrl.parallel.private import private_folder

log = logging.getLogger(__name__)
THREADS_PER_DEVICE = 4
"""Least width of XLA's pool on CPU, for each (virtual) device; many more threads than cores cost a third of the speed."""


def prepare_host(callbacks: bool = True) -> None:
    """Call before jax is first imported, in every launcher, notebook and test run.

    On CPU, XLA runs host callbacks on its own thread pool, which is as wide as the machine has cores. With two cores, a
    callback whose operands reach about 128 KiB waits for a copy that has no thread left to run on: the program stands
    still for ever. XLA reads the width from the variable NPROC when it starts.

    Args:
        callbacks: False: the program has none, so that the pool may be as wide as the machine, which is fastest.
    """
    given = os.environ.get("NPROC", "")
    if not callbacks:
        if given == str(_threads()):
            del os.environ["NPROC"]
        return
    wide = given.isdigit() and int(given) >= _threads()
    if not wide and "jax" in sys.modules:
        warnings.warn(
            f"jax was imported before rrl could set NPROC={_threads()}; on CPU, rollouts with retrieval may hang. "
            f"Call rrl.parallel.runtime.prepare_host() before importing jax, or set NPROC={_threads()} in the shell.",
            stacklevel=2,
        )
    if not wide:
        os.environ["NPROC"] = str(_threads())


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> int:
    """More than the machine has cores, each of which may be held by a callback that waits for a copy, and no fewer than the
    virtual devices of XLA_FLAGS need."""
    devices = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max((os.cpu_count() or 1) + 2, THREADS_PER_DEVICE * (int(devices[1]) if devices else 1))


def use_huge_pages() -> None:
    """Starts this program again with glibc's huge pages, where Linux gives them on request and nothing else was asked.

    XLA's large buffers come and go with each program on CPU; with pages of 4 KiB a fifth of the time of an update goes
    into mapping them. The C library reads the setting before Python starts, hence once again.
    """
    try:
        on_request = "[madvise]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return
    if on_request and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cache_folder() -> Path:
    """Where what is compiled stays: `rrl` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrl"


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs on disk, so that a second start is fast; returns the folder.

    JAX runs what it finds there. Where others may write to it (`rrl.parallel.private`), or it can't be made, nothing is stored, a
    warning says why, and None is returned.

    Args:
        folder: None: `jax` in `cache_folder`.
    """
    import jax

    folder = cache_folder() / "jax" if folder is None else Path(folder)
    try:
        folder = private_folder(folder)
    except OSError as error:
        log.warning(
            "Compiled programs are not kept in %s, so that each start compiles them anew: %s. Remove what others may have "
            "written, or set XDG_CACHE_HOME to a folder of your own.",
            folder,
            error,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
