"""A text codec for tests of a scheduler that need no text."""

import numpy as np


class EmptyText:
    """Encodes every text to no tokens and decodes every token to no text, as a `TextCodec` would."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        return np.zeros(0, np.int32)

    def encode_plain(self, text):
        return self.encode(text)

    def encode_prompt(self, prompt):
        return self.encode(prompt)

    def decode(self, ids):
        return ""
