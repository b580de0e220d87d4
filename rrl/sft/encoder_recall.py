"""Recall@k of a retriever on gold passages, by kind of query."""

from collections.abc import Sequence

import numpy as np

from rrl.miniwiki import KINDS, MiniWiki
from rrl.retrieval.gold import gold_hits
from rrl.retrieval.retriever import Retriever


def recall_at(retriever: Retriever, queries: Sequence[str], gold: Sequence[Sequence[str]], k: int) -> float:
    """Return recall@k in [0, 1]: the mean share of each query's gold titles among its k best passages."""
    embeddings = retriever.embed(queries) if retriever.needs_embeddings else None
    results = retriever.search(queries, k, embeddings)
    titles = [[hit.passage.title for hit in hits] for hits in results]
    return float(np.nanmean(gold_hits(titles, gold).recall()))


def miniwiki_recall(
    retriever: Retriever, wiki: MiniWiki, k: int = 3, questions: int = 200, seed: int = 0
) -> dict[str, float]:
    """Return recall@k on the built-in world by kind of query (`rrl.sft.encoder_pairs.QUERY_KINDS`).

    "query" uses the search queries of the hops, "name" only their subjects, and "question" whole one-hop questions. They are
    taken from `questions` questions of each kind.
    """
    items = [item for kind in KINDS for item in wiki.questions(kind, questions, seed)]
    hops = list({hop.query: hop for item in items for hop in item.plan.hops}.values())
    single = [item.question for item in items if len(item.plan.hops) == 1]
    queries_and_gold = {
        "query": ([hop.query for hop in hops], [[hop.title] for hop in hops]),
        "name": ([hop.subject for hop in hops], [[hop.title] for hop in hops]),
        "question": ([question.text for question in single], [list(question.gold) for question in single]),
    }
    return {
        kind: recall_at(retriever, queries, gold, k) for kind, (queries, gold) in queries_and_gold.items()
    }
