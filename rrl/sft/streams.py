"""Settings of the endless streams of training examples, and their curriculum."""

import dataclasses
from collections.abc import Mapping

from rrl.errors import UserError, at_least


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """An endless stream. Each block of steps generates new sub-worlds (`rrl.miniwiki`) and takes its examples from them."""

    worlds: int = 10
    """Sub-worlds per block."""
    world_size: int = 200
    """Passages per sub-world."""
    steps_per_block: int = 20
    """Steps per block."""
    probes: int = 64
    """Held-out examples of each kind of reading task or judge prompt, from sub-worlds of the dev split. Stage evidence has
    only one kind and takes four times as many examples."""
    short_length: int = 0
    """Stage reading: row length of short blocks, in tokens; 0: no short blocks. Attention over short rows is cheaper. A step of a
    short block has more rows, so that it has as many tokens as a step of a long block."""
    short_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Stage reading: arguments of `reading_examples` in short blocks; they override `options`."""
    long_every: int = 4
    """Stage reading, with short blocks: every `long_every`-th block is long, with rows of `train.row_length` tokens."""
    curriculum: str = ""
    """"1:200;2:300": reading examples have at most 1 passage for 200 steps, then at most 2 for 300, and then as many as
    `options` allow. "": no curriculum."""
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further arguments of the function that generates the examples: `rrl.miniwiki.reading.reading_examples` or
    `rrl.miniwiki.evidence.reader_examples`. Stage verdicts: fields of `rrl.sft.judge_examples.JudgeExamplesConfig`."""

    reading: float = 0.0
    """Stage evidence: share of the tokens that come from reading examples, during the curriculum; without a curriculum
    only `reading_later` applies. Without reading examples the model does not learn to find facts in its context, because
    answers have too few target tokens."""
    reading_later: float = 0.0
    """Stage evidence: the same share after the curriculum, or in the whole run if there is no curriculum."""
    reading_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Stage evidence: arguments of `reading_examples`."""

    def __post_init__(self) -> None:
        at_least(1, self, "worlds", "world_size", "steps_per_block", "probes", "long_every", where="data.")
        at_least(0, self, "short_length", where="data.")
        parse_curriculum(self.curriculum)
        for name in ("reading", "reading_later"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"data.{name}={getattr(self, name)} must lie in 0..1.")

    def most_passages(self, step: int) -> int | None:
        """Return the curriculum's largest number of passages at a step; None after it or without a curriculum."""
        for passages, steps in parse_curriculum(self.curriculum):
            if step < steps:
                return passages
            step -= steps
        return None


def parse_curriculum(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "1:200;2:200": at most 1 passage for 200 steps, then at most 2 for 200. Returns (passages, steps) pairs."""
    try:
        pairs = tuple(tuple(map(int, part.split(":"))) for part in text.split(";") if part)
    except ValueError:
        pairs = ((),)
    if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise UserError(
            f"curriculum={text!r} must be PASSAGES:STEPS;PASSAGES:STEPS;... with whole numbers from 1"
        )
    return tuple((pair[0], pair[1]) for pair in pairs)
