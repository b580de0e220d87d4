"""Scoring functions that several recipes share: metrics of answers, and a format check for episodes in one context (`Stream`)."""

from collections.abc import Sequence

from rrl.data.trajectory import Trajectory
from rrl.rollout.protocol import Stream
from rrl.text.metrics import score_answer
from rrl.text.spans import count_tags


def answer_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Return the metrics that every recipe reports.

    They are "em", "f1" and "cem" of the answer (exact match, token F1, cover exact match), and "searches", the number of
    successful searches.
    """
    scores = score_answer(trajectory.answer, trajectory.question.answers)
    return {**scores._asdict(), "searches": float(sum(not search.failed for search in trajectory.searches))}


def one_search_per_turn(response: Sequence[str], environment: Stream) -> bool:
    """Return whether every turn but the last makes one search, the last makes none, and no turn writes an observation tag."""
    # Pairs: how often the opening and the closing tag occur in a turn.
    searches = [count_tags(text, environment.search) for text in response]
    observations = [count_tags(text, environment.observation) for text in response]
    return searches == [(1, 1)] * (len(response) - 1) + [(0, 0)] and observations == [(0, 0)] * len(response)
