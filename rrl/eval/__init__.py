"""Evaluation: methods, scoring, confidence intervals and comparison."""
