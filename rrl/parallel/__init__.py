"""Meshes, sharding rules, and what must be set up before jax starts."""
