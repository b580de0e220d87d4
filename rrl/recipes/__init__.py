"""One file a paper: prompts, protocol, rewards put together, advantage shaping, the paper's numbers."""
