"""miniwiki: a generated closed encyclopedia with random facts, and questions of the 2WikiMultiHopQA types about it.

    >>> wiki = generate("train", seed=0, passages=200)
    >>> wiki.passages[0].title, wiki.questions("two_hop", 1, seed=0)[0].question.text

Facts are random, so a model that does not search answers near chance; names of one split never occur in another.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.miniwiki.questions import KINDS, Hop, MiniQuestion, Plan, generate_questions
from rrl.miniwiki.world import World, build_world, write_passages

__all__ = [
    "KINDS",
    "Hop",
    "MiniQuestion",
    "MiniWiki",
    "Plan",
    "generate",
    "mixed_questions",
    "questions_by_split",
]


@dataclasses.dataclass(frozen=True)
class MiniWiki:
    """Passages of one or more closed sub-worlds, and questions about them."""

    world: World
    passages: list[Passage]
    """One about each entity, sub-world after sub-world."""
    spans: tuple[range, ...]
    """Positions in `passages` of each sub-world."""

    def questions(self, kind: str, n: int, seed: int) -> list[MiniQuestion]:
        """`n` different questions of one of KINDS; UserError when there are not so many."""
        return generate_questions(self.world, kind, n, seed)


def generate(split: str, seed: int, passages: int, worlds: int = 1) -> MiniWiki:
    """Make a world: the same arguments give the same passages.

    Args:
      split: "train", "dev" or "test"; entity names of one never occur in another.
      seed: 0 or more.
      passages: 50 to 1,000,000 in all; one about each entity.
      worlds: closed sub-worlds to divide them into, of at least 50 passages each.

    Raises:
      UserError: an argument out of range.
    """
    world = build_world(split, seed, passages, worlds)
    edges = [w * passages // worlds for w in range(worlds + 1)]
    spans = tuple(range(low, high) for low, high in itertools.pairwise(edges))
    return MiniWiki(world, write_passages(world), spans)


def mixed_questions(wiki: MiniWiki, per_kind: int, kinds: Sequence[str], seed: int) -> list[MiniQuestion]:
    """`per_kind` questions of each kind, interleaved at random; a pure function of its arguments."""
    items = [item for kind in kinds for item in wiki.questions(kind, per_kind, seed)]
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def questions_by_split(
    splits: Sequence[str] = ("train", "dev", "test"),
    seed: int = 0,
    worlds: int = 8,
    world_size: int = 200,
    per_kind: int = 144,
) -> dict[str, list[Question]]:
    """Questions of the built-in world by split, as many of each kind; with these defaults, test is what training holds out.

    Raises UserError as `generate`.
    """
    return {
        split: [
            item.question
            for item in mixed_questions(
                generate(split, seed, worlds * world_size, worlds), per_kind, KINDS, seed
            )
        ]
        for split in splits
    }
