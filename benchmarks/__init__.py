"""Speed compared with other libraries, as ratios: `python -m benchmarks.NAME`. RESULTS.md holds the results."""

import os

from rrl.parallel.runtime import prepare_host

prepare_host()
# Set before JAX starts. By default JAX allocates three quarters of a GPU, which leaves too little for a peer's process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
