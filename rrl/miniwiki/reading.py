"""Generate pretraining text: reading, copying and comparing, without searches and tags. Read `reading_examples` first.

There are three kinds of examples:
- passages in the format of observations, `(Title: T) text` one per line, followed by short tasks such as
  " director of Silver Harbour :" with their answers (`rrl.miniwiki.reading_tasks`);
- drills: tasks without passages (`rrl.miniwiki.drills`);
- questions, each followed by the facts that it requires, so that the model understands questions. Their
  answers do not occur.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.miniwiki import KINDS, MiniWiki
from rrl.miniwiki.drills import drill_segments
from rrl.miniwiki.lookup import Entity, SeenEntities, WikiLookup
from rrl.miniwiki.reading_tasks import Rng, Segment, sample_task


class ExampleWriter:
    """Tokenises segments into examples, with a cache, because passages recur."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._cached_ids: dict[str, list[int]] = {}

    def example(self, segments: list[Segment], limit: int, all_targets: bool = False) -> Example:
        """Return the example of these segments, truncated to `limit` tokens.

        Each segment is tokenised separately. The tokens are those of the whole text only if segments begin with a space or end
        with a line break.

        Args:
          segments: texts, and whether they are targets.
          limit: maximum number of tokens.
          all_targets: make every token except the first a target.
        """
        uncached = [text for text, _ in segments if text not in self._cached_ids]
        if uncached:
            if len(self._cached_ids) > 200_000:
                self._cached_ids.clear()
                uncached = [text for text, _ in segments]
            ids = self._tokenizer(uncached, add_special_tokens=False)["input_ids"]
            self._cached_ids.update(zip(uncached, ids, strict=True))
        tokens: list[int] = []
        is_target: list[bool] = []
        for text, target in segments:
            part = self._cached_ids[text]
            tokens += part
            is_target += [target or all_targets] * len(part)
        is_target[0] = False
        return Example(np.array(tokens[:limit], np.int32), np.array(is_target[:limit], bool))


def reading_examples(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    plain: float = 0.1,
    drills: float = 0.2,
    questions: float = 0.1,
    most_passages: int = 9,
    limit: int = 640,
) -> Iterator[Example]:
    """Yield reading examples without end; the same arguments give the same stream.

    Targets are the answers to the tasks, and the mentions of a passage's subject after its title, which are an easy exercise in
    copying.

    Args:
      wiki: the source of passages; each example stays in one sub-world.
      tokenizer: the tokenizer; it must not merge a space with the text before it.
      seed: seed of all random choices.
      plain: share of examples in which every token is a target, as in plain language modelling, in [0, 1].
      drills: share of examples without passages, each with many short tasks of comparing and copying.
      questions: share of examples with questions, each followed by the facts it requires.
      most_passages: maximum number of passages in an example; the minimum is 1.
      limit: maximum length of an example in tokens; longer examples are truncated.
    """
    rng = np.random.default_rng((seed, 1))
    lookup, writer = WikiLookup(wiki), ExampleWriter(tokenizer)
    questions_with_facts = _questions_with_facts(wiki, seed) if questions else []
    while True:
        draw = rng.random()
        if draw < drills:
            segments = drill_segments(lookup, rng)
        elif draw < drills + questions:
            chosen = rng.integers(len(questions_with_facts), size=int(rng.integers(6, 13))).tolist()
            segments = [segment for i in chosen for segment in questions_with_facts[i]]
        else:
            segments = passage_segments(lookup, rng, int(rng.integers(1, most_passages + 1)))
        yield writer.example(segments, limit, all_targets=bool(rng.random() < plain))


def passage_segments(lookup: WikiLookup, rng: Rng, passages: int) -> list[Segment]:
    """Return passages in one to three blocks, each followed by tasks about the passages so far."""
    sampled = lookup.sample_entities(rng, passages)
    blocks = min(passages, int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])))
    cuts = (
        sorted(rng.choice(np.arange(1, passages), blocks - 1, replace=False).tolist()) if blocks > 1 else []
    )
    segments: list[Segment] = []
    for low, high in itertools.pairwise([0, *cuts, passages]):
        for entity in sampled.entities[low:high]:
            segments += _passage(lookup, entity)
        seen = SeenEntities(sampled.entities[:high], sampled.entities[low:high])
        # At most 6 tasks in an example.
        for _ in range(int(rng.integers(1, 6 // blocks + 1))):
            segments += sample_task(lookup, rng, seen)
    return segments


def _passage(lookup: WikiLookup, entity: Entity) -> list[Segment]:
    """Return a passage in which the mentions of the subject after the title are targets."""
    title, text = lookup.title(entity), lookup.text(entity)
    segments: list[Segment] = [(f"(Title: {title})", False)]
    for i, between in enumerate(f" {text}".split(f" {title}")):
        if i:
            segments.append((f" {title}", True))
        if between:
            segments.append((between, False))
    return [*segments, ("\n", False)]


def _questions_with_facts(wiki: MiniWiki, seed: int) -> list[list[Segment]]:
    """Return questions of every kind, each with the facts that it requires."""
    per_kind = max(1, len(wiki.passages) // 20)
    return [
        [(f" {item.question.text} :", False), (f" {item.plan.facts_text}\n", True)]
        for kind in KINDS
        for item in wiki.questions(kind, per_kind, seed)
    ]
