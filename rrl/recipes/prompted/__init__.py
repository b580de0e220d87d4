"""Prompted methods without training, such as IRCoT: each is a generator of `Generate` and `Retrieve` requests.

A method yields its requests and returns the answer; the engine runs thousands of them in parallel (`rrl.rollout.workflow`).
All prompts are zero-shot and in our own words, except that of `naive_rag`, which a paper prints. Read `single.naive_rag` first.
"""
