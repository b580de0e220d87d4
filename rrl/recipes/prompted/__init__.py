"""Prompted methods without training, such as IRCoT: each is a generator of `Generate` and `Retrieve` requests.

A method yields its requests and returns the answer; the engine runs thousands of them in parallel (`rrl.rollout.workflow`).
Prompts are in our own words and zero-shot, unless a paper prints its prompt. Read `single.naive_rag` first.
"""
