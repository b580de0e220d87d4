"""Supervised training: demonstrations and cold start of a policy, judges, readers and text encoders."""
