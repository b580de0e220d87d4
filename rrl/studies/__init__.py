"""Experiments over whole runs: comparisons of arms, sweeps, the papers' analyses and their reproduction."""
