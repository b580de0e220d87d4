"""Training pairs for the text encoder of the built-in world: queries, their gold passages, and hard negatives."""

import collections
import dataclasses

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.miniwiki import KINDS, MiniWiki, generate
from rrl.miniwiki.relations import RELATIONS

QUERY_KINDS = ("query", "name", "question")
"""Kinds of queries: the search query of a hop, the name of its subject, a whole question."""

MAX_GOLD = 4
"""Largest number of gold passages of a query."""


@dataclasses.dataclass(frozen=True)
class EncoderPairs:
    """Queries about the passages of many small sub-worlds. Positions are indices into `passages`."""

    passages: list[Passage]
    spans: tuple[range, ...]
    """Positions of the passages of each sub-world."""
    queries: list[str]
    """Q queries of all kinds."""
    gold: Int[np.ndarray, "Q 4"]
    """Positions of the gold passages of each query, padded with -1."""
    by_passage: dict[str, list[list[int]]]
    """By kind of query (`QUERY_KINDS`): for each passage, the indices of the queries that name it."""
    hard_negatives: list[list[int]]
    """For each passage, the positions of other passages of its sub-world that contain a word of its title."""


def make_pairs(seed: int, worlds: int, passages_per_world: int) -> EncoderPairs:
    """Generate training sub-worlds and return their pairs. The same arguments give the same pairs."""
    wiki = generate("train", seed, worlds * passages_per_world, worlds)
    position = {passage.title: index for index, passage in enumerate(wiki.passages)}
    queries: list[str] = []
    gold: list[list[int]] = []
    by_passage: dict[str, list[list[int]]] = {kind: [[] for _ in wiki.passages] for kind in QUERY_KINDS}

    def add(kind: str, query: str, titles: tuple[str, ...]) -> None:
        positions = [position[title] for title in titles]
        # A query can find the entities that it names, but not those of later hops.
        for index in positions:
            if wiki.passages[index].title in query:
                by_passage[kind][index].append(len(queries))
        queries.append(query)
        gold.append(positions)

    for relation in RELATIONS:
        for number, title in enumerate(wiki.world.names[relation.subject_type]):
            # A negative value means that the entity lacks this relation.
            if wiki.world.facts[relation.subject_type, relation.name][number] >= 0:
                add("query", relation.query(title), (title,))
    for title in position:
        add("name", title, (title,))
    for kind in KINDS:
        for item in wiki.questions(kind, len(wiki.passages) // 4, seed):
            add("question", item.question.text, item.question.gold)
    table = np.full((len(queries), MAX_GOLD), -1, np.int32)
    for row, positions in enumerate(gold):
        table[row, : len(positions)] = positions
    return EncoderPairs(
        wiki.passages, wiki.subworld_ranges, queries, table, by_passage, _hard_negatives(wiki)
    )


def _hard_negatives(wiki: MiniWiki) -> list[list[int]]:
    """Return `EncoderPairs.hard_negatives`."""
    negatives: list[list[int]] = []
    for span in wiki.subworld_ranges:
        passages_with: dict[str, set[int]] = collections.defaultdict(set)
        for index in span:
            passage = wiki.passages[index]
            for word in f"{passage.title} {passage.text}".replace(".", " ").replace(",", " ").split():
                if word[0].isupper():
                    passages_with[word].add(index)
        for index in span:
            # "The" and "New" occur in too many titles to make two passages similar.
            words = [word for word in wiki.passages[index].title.split() if word not in ("The", "New")]
            negatives.append(sorted(set().union(*(passages_with[word] for word in words)) - {index}))
    return negatives
