"""Reads (input, output) pairs, as `launch/cold_start.py` writes them, into examples with the loss on the output."""

import dataclasses
import hashlib
import pathlib
import sys
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.fields import fields_of, text_field
from rrl.data.records import load_records
from rrl.errors import UserError, at_least
from rrl.sft.demonstrations import RecipeDataConfig
from rrl.text.chat import chat_ids
from rrl.text.encoding import plain_ids

RECORD_FORMAT = (
    "JSON lines of {input, output}, both texts, and optionally id, the same for all pairs of a question"
)


@dataclasses.dataclass(frozen=True)
class PairsConfig(RecipeDataConfig):
    """A file of pairs."""

    path: str = ""
    """The file, such as the pairs.jsonl of launch/cold_start.py."""
    held_out: int = 100
    """Number of held-out questions, taken from the end of the file, with all their pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "held_out")
        if not pathlib.Path(self.path).is_file():
            raise UserError(
                f"path={self.path!r} is not a file; give the pairs.jsonl of launch/cold_start.py, by pairs=FILE"
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file of pairs."""
        return hashlib.sha256(pathlib.Path(self.path).read_bytes()).hexdigest()


def load_pairs(
    config: PairsConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples, which share no question.

    Pairs of more than `max_tokens` tokens are dropped; a line on standard error gives their number.

    Raises:
        UserError: a record is broken (the message names its line), or no training or no held-out pair is left.
    """
    pairs = load_records(config.path, _pair, RECORD_FORMAT, "refuse", None)
    questions = list(dict.fromkeys(question for question, _, _ in pairs))
    held_out_questions = set(questions[-config.held_out :])
    train: list[Example] = []
    held_out: list[Example] = []
    long = 0
    for question, text, output in pairs:
        example = _example(tokenizer, text, output)
        if len(example) > max_tokens:
            long += 1
            continue
        (held_out if question in held_out_questions else train).append(example)
    if not train or not held_out:
        raise UserError(
            f"data.path={config.path!r}: {len(questions)} questions, with {long} pairs longer than "
            f"train.row_length={max_tokens}, leave {len(train)} pairs to train on and {len(held_out)} held out; change "
            f"data.held_out={config.held_out} or give more questions"
        )
    dropped = f"; {long} longer than {max_tokens} tokens are left out" if long else ""
    print(
        f"{config.path}: {len(train)} pairs to train on, {len(held_out)} held out{dropped}", file=sys.stderr
    )
    return train, held_out


def _pair(position: int, record: Any) -> tuple[str, str, str]:
    """Return (question id, input, output) of a record. Without an id, its position stands for the question."""
    fields = fields_of(record)
    for name in ("input", "output"):
        # Called only to raise an error for a missing or empty text. Its result is stripped; a pair is used unstripped.
        text_field(fields, name)
    return str(fields.get("id", position)), fields["input"], fields["output"]


def _example(tokenizer: PreTrainedTokenizerBase, text: str, output: str) -> Example:
    """Return the token ids that the engine would see: the input as a chat prompt, the output, and the end token."""
    prompt = chat_ids(tokenizer, text)
    targets = [*plain_ids(tokenizer, output), tokenizer.eos_token_id]
    loss = np.arange(len(prompt) + len(targets)) >= len(prompt)
    return Example(np.concatenate([prompt, np.array(targets, np.int32)]), loss)
