"""Turn prompts into text and token ids with the chat template of a tokenizer. Read `Prompt` and `chat_ids` first."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError, describe_error
from rrl.text.encoding import NONCHARACTERS, break_special_tokens, find_special_token, plain_ids, template_ids
from rrl.text.encoding import text_ids as text_ids  # re-exported

_TRAILING_THINK_TAG = re.compile(r"<think>\s*\Z")
"""Matches an opening `<think>` at the end of a text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a generation. The user message is `before` + `body` + `after`.

    Functions that take a prompt also take a string: the user message of a prompt without the other fields.
    """

    before: str = ""
    """Beginning of the user message; usually the whole message if there is no `body`."""
    body: str = ""
    """Middle of the user message. `fitting_ids` truncates it at its front if the prompt is too long."""
    after: str = ""
    """End of the user message."""
    system: str = ""
    """System message; "" for none."""
    prefill: str = ""
    """Beginning of the assistant message. It is part of the prompt: it is not sampled, and its tokens are masked in the loss."""
    chat: bool = True
    """True: use the chat template. False: concatenate the texts without a template, for base models."""

    @property
    def user_message(self) -> str:
        """The whole user message."""
        return f"{self.before}{self.body}{self.after}"


def chat_text(tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, thinking: bool | None = None) -> str:
    """Return the text of a prompt, up to the point where the assistant continues.

    Args:
      tokenizer: the tokenizer whose chat template is used.
      prompt: the prompt, or the user message alone.
      thinking: `enable_thinking` of templates that have this option, such as Qwen3's; None: the template's default.

    Raises:
      UserError: the prompt needs a chat template, but the tokenizer has none or its template fails.
    """
    if isinstance(prompt, str):
        prompt = Prompt(prompt)
    if not prompt.chat:
        return f"{prompt.system}{prompt.user_message}{prompt.prefill}"
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat_template: use the folder of an instruction-tuned model, "
            "or add chat_template to its tokenizer_config.json"
        )
    text = _apply_template(tokenizer, prompt, {} if thinking is None else {"enable_thinking": thinking})
    prefill = prompt.prefill
    if trailing_think_tag(text) and trailing_think_tag(prefill):
        prefill = ""  # the template has already written the opening tag, and one is enough
    return text + prefill


def _apply_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Mapping[str, bool]) -> str:
    """Apply the chat template to the system and user messages; the prefill is not included.

    If the template refuses system messages, as Gemma's does, or ignores them, the system message is prepended to the user
    message.
    """
    user = {"role": "user", "content": prompt.user_message}
    system = {"role": "system", "content": prompt.system}
    joined = {"role": "user", "content": f"{prompt.system}\n\n{prompt.user_message}"}
    errors = []
    for messages in [[system, user], [joined]] if prompt.system else [[user]]:
        try:
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:  # the code of a template may raise anything
            errors.append(error)
            continue
        if messages[0] is not system or prompt.system.strip() in text:
            return text
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path!r}: its chat_template fails ({describe_error(errors[0])}). "
        "Fix chat_template.jinja (or chat_template in tokenizer_config.json) of that folder, or replace it by the publisher's "
        'template. If there are several named templates, name one of them "default"'
    ) from errors[0]


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Return the token ids of `chat_text`, with the same arguments and errors.

    Only the template and the prefill produce special tokens. The text of a special token in the system or user message, such as
    "<|im_end|>" in a question or a document, is encoded as plain text.
    """
    prompt = Prompt(prompt) if isinstance(prompt, str) else prompt
    messages = f"{prompt.system}{prompt.user_message}"
    if not find_special_token(tokenizer, messages):
        return template_ids(tokenizer, chat_text(tokenizer, prompt, thinking))
    # `template_ids` splits the text at each separator, so that no special token of the messages is encoded as one.
    separator = next(character for character in NONCHARACTERS if character not in messages)
    # Without a template the two messages are concatenated, and a special token's text may begin in one and end in the other.
    system, user = (prompt.system, prompt.user_message) if prompt.chat else ("", messages)
    system, user = (break_special_tokens(tokenizer, text, separator) for text in (system, user))
    split_prompt = dataclasses.replace(prompt, system=system, before=user, body="", after="")
    return template_ids(tokenizer, chat_text(tokenizer, split_prompt, thinking), separator)


_REPLY = "Yes"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")
"""Matches special tokens as chat templates write them. Templates may also write plain text, such as [INST]."""


def _example_conversation(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a conversation whose last message is `_REPLY`, in the chat template; "" if there is no template or it fails.

    The code of a template may raise anything; `chat_text` reports it when the template is used.
    """
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _REPLY}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False)) if tokenizer.chat_template else ""
    except Exception:
        return ""


def template_markers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens that the chat template writes around messages, as texts; the vocabulary may lack them."""
    return list(dict.fromkeys(_MARKER.findall(_example_conversation(tokenizer))))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special or added token that the chat template writes after the assistant's message.

    None if the tokenizer has no chat template, or if its template writes no such token.
    """
    after = _example_conversation(tokenizer).rpartition(_REPLY)[2].lstrip()
    ids = template_ids(tokenizer, after).tolist()
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def fitting_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, room: int, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Return the token ids of a prompt, truncated to at most `room` tokens; `room` must be above 0.

    A prompt that is too long is truncated at the front of its body. If that is not enough, its first tokens are dropped.
    """
    ids = chat_ids(tokenizer, prompt, thinking)
    while len(ids) > room and isinstance(prompt, Prompt) and prompt.body:
        body = plain_ids(tokenizer, prompt.body)
        # The remaining text may encode to another number of tokens, hence the loop.
        rest = str(tokenizer.decode(body[len(ids) - room :]))
        # The cut may split a character into bytes, which are decoded as U+FFFD.
        prompt = dataclasses.replace(prompt, body=rest.lstrip("\ufffd"))
        ids = chat_ids(tokenizer, prompt, thinking)
    return ids[-room:]


def trailing_think_tag(prompt: str) -> str:
    """Return the opening `<think>` at the end of a prompt, with the white space after it; "" if the prompt does not end with one.

    The templates of DeepSeek-R1's distilled models, QwQ and Qwen3-Thinking end with it. The model's text then continues the
    thought.
    """
    match = _TRAILING_THINK_TAG.search(prompt)
    return match[0] if match else ""


def template_adds_think_tag(tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt) -> bool:
    """Return whether the chat template itself, rather than the prefill of the prompt, ends with an opening `<think>`."""
    prefill = prompt.prefill if isinstance(prompt, Prompt) else ""
    return bool(trailing_think_tag(chat_text(tokenizer, prompt))) and not trailing_think_tag(prefill)


def after_thought(text: str) -> str:
    """Return the text after the last `</think>`. Without one: "" if a `<think>` is open, otherwise the whole text."""
    _, closed, after = text.rpartition("</think>")
    return after if closed or "<think>" not in text else ""
