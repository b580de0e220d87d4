"""Predict memory, communication and time of a run on accelerators that need not be available."""
