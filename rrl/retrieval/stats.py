"""Statistics of a retriever: counts of its searches, and their latency."""

import collections
import dataclasses
import threading

import numpy as np

LATENCY_WINDOW = 4096
"""Number of latest calls over which latency percentiles are computed."""


@dataclasses.dataclass(frozen=True)
class RetrieverStats:
    """Counts since the retriever was opened."""

    calls: int = 0
    queries: int = 0
    searched: int = 0
    """Queries that the index answered. The others failed, or were repeated in the call, cached, or without text."""
    cache_hits: int = 0
    empty: int = 0
    """Queries without text or without hits."""
    retries: int = 0
    """Number of repeated attempts."""
    failures: int = 0
    """Number of distinct queries with text that were not cached, over all failed calls. A call fails if one of its batches fails
    in every attempt of `RetryPolicy`."""
    seconds: float = 0.0
    """Time in `search`, summed over threads."""
    p50_ms: float = 0.0
    """Median latency of a call over the latest calls; `p90_ms` and `p99_ms` are the other percentiles."""
    p90_ms: float = 0.0
    p99_ms: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.queries} queries in {self.calls} calls, {self.cache_hits} cached, {self.searched} searched, "
            f"{self.empty} found nothing, {self.failures} failed ({self.retries} retries); latency of a call "
            f"{self.p50_ms:.1f} / {self.p90_ms:.1f} / {self.p99_ms:.1f} ms (p50 / p90 / p99)"
        )


class StatsRecorder:
    """Collect the counts and latencies of `RetrieverStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = dict.fromkeys(
            ("calls", "queries", "searched", "cache_hits", "empty", "retries", "failures", "seconds"), 0
        )
        self._latest: collections.deque[float] = collections.deque(maxlen=LATENCY_WINDOW)

    def add(self, **counts: int) -> None:
        """Add to counts, given by name."""
        with self._lock:
            for name, count in counts.items():
                self._sums[name] += count

    def record_call(self, seconds: float) -> None:
        """Record the latency of a call."""
        with self._lock:
            self._sums["calls"] += 1
            self._sums["seconds"] += seconds
            self._latest.append(seconds)

    def read(self) -> RetrieverStats:
        """Return a snapshot."""
        with self._lock:
            sums, latest = dict(self._sums), list(self._latest)
        p50, p90, p99 = (float(1000 * value) for value in np.percentile(latest or [0.0], (50, 90, 99)))
        return RetrieverStats(**sums, p50_ms=p50, p90_ms=p90, p99_ms=p99)  # type: ignore[arg-type]
