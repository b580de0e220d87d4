"""Pairs of an input and an output, as `launch/cold_start.py` writes them, as examples whose loss is on the output."""

import dataclasses
import hashlib
import pathlib
import sys
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.records import fields_of, load_records, text_field
from rrl.errors import UserError, at_least
from rrl.sft.demonstrations import RecipeDataConfig
from rrl.text.chat import chat_ids
from rrl.text.encoding import plain_ids

RECORD_FORMAT = "{input, output}, two texts, and id, which pairs of one question share; JSON lines"


@dataclasses.dataclass(frozen=True)
class PairsConfig(RecipeDataConfig):
    """A file of pairs."""

    path: str = ""
    held_out: int = 100
    """Questions, the last of the file, whose pairs are held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "held_out")
        if not pathlib.Path(self.path).is_file():
            raise UserError(
                f"path={self.path!r} is no file; give the pairs.jsonl of launch/cold_start.py, by pairs=FILE"
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(pathlib.Path(self.path).read_bytes()).hexdigest()


def load_pairs(
    config: PairsConfig, tokenizer: PreTrainedTokenizerBase, most: int
) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples of at most `most` tokens, which share no question; longer ones are left out, and told.

    Raises UserError for a broken record, with its line, and for a file that leaves nothing to train on or to hold out.
    """
    pairs = load_records(config.path, _pair, RECORD_FORMAT, "refuse", None)
    asked = list(dict.fromkeys(question for question, _, _ in pairs))
    held = set(asked[-config.held_out :])
    train: list[Example] = []
    held_out: list[Example] = []
    long = 0
    for question, told, said in pairs:
        example = _example(tokenizer, told, said)
        if len(example) > most:
            long += 1
            continue
        (held_out if question in held else train).append(example)
    if not train or not held_out:
        raise UserError(
            f"data.path={config.path!r}: {len(asked)} questions, {long} pairs longer than train.row_length={most}, leave "
            f"{len(train)} pairs to train on and {len(held_out)} held out; change data.held_out={config.held_out} or give more"
        )
    left = f"; {long} longer than {most} tokens are left out" if long else ""
    print(f"{config.path}: {len(train)} pairs to train on, {len(held_out)} held out{left}", file=sys.stderr)
    return train, held_out


def _pair(position: int, record: Any) -> tuple[str, str, str]:
    fields = fields_of(record)
    for name in ("input", "output"):
        text_field(fields, name)  # something must stand there; white space at its ends counts
    return str(fields.get("id", position)), fields["input"], fields["output"]


def _example(tokenizer: PreTrainedTokenizerBase, told: str, said: str) -> Example:
    """As the engine would see it: the chat's opening, what is written, and the end of the turn."""
    prompt = chat_ids(tokenizer, told)
    own = [*plain_ids(tokenizer, said), tokenizer.eos_token_id]
    loss = np.arange(len(prompt) + len(own)) >= len(prompt)
    return Example(np.concatenate([prompt, np.array(own, np.int32)]), loss)
