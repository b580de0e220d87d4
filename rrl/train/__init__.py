"""The reinforcement-learning run: sample, score, compute advantages, update, log and save. Read `loop.py` first."""
