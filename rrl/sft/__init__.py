"""Supervised training: cold start, demonstrations, judges and text encoders."""
