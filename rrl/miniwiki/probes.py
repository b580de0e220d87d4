"""Held-out reading tasks by kind: what a pretrained model can do, one order an example."""

from collections.abc import Mapping

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.miniwiki import MiniWiki, reading
from rrl.miniwiki.lookup import WikiLookup


def reading_probes(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    n: int,
    *,
    passages: int = 5,
    limit: int = 640,
) -> Mapping[str, list[Example]]:
    """`n` examples of each kind of order, whose answer alone is a target.

    Args:
      wiki: a world whose names the model has not seen.
      tokenizer: the model's.
      seed: order and choice.
      n: examples of each kind.
      passages: what each example reads before the order.
      limit: longest example in tokens; longer ones are left out.
    """
    rng = np.random.default_rng((seed, 3))
    lookup, writer = WikiLookup(wiki), reading.ExampleWriter(tokenizer)
    probes: dict[str, list[Example]] = {}
    for order in reading.READING_TASKS:
        found: list[Example] = []
        while len(found) < n:
            context = lookup.sample_entities(rng, passages)
            if asked := order(lookup, rng, context):
                text = "".join(f"(Title: {lookup.title(e)}) {lookup.text(e)}\n" for e in context.entities)
                example = writer.example([(text, False), *asked], limit + 1)
                found += [example] if len(example) <= limit else []
        probes[order.__name__.strip("_")] = found
    return probes
