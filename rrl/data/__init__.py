"""Questions, passages and trajectories, in memory and on disk."""
