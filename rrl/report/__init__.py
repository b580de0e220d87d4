"""Pages, plots and tables of trajectories and metrics."""
