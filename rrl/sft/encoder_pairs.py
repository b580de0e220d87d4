"""Training pairs for the built-in world's encoder: queries, the passages that answer them, and ones that mislead."""

import collections
import dataclasses

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.miniwiki import KINDS, MiniWiki, generate
from rrl.miniwiki.passages import RELATIONS

QUERY_KINDS = ("query", "name", "question")
"""Ways of asking: a hop's search query, the bare name, a whole question."""

MAX_GOLD = 4
"""Passages that a question may need at most; the rest of a row of gold positions is -1."""


@dataclasses.dataclass(frozen=True)
class EncoderPairs:
    """Queries about the passages of many small worlds; positions are indices into `passages`."""

    passages: list[Passage]
    spans: tuple[range, ...]
    """Positions of the passages of each world."""
    queries: list[str]
    gold: Int[np.ndarray, "Q 4"]
    """Positions of the passages that each query is about, -1 where there are fewer."""
    by_passage: dict[str, list[list[int]]]
    """By way of asking (`QUERY_KINDS`): for each passage, the queries whose subject it is."""
    hard_negatives: list[list[int]]
    """For each passage, others of its world that share a word of its title: namesakes, and those that mention it."""


def make_pairs(seed: int, worlds: int, passages_per_world: int) -> EncoderPairs:
    """Pairs from freshly generated training worlds. Same arguments, same pairs."""
    wiki = generate("train", seed, worlds * passages_per_world, worlds)
    position = {passage.title: index for index, passage in enumerate(wiki.passages)}
    queries: list[str] = []
    gold: list[list[int]] = []
    by_passage: dict[str, list[list[int]]] = {way: [[] for _ in wiki.passages] for way in QUERY_KINDS}

    def add(way: str, query: str, titles: tuple[str, ...]) -> None:
        positions = [position[title] for title in titles]
        # The entities that a question names can be found from its words; later hops cannot.
        for at in positions:
            if wiki.passages[at].title in query:
                by_passage[way][at].append(len(queries))
        queries.append(query)
        gold.append(positions)

    for relation in RELATIONS:
        for number, title in enumerate(wiki.world.names[relation.subject]):
            if wiki.world.facts[relation.subject, relation.name][number] >= 0:
                add("query", relation.query(title), (title,))
    for title in position:
        add("name", title, (title,))
    for kind in KINDS:
        for item in wiki.questions(kind, len(wiki.passages) // 4, seed):
            add("question", item.question.text, item.question.gold)
    table = np.full((len(queries), MAX_GOLD), -1, np.int32)
    for row, positions in enumerate(gold):
        table[row, : len(positions)] = positions
    return EncoderPairs(wiki.passages, wiki.spans, queries, table, by_passage, _hard_negatives(wiki))


def _hard_negatives(wiki: MiniWiki) -> list[list[int]]:
    found: list[list[int]] = []
    for span in wiki.spans:
        holders: dict[str, set[int]] = collections.defaultdict(set)
        for at in span:
            passage = wiki.passages[at]
            for word in f"{passage.title} {passage.text}".replace(".", " ").replace(",", " ").split():
                if word[0].isupper():
                    holders[word].add(at)
        for at in span:
            words = [word for word in wiki.passages[at].title.split() if word not in ("The", "New")]
            found.append(sorted(set().union(*(holders[word] for word in words)) - {at}))
    return found
