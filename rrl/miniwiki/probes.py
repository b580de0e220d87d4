"""Held-out reading tasks by kind, one of `READING_TASKS` per example, to measure what a pretrained model can do."""

from collections.abc import Mapping

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.miniwiki import MiniWiki
from rrl.miniwiki.lookup import WikiLookup
from rrl.miniwiki.reading import ExampleWriter
from rrl.miniwiki.reading_tasks import READING_TASKS


def reading_probes(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    n: int,
    *,
    passages: int = 5,
    limit: int = 640,
) -> Mapping[str, list[Example]]:
    """Return `n` examples of each kind of task. Only the answers to the task and to its follow-up tasks are targets.

    Args:
      wiki: a world whose names do not occur in training.
      tokenizer: the tokenizer of the model.
      seed: seed of all random choices.
      n: number of examples of each kind.
      passages: number of passages before the task.
      limit: maximum length of an example in tokens; longer examples are dropped.
    """
    rng = np.random.default_rng((seed, 3))
    lookup, writer = WikiLookup(wiki), ExampleWriter(tokenizer)
    probes: dict[str, list[Example]] = {}
    for task in READING_TASKS:
        examples: list[Example] = []
        while len(examples) < n:
            seen = lookup.sample_entities(rng, passages)
            if segments := task(lookup, rng, seen):
                text = "".join(f"(Title: {lookup.title(e)}) {lookup.text(e)}\n" for e in seen.entities)
                # One token more than allowed, so that a truncated example is recognised and dropped.
                example = writer.example([(text, False), *segments], limit + 1)
                examples += [example] if len(example) <= limit else []
        probes[task.__name__.strip("_")] = examples
    return probes
