"""Speed against peers, as ratios: `python -m benchmarks.NAME`; what was measured is in RESULTS.md."""

from rrl.parallel.runtime import prepare_host

prepare_host()
