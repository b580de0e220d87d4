"""Models that score trajectories: judges and readers, their prompts, and the parsing of their replies."""
