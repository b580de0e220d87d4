"""Reading what a run left behind: pages of trajectories, curves, tables."""
