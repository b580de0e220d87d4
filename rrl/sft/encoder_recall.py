"""How well a retriever finds gold passages: recall@k, by way of asking."""

from collections.abc import Sequence

import numpy as np

from rrl.miniwiki import KINDS, MiniWiki
from rrl.retrieval.gold import gold_hits
from rrl.retrieval.retriever import Retriever


def recall_at(retriever: Retriever, queries: Sequence[str], gold: Sequence[Sequence[str]], k: int) -> float:
    """Mean share of each query's gold titles among its k best passages, in [0, 1]."""
    embeddings = retriever.embed(queries) if retriever.needs_embeddings else None
    found = retriever.search(queries, k, embeddings)
    titles = [[hit.passage.title for hit in hits] for hits in found]
    return float(np.nanmean(gold_hits(titles, gold).recall()))


def miniwiki_recall(
    retriever: Retriever, wiki: MiniWiki, k: int = 3, questions: int = 200, seed: int = 0
) -> dict[str, float]:
    """recall@k on the built-in world by way of asking.

    "query" are the hops' own search queries, "name" the bare subjects, "question" whole one-hop questions, all over
    the hops of `questions` questions of each kind (one-hop questions for "question").
    """
    items = [item for kind in KINDS for item in wiki.questions(kind, questions, seed)]
    hops = list({hop.query: hop for item in items for hop in item.plan.hops}.values())
    single = [item.question for item in items if len(item.plan.hops) == 1]
    asked = {
        "query": ([hop.query for hop in hops], [[hop.title] for hop in hops]),
        "name": ([hop.subject for hop in hops], [[hop.title] for hop in hops]),
        "question": ([question.text for question in single], [list(question.gold) for question in single]),
    }
    return {way: recall_at(retriever, queries, gold, k) for way, (queries, gold) in asked.items()}
