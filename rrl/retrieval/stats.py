"""What a retriever did: counts, and how long its searches took."""

import collections
import dataclasses
import threading

import numpy as np

KEPT = 4096
"""Latest calls whose latency is kept for the percentiles."""


@dataclasses.dataclass(frozen=True)
class RetrieverStats:
    """Counts since the retriever was opened."""

    calls: int = 0
    queries: int = 0
    searched: int = 0
    """Queries that reached the index; the rest were repeated in the call, cached or empty."""
    cache_hits: int = 0
    empty: int = 0
    """Queries without any text, and queries that found nothing."""
    retries: int = 0
    """Searches that were tried again."""
    failures: int = 0
    """Queries whose search failed for good."""
    seconds: float = 0.0
    """Time inside `search`, summed over threads."""
    p50_ms: float = 0.0
    """Percentiles of a call's latency, over the latest calls."""
    p90_ms: float = 0.0
    p99_ms: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.queries} queries in {self.calls} calls, {self.cache_hits} cached, {self.searched} searched, "
            f"{self.empty} found nothing, {self.failures} failed ({self.retries} retries); latency of a call "
            f"{self.p50_ms:.1f} / {self.p90_ms:.1f} / {self.p99_ms:.1f} ms (p50 / p90 / p99)"
        )


class Meter:
    """Adds up what happens; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = dict.fromkeys(
            ("calls", "queries", "searched", "cache_hits", "empty", "retries", "failures", "seconds"), 0
        )
        self._latest: collections.deque[float] = collections.deque(maxlen=KEPT)

    def add(self, **counts: int) -> None:
        """Adds to counts by their names."""
        with self._lock:
            for name, count in counts.items():
                self._sums[name] += count

    def call(self, seconds: float) -> None:
        """Notes that a call took this long."""
        with self._lock:
            self._sums["calls"] += 1
            self._sums["seconds"] += seconds
            self._latest.append(seconds)

    def read(self) -> RetrieverStats:
        """A snapshot."""
        with self._lock:
            sums, latest = dict(self._sums), list(self._latest)
        shares = [float(1000 * part) for part in np.percentile(latest or [0.0], (50, 90, 99))]
        return RetrieverStats(**sums, p50_ms=shares[0], p90_ms=shares[1], p99_ms=shares[2])  # type: ignore[arg-type]
