"""Supervised training of policies (by demonstrations and a cold start), judges, readers and text encoders.

The generated training data come from `rrl.miniwiki`, the built-in world. It consists of sub-worlds: sets of passages that no fact
connects. Arguments and fields named `worlds`, and their descriptions, count sub-worlds.
"""
