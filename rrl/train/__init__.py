"""Reinforcement learning: sample, score, compute advantages, update, log and save. `loop.py` is the page to read first."""
