"""Comparisons of arms over several seeds: GRPO against its controls, PPO, ablations."""
