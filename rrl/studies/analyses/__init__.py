"""The papers' analyses: evaluations over a value that is varied, policies trained in different ways; each a table and a plot."""
