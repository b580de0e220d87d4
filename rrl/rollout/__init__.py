"""How to act: the episode engine, its stop automaton, sampling, and the protocols it speaks."""
