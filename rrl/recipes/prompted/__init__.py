"""Prompted methods, nothing of which is trained: generator functions over `Generate` and `Retrieve`, one a method.

A method is a few lines that yield what they need and return the answer; the engine runs thousands of them side by side
(`rrl.rollout.workflow`). Prompts are in our own words and without demonstrations, except where a paper prints one.
"""
