"""The small-scale reproduction of the papers: the planned runs, the claims they test, and the page of
results."""
