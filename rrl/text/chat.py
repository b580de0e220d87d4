"""Prompts in a tokenizer's own chat template."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError, describe_error
from rrl.text.encoding import NONCHARACTERS, plain_ids, special_name, split_names, template_ids
from rrl.text.encoding import text_ids as text_ids

_OPENED = re.compile(r"<think>\s*\Z")


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
    def user_message(self) -> str:
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
        return f"{prompt.system}{prompt.user_message}{prompt.prefill}"
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat_template: use an instruction-tuned model's folder, "
            "or add chat_template to its tokenizer_config.json"
        )
    opened = _templated(tokenizer, prompt, {} if thinking is None else {"enable_thinking": thinking})
    prefill = prompt.prefill
    if opened_thought(opened) and opened_thought(prefill):
        prefill = ""  # one thought is opened, not two
    return opened + prefill


def _templated(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, choice: Mapping[str, bool]) -> str:
    """The conversation in the tokenizer's template. A template that refuses system messages, as Gemma's does, or leaves
    them out gets the system's text at the start of the user's."""
    user = {"role": "user", "content": prompt.user_message}
    system = {"role": "system", "content": prompt.system}
    joined = {"role": "user", "content": f"{prompt.system}\n\n{prompt.user_message}"}
    errors = []
    for messages in [[system, user], [joined]] if prompt.system else [[user]]:
        try:
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **choice)
            )
        except Exception as error:  # whatever the code of a template raises
            errors.append(error)
            continue
        if messages[0] is not system or prompt.system.strip() in text:
            return text
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path!r}: its chat_template fails ({describe_error(errors[0])}). "
        "Mend chat_template.jinja (or "
        "chat_template in tokenizer_config.json) of that folder, or put the template of the model's publisher there; of several "
        'named templates call one "default"'
    ) from errors[0]


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Token ids of `chat_text`; it raises the same. Only the template and the prefill make control tokens: where a question or a
    document names one, that is text."""
    prompt = Prompt(prompt) if isinstance(prompt, str) else prompt
    written = f"{prompt.system}{prompt.user_message}"
    if not special_name(tokenizer, written):
        return template_ids(tokenizer, chat_text(tokenizer, prompt, thinking))
    cut = next(mark for mark in NONCHARACTERS if mark not in written)
    system, user = (prompt.system, prompt.user_message) if prompt.chat else ("", written)
    system, user = (split_names(tokenizer, text, cut) for text in (system, user))
    marked = dataclasses.replace(prompt, system=system, user=user, body="", after="")
    return template_ids(tokenizer, chat_text(tokenizer, marked, thinking), cut)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special or added token that the chat template puts behind what the assistant says; None where it has none, or there is
    no template."""
    said = "Yes"
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": said}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False)) if tokenizer.chat_template else ""
    except Exception:  # whatever the code of a template raises; `chat_text` says so where it is used
        return None
    after = text.rpartition(said)[2].lstrip()
    ids = template_ids(tokenizer, after).tolist()
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def fitting_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt, room: int, thinking: bool | None = None
) -> Int[np.ndarray, "T"]:
    """Token ids of a prompt, at most `room` of them: its body is cut at the front, and where that is not enough, all of it."""
    ids = chat_ids(tokenizer, prompt, thinking)
    while len(ids) > room and isinstance(prompt, Prompt) and prompt.body:
        body = plain_ids(tokenizer, prompt.body)
        # What is left may be spelled with another number of tokens: hence the loop.
        rest = str(tokenizer.decode(body[len(ids) - room :]))
        prompt = dataclasses.replace(prompt, body=rest.lstrip("\ufffd"))  # half a character
        ids = chat_ids(tokenizer, prompt, thinking)
    return ids[-room:]


def opened_thought(prompt: str) -> str:
    """The `<think>`, with the white space behind it, that a prompt ends with; "" where it ends with none. DeepSeek-R1's
    distillates, QwQ and Qwen3-Thinking have it in their templates: what the model writes continues it."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def opened_by_template(tokenizer: PreTrainedTokenizerBase, prompt: str | Prompt) -> bool:
    """Whether the chat template opens a thought behind this prompt, which the prompt's own prefill does not."""
    own = prompt.prefill if isinstance(prompt, Prompt) else ""
    return bool(opened_thought(chat_text(tokenizer, prompt))) and not opened_thought(own)


def after_thought(text: str) -> str:
    """An answer without what a reasoning model thought before it; nothing where it never came to an end of that."""
    _, closed, after = text.rpartition("</think>")
    return after if closed or "<think>" not in text else ""
