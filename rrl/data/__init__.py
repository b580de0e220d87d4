"""Questions, passages, the built-in world and its tokenizer."""
