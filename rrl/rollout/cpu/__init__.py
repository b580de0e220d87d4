"""Rollouts on a CPU: the number of workers, and array shapes that give bitwise equal results."""
