"""How a policy acts: the episode engine, its environments, stop strings, sampling and searches."""
