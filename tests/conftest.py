"""Before jax is imported: threads enough for host callbacks, eight virtual devices, so that sharding is tested, and LLVM's
quickest code, since tests compile for longer than they compute; and what one has compiled the others find. Afterwards: a limit
to what one process may hold."""

import atexit
import importlib.util
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.memory import collect, memory_maps


def _knows(flag: str) -> bool:
    """Whether the XLA that is installed has a flag. One that it has not would end the process."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = spec.submodule_search_locations
    for library in Path(folder).glob("libjax_common.*"):
        with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(flag.lstrip("-").encode()) >= 0
    return False


os.environ.setdefault("NPROC", "32")
FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_backend_optimization_level": 0,
    # The emitters of users' programs take twice as long to compile; .ci/run has the slow tests use them.
    "--xla_cpu_use_fusion_emitters": "false",
}
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", "") and _knows(flag):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the processes that this one starts have it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="rrl-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

WORKERS = 4
"""Test processes at most, one a core: each takes up to 4 GB."""
MOST_MAPS = 20_000
"""Memory maps of one process. Linux allows 65,530 (`vm.max_map_count`), and a process that wants more crashes; each compiled
program has some."""
MANY_MAPS = 10_000
"""From here on compiled programs are given back between two tests."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` starts (pyproject.toml)."""
    from rrl.parallel.runtime import available_cores

    return min(available_cores(), WORKERS)


@pytest.fixture(autouse=True)
def _bounded_maps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives compiled programs back after a test, where there are many; fails where one test alone makes too many."""
    yield
    maps = memory_maps()
    if maps > MANY_MAPS and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        collect()
    assert maps < MOST_MAPS, f"{request.node.nodeid}: this process holds {maps} memory maps"
