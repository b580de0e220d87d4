"""Prompts in a tokenizer's own chat template."""

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError


def chat_text(tokenizer: PreTrainedTokenizerBase, user: str, system: str = "") -> str:
    """A one-turn conversation up to where the assistant begins.

    Raises UserError where the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat_template: use an instruction-tuned model's folder, "
            "or add chat_template to its tokenizer_config.json"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def chat_ids(tokenizer: PreTrainedTokenizerBase, user: str, system: str = "") -> Int[np.ndarray, "T"]:
    """Token ids of `chat_text`; it raises the same."""
    text = chat_text(tokenizer, user, system)
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
