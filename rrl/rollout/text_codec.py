"""Text to token ids and back for the rollout engine: encoding is cached, and decoding joins the exact bytes of the tokens."""

import functools
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.models.tokenizer import token_bytes
from rrl.text.chat import Prompt, chat_ids
from rrl.text.encoding import find_special_token, plain_ids, text_ids

CACHED_TEXTS, MAX_CACHED_CHARACTERS = 4096, 4096
"""Size of the cache of encoded texts, and the maximum length of a text in it. Samples of a question read the same passages, and
tags repeat."""


class TextCodec:
    """Encodes and decodes text with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """`vocab_size` is the model's, at least the tokenizer's. Its additional token ids have no bytes."""
        self.tokenizer = tokenizer
        self.bytes = token_bytes(tokenizer)
        """The bytes of each token id; empty for special tokens."""
        self.special_tokens = [
            token for token, token_id in tokenizer.get_vocab().items() if not self.bytes[token_id]
        ]
        self.bytes += [b""] * (vocab_size - len(self.bytes))
        self.vocab_size = vocab_size
        """All token ids are below it."""
        self._encode_cached = functools.lru_cache(CACHED_TEXTS)(self._encode)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, without added special tokens. The array is read-only, since it may be cached."""
        return self._encode_cached(text) if len(text) <= MAX_CACHED_CHARACTERS else self._encode(text)

    def encode_plain(self, text: str) -> np.ndarray:
        """Return the token ids of text from outside, such as a passage: names of special tokens are encoded as ordinary text."""
        return (
            plain_ids(self.tokenizer, text) if find_special_token(self.tokenizer, text) else self.encode(text)
        )

    def encode_prompt(self, prompt: str | Prompt) -> np.ndarray:
        """Return the token ids of a prompt in the chat template. A string is the user's message."""
        return chat_ids(self.tokenizer, prompt)

    def _encode(self, text: str) -> np.ndarray:
        ids = text_ids(self.tokenizer, text)
        ids.setflags(write=False)
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, from their bytes. Special tokens are omitted."""
        return b"".join(map(self.bytes.__getitem__, np.asarray(ids).tolist())).decode(errors="replace")
