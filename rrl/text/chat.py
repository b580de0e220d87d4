"""Prompts in a tokenizer's own chat template."""

import dataclasses

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError
from rrl.text.characters import whole_characters


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What opens a generation. Where only the user says something, a text alone is a prompt too."""

    user: str = ""
    body: str = ""
    """Follows `user`; the part that gives way, at its front, where not all of it fits (`fitting_ids`)."""
    after: str = ""
    """Follows `body`: the end of the user's turn."""
    system: str = ""
    prefill: str = ""
    """What the assistant's turn begins with. It is part of the prompt: nobody sampled it, and it carries no loss."""
    chat: bool = True
    """False: the texts one after the other without a template, for base models."""

    @property
    def said(self) -> str:
        """The user's turn."""
        return f"{self.user}{self.body}{self.after}"


def chat_text(tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, thinking: bool | None = None) -> str:
    """A one-turn conversation up to where the assistant goes on. `thinking`: whether a template that leaves the choice, as
    Qwen3's does, has the assistant think first; None: as the template has it.

    Raises UserError where the tokenizer has no chat template and the prompt asks for it.
    """
    if isinstance(prompt, str):
        prompt = Prompt(prompt)
    if not prompt.chat:
        return f"{prompt.system}{prompt.said}{prompt.prefill}"
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat_template: use an instruction-tuned model's folder, "
            "or add chat_template to its tokenizer_config.json"
        )
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages.append({"role": "user", "content": prompt.said})
    choice = {} if thinking is None else {"enable_thinking": thinking}
    opened = str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **choice)
    )
    return opened + prompt.prefill


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[np.ndarray, "T"]:
    """Token ids of a text as it is, but for `whole_characters`, no special tokens added."""
    text, backend = whole_characters(text), getattr(tokenizer, "backend_tokenizer", None)
    # What an earlier call asked for stays with the backend.
    if (
        backend is None
        or backend.truncation
        or backend.padding
        or backend.encode_special_tokens != tokenizer.split_special_tokens
    ):
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    # In this thread: `tokenizer.encode` hands even one text to threads, which wait for a core while rollouts have all.
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, np.int32)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Token ids of `chat_text`; it raises the same."""
    return text_ids(tokenizer, chat_text(tokenizer, prompt, thinking))


def fitting_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, room: int, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Token ids of a prompt, at most `room` of them: its body is cut at the front, and where that is not enough, all of it."""
    ids = chat_ids(tokenizer, prompt, thinking)
    while len(ids) > room and isinstance(prompt, Prompt) and prompt.body:
        body = text_ids(tokenizer, prompt.body)
        # What is left may be spelled with another number of tokens: hence the loop.
        rest = str(tokenizer.decode(body[len(ids) - room :]))
        prompt = dataclasses.replace(prompt, body=rest.lstrip("\ufffd"))  # half a character
        ids = chat_ids(tokenizer, prompt, thinking)
    return ids[-room:]


def after_thought(text: str) -> str:
    """An answer without what a reasoning model thought before it; nothing where it never came to an end of that."""
    _, closed, after = text.rpartition("</think>")
    return after if closed or "<think>" not in text else ""
