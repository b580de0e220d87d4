"""The papers' analyses: evaluations over a varied value, or policies trained in different ways. Each one
yields a table and a plot."""
