"""rrl: reinforcement learning of search agents in JAX.

Shapes, in every einsum and shape comment:

    B batch      T query time   S key time    D model       N query heads   K kv heads
    H head dim   F mlp          V vocab       L layers      G group         A turns
    C passages   E embedding
"""

import importlib
import os
from typing import Any

from rrl.parallel.runtime import prepare_host

__version__ = "0.1.0"

# Before anything here can import jax; see there for why.
prepare_host()
# Before transformers is imported, which would say that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_EXPORTS = {"Agent": "rrl.serve.agent", "UserError": "rrl.errors"}


def __getattr__(name: str) -> Any:
    """Import the few names offered here on first use, so that `import rrl` stays instant."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'rrl' has no attribute {name!r}")
