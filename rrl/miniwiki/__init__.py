"""The built-in world: a generated encyclopedia with random facts, and questions about it, modelled on 2WikiMultiHopQA.

    >>> wiki = generate("train", seed=0, passages=200)
    >>> wiki.passages[0].title, wiki.questions("two_hop", 1, seed=0)[0].question.text

Because facts are random, a model that does not search answers near chance. Names of one split never occur in another.
A `World` consists of one or more sub-worlds, which no fact connects. Arguments named `worlds` give the number of sub-worlds.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.miniwiki.plans import Hop, Plan
from rrl.miniwiki.questions import KINDS, MiniQuestion, generate_questions
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
    """Passages of one or more sub-worlds, and questions about them. No fact and no question connects two sub-worlds."""

    world: World
    passages: list[Passage]
    """One passage about each entity, ordered by sub-world."""
    subworld_ranges: tuple[range, ...]
    """For each sub-world, the indices of its passages in `passages`."""

    def questions(self, kind: str, n: int, seed: int) -> list[MiniQuestion]:
        """Return `n` different questions of a kind in KINDS. Raises UserError if there are fewer."""
        return generate_questions(self.world, kind, n, seed)


def generate(split: str, seed: int, passages: int, worlds: int = 1) -> MiniWiki:
    """Generate a world. The same arguments give the same passages.

    Args:
      split: "train", "dev" or "test"; entity names of one split never occur in another.
      seed: seed of names, facts and wordings; 0 or more.
      passages: total number of passages, one about each entity; 50 to 1,000,000.
      worlds: number of sub-worlds, with at least 50 passages each.

    Raises:
      UserError: an argument is out of range.
    """
    world = build_world(split, seed, passages, worlds)
    edges = [w * passages // worlds for w in range(worlds + 1)]
    ranges = tuple(range(low, high) for low, high in itertools.pairwise(edges))
    return MiniWiki(world, write_passages(world), ranges)


def mixed_questions(wiki: MiniWiki, per_kind: int, kinds: Sequence[str], seed: int) -> list[MiniQuestion]:
    """Return `per_kind` questions of each kind in random order; the same arguments give the same questions."""
    items = [item for kind in kinds for item in wiki.questions(kind, per_kind, seed)]
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def questions_by_split(
    splits: Sequence[str] = ("train", "dev", "test"),
    seed: int = 0,
    worlds: int = 8,
    world_size: int = 200,
    per_kind: int = 144,
) -> dict[str, list[Question]]:
    """Return questions of the built-in world by split, `per_kind` of each kind.

    With the defaults, the split "test" has the held-out questions by which training runs are evaluated. Raises UserError as
    `generate`.
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
