"""How to score: pure reward functions and the models that judge."""
