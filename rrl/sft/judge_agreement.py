"""How often a judge says what the oracle says, over cases of built-in worlds that no training shows or what a policy did."""

import collections
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.models.hardware import ComputeConfig
from rrl.report.summary import table
from rrl.rewards.judge import Judge
from rrl.rewards.judge_prompts import Correctness, JudgePrompt, Sufficiency, Thinking, transcript_of
from rrl.rewards.judge_settings import JudgeSettings, judge_sections
from rrl.rewards.oracle import Oracle
from rrl.sft.judge_examples import JudgeExample, JudgeExamplesConfig, make_judge_examples
from rrl.text.spans import Tag

WORLD_PASSAGES = 200
"""Passages of one world."""
NEAR_TOLERANCE = 0.2
"""Scores in tenths that differ by so much are called near."""


def held_out_judge_examples(
    questions: int, config: JudgeExamplesConfig, split: str = "test", seed: int = 0
) -> list[JudgeExample]:
    """The oracle's verdicts about so many questions, one of each kind of case about each, in four worlds of a split.

    Raises UserError for a number of questions that is no multiple of the kinds of questions.
    """
    if questions < 1 or questions % len(KINDS):
        raise UserError(f"questions={questions} must be a multiple of {len(KINDS)}, the kinds of questions")
    wiki = generate(split, seed, 4 * WORLD_PASSAGES, 4)
    return list(make_judge_examples(wiki, seed, questions // len(KINDS), config))


def judge_examples_of(trajectories: Sequence[Trajectory], answer: Tag = "answer") -> list[JudgeExample]:
    """The oracle's verdicts about what a policy did: is it sufficient, how good is its thinking, is its answer right.

    Args:
      trajectories: their questions name gold passages.
      answer: the tag of answers, which are no part of what was thought.
    """
    cases: list[JudgePrompt] = []
    for trajectory in trajectories:
        question, told = trajectory.question, transcript_of(trajectory, answer)
        cases += [Sufficiency(question, told), Thinking(question, told)]
        if trajectory.answer:
            cases.append(Correctness(question, trajectory.answer))
    return [
        JudgeExample(case, score or 0.0, "") for case, score in zip(cases, Oracle().grade(cases), strict=True)
    ]


def judge_report(
    judge: str,
    model: str,
    against: Sequence[JudgeExample],
    compute: ComputeConfig,
    mesh: Mesh,
    rows: int = 64,
    context: int = 0,
) -> str:
    """The table of `agreement_table` for a judge in one word (`judge_settings.judge_sections`). A model is asked `rows` cases at
    a time, of at most `context` tokens each (0: what its card says). Raises UserError for one that is not there."""
    sections = judge_sections(judge, model, context)
    sections["judge_rollout"]["rows"] = rows
    settings = JudgeSettings.parse(sections)
    settings.check()
    return agreement_table(
        agreement(settings.load([verdict.prompt.question for verdict in against], compute, mesh), against)
    )


def agreement(judge: Judge, against: Sequence[JudgeExample]) -> dict[str, dict[str, float]]:
    """By kind of case: how the judge's scores agree with the verdicts.

    - cases: their number; unread: answers of the judge that say none, which agree with nothing;
    - exact: share of equal scores; near: of scores that differ by 0.2 at most;
    - balanced: the mean of `exact` over the verdicts that occur, so that naming the most frequent one earns 1 in so many;
    - majority_exact, majority_near, majority_balanced: the same of who always says the most frequent verdict.
    """
    said = judge.grade([verdict.prompt for verdict in against])
    by_kind: dict[str, list[tuple[float, float | None]]] = collections.defaultdict(list)
    for verdict, score in zip(against, said, strict=True):
        by_kind[type(verdict.prompt).__name__].append((verdict.score, score))
    return {kind: _agreement_scores(pairs) for kind, pairs in by_kind.items()}


def _agreement_scores(pairs: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    right = np.array([truth for truth, _ in pairs])
    found = np.array([np.nan if score is None else score for _, score in pairs], float)
    values, counts = np.unique(right, return_counts=True)
    most = np.full(len(right), values[counts.argmax()])
    scores = {"cases": float(len(pairs)), "unread": float(np.isnan(found).sum())}
    for prefix, given in (("", found), ("majority_", most)):
        equal = np.isclose(given, right)
        scores[f"{prefix}exact"] = float(equal.mean())
        scores[f"{prefix}near"] = float((np.abs(given - right) <= NEAR_TOLERANCE + 1e-6).mean())
        scores[f"{prefix}balanced"] = float(np.mean([equal[right == value].mean() for value in values]))
    return scores


def agreement_table(found: dict[str, dict[str, float]]) -> str:
    """A table of `agreement`, in percent."""
    names = ("exact", "near", "balanced")
    head = ("case", "number", *(text for name in names for text in (name, "majority")), "unread")
    rows = [
        (
            kind.lower(),
            f"{scores['cases']:.0f}",
            *(f"{100 * scores[key]:.1f}" for name in names for key in (name, f"majority_{name}")),
            f"{scores['unread']:.0f}",
        )
        for kind, scores in found.items()
    ]
    title = f"Agreement with the oracle (percent; near: within {NEAR_TOLERANCE}; majority: its most frequent verdict)"
    return "\n".join([title, *table([head, *rows])])
