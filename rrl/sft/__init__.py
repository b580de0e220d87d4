"""Supervised training of policies (by demonstrations and a cold start), judges, readers and text encoders."""
