"""Records of answered questions: the lines of results.jsonl.

Read `record_of_trajectory` first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.data.trajectory_files import searches_as_json
from rrl.recipes.prompted.base import PromptedResult
from rrl.text.metrics import cover_exact_match


def record_of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return the record of a finished and scored episode."""
    roles = trajectory.roles
    return _record(
        trajectory.question,
        trajectory.answer,
        trajectory.ended,
        segments=trajectory.segments,
        searches=trajectory.searches,
        turns=len(np.unique(trajectory.turns[roles == POLICY])),
        tokens={role: int((roles == role).sum()) for role in (PROMPT, POLICY, ENVIRONMENT)},
    )


def record_of_result(question: Question, result: PromptedResult) -> dict[str, Any]:
    """Return the record of a prompted method's result.

    In `segments`, the prompts after the first have the role ENVIRONMENT. In the token counts, all prompts count as PROMPT.
    """
    segments: list[tuple[int, str]] = []
    for generation in result.generations:
        for role, text in generation.trajectory.segments:
            segments.append((ENVIRONMENT if role == PROMPT and segments else role, text))
    searches = [Search.of(turn, query, passages) for turn, (query, passages) in enumerate(result.searches)]
    return _record(
        question,
        result.answer,
        result.ended,
        segments=segments,
        searches=searches,
        turns=len(result.generations),
        tokens={PROMPT: result.prompt_tokens, POLICY: result.sampled_tokens, ENVIRONMENT: 0},
    )


def _record(
    question: Question,
    answer: str,
    ended: str,
    *,
    segments: Sequence[tuple[int, str]],
    searches: Sequence[Search],
    turns: int,
    tokens: Mapping[int, int],
) -> dict[str, Any]:
    """Return a line of results.jsonl. It can be read as a prediction (`rrl.eval.predictions`) and as a trajectory (`rrl.data`).

    `tokens` maps each role to its number of tokens.
    """
    return {
        "id": question.id,
        "prediction": answer,
        "question": dataclasses.asdict(question),
        "segments": list(segments),
        "searches": searches_as_json(searches),
        "answer": answer,
        "ended": ended,
        "rewards": {},
        "metrics": {},
        "turns": turns,
        "tokens": tokens[POLICY],
        "prompt_tokens": tokens[PROMPT],
        "environment_tokens": tokens[ENVIRONMENT],
        "answer_rank": _answer_rank(question, searches),
    }


def _answer_rank(question: Question, searches: Sequence[Search]) -> int | None:
    """Return the rank, from 1 among distinct texts, of the first passage with a gold answer; 0 if no passage has one.

    Returns None if the question has gold passages, which measure retrieval better, or is multiple choice, where answers are
    letters.
    """
    if question.gold or question.gold_ids or question.choices:
        return None
    texts = dict.fromkeys(passage.text for search in searches for passage in search.passages)
    return next((at for at, text in enumerate(texts, 1) if cover_exact_match(text, question.answers)), 0)
