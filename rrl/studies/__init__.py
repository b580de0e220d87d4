"""Experiments over whole runs: comparisons, sweeps, the papers' analyses and their reproduction."""
