"""Write pages, plots and tables of trajectories and metrics."""
