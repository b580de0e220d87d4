"""rrl: reinforcement learning of search agents in JAX.

Shapes, in every einsum and shape comment:

    B batch      T query time   S key time    D model       N query heads   K kv heads
    H head dim   F mlp          V vocab       L layers      G group         A turns
    C passages   E embedding
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# XLA's CPU client sizes its thread pool from NPROC when jax is first imported; with one thread a core, host
# callbacks whose operands reach about 128 KiB wait for each other for ever.
os.environ.setdefault("NPROC", "32")

_EXPORTS = {"Agent": "rrl.tool.agent", "UserError": "rrl.errors"}


def __getattr__(name: str) -> Any:
    """Import the few names offered here on first use, so that `import rrl` stays instant."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'rrl' has no attribute {name!r}")
