"""Speed against peers, as ratios: `python -m benchmarks.NAME`; what was measured is in RESULTS.md."""

import os

from rrl.parallel.runtime import prepare_host

prepare_host()
# Before JAX starts: three quarters of a GPU, which it takes at once otherwise, leave a peer in a process of its own too little.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
