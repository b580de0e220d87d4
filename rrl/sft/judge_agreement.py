"""Agreement of a judge with the oracle, on held-out questions of the built-in world or on the trajectories of a policy.

The oracle (`rrl.rewards.oracle.Oracle`) scores by the gold passages and gold answers of a question.

Read `agreement` first.
"""

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
from rrl.rewards.judge_prompts import Correctness, JudgePrompt, Sufficiency, Thinking
from rrl.rewards.judge_settings import JudgeSettings, judge_sections
from rrl.rewards.oracle import Oracle
from rrl.rewards.transcript import transcript_of
from rrl.sft.judge_examples import JudgeExample, JudgeExamplesConfig, make_judge_examples
from rrl.text.spans import Tag

WORLD_PASSAGES = 200
"""Passages per sub-world."""
NEAR_TOLERANCE = 0.2
"""Largest difference of two scores (in 0..1) that counts as near."""


def held_out_judge_examples(
    questions: int, config: JudgeExamplesConfig, split: str = "test", seed: int = 0
) -> list[JudgeExample]:
    """Return judge examples about `questions` questions in four sub-worlds of a split: one of each kind of prompt per question.

    Raises:
        UserError: `questions` is not a multiple of the number of kinds of questions.
    """
    if questions < 1 or questions % len(KINDS):
        raise UserError(f"questions={questions} must be a multiple of {len(KINDS)}, the kinds of questions")
    wiki = generate(split, seed, 4 * WORLD_PASSAGES, 4)
    return list(make_judge_examples(wiki, seed, questions // len(KINDS), config))


def judge_examples_of(trajectories: Sequence[Trajectory], answer: Tag = "answer") -> list[JudgeExample]:
    """Return judge examples about trajectories: sufficiency of the context, quality of the thinking, correctness of the answer.

    Args:
        trajectories: trajectories of a policy; their questions name gold passages.
        answer: tag of the answer, which is not part of the thinking.

    Returns:
        Two or three examples per trajectory, scored by the oracle, without the text that a judge should write.
    """
    prompts: list[JudgePrompt] = []
    for trajectory in trajectories:
        question, transcript = trajectory.question, transcript_of(trajectory, answer)
        prompts += [Sufficiency(question, transcript), Thinking(question, transcript)]
        if trajectory.answer:
            prompts.append(Correctness(question, trajectory.answer))
    scores = Oracle().grade(prompts)  # the oracle has a score for each prompt; `or` narrows the type
    return [JudgeExample(prompt, score or 0.0, "") for prompt, score in zip(prompts, scores, strict=True)]


def judge_report(
    judge: str,
    model: str,
    examples: Sequence[JudgeExample],
    compute: ComputeConfig,
    mesh: Mesh,
    rows: int = 64,
    context: int = 0,
) -> str:
    """Load a judge, compare it with the oracle and return the table.

    Args:
        judge: "oracle", the folder of a judge model, or the http address of a service.
        model: name of its model, for a service.
        examples: prompts with the oracle's scores.
        compute: dtype of a judge model.
        mesh: devices of a judge model.
        rows: prompts that a judge model answers at a time.
        context: largest number of tokens of a prompt and its answer; 0: the number in the judge card (`rrl_judge.json`).

    Raises:
        UserError: the judge is missing.
    """
    sections = judge_sections(judge, model, context)
    sections["judge_rollout"]["rows"] = rows
    settings = JudgeSettings.parse(sections)
    settings.check()
    return agreement_table(
        agreement(settings.load([example.prompt.question for example in examples], compute, mesh), examples)
    )


def agreement(judge: Judge, examples: Sequence[JudgeExample]) -> dict[str, dict[str, float]]:
    """Compare the judge's scores with those of the examples.

    Returns:
        By kind of prompt:

        - cases: number of examples; unread: judge answers that could not be parsed, which count as disagreement;
        - exact: share of equal scores; near: share of scores that differ by at most 0.2;
        - balanced (accuracy): the mean, over the n different oracle scores, of `exact` among the examples with that score; a
          constant answer gets at most 1/n;
        - majority_exact, majority_near, majority_balanced: the same for a judge that always gives the most frequent score.
    """
    scores = judge.grade([example.prompt for example in examples])
    by_kind: dict[str, list[tuple[float, float | None]]] = collections.defaultdict(list)
    for example, score in zip(examples, scores, strict=True):
        by_kind[type(example.prompt).__name__].append((example.score, score))
    return {kind: _agreement_metrics(pairs) for kind, pairs in by_kind.items()}


def _agreement_metrics(pairs: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    """Return the metrics of `agreement` for (oracle's score, judge's score) pairs of one kind of prompt."""
    oracle = np.array([truth for truth, _ in pairs])
    judged = np.array([np.nan if score is None else score for _, score in pairs], float)
    values, counts = np.unique(oracle, return_counts=True)
    majority = np.full(len(oracle), values[counts.argmax()])
    metrics = {"cases": float(len(pairs)), "unread": float(np.isnan(judged).sum())}
    for prefix, scored in (("", judged), ("majority_", majority)):
        equal = np.isclose(scored, oracle)
        metrics[f"{prefix}exact"] = float(equal.mean())
        metrics[f"{prefix}near"] = float((np.abs(scored - oracle) <= NEAR_TOLERANCE + 1e-6).mean())
        metrics[f"{prefix}balanced"] = float(np.mean([equal[oracle == value].mean() for value in values]))
    return metrics


def agreement_table(agreements: dict[str, dict[str, float]]) -> str:
    """Return the result of `agreement` as a table, in percent."""
    names = ("exact", "near", "balanced")
    head = ("prompt", "examples", *(text for name in names for text in (name, "majority")), "unread")
    rows = [
        (
            kind.lower(),
            f"{metrics['cases']:.0f}",
            *(f"{100 * metrics[key]:.1f}" for name in names for key in (name, f"majority_{name}")),
            f"{metrics['unread']:.0f}",
        )
        for kind, metrics in agreements.items()
    ]
    title = (
        f"Agreement with the oracle (percent; near: within {NEAR_TOLERANCE}; "
        "majority: always its most frequent score)"
    )
    return "\n".join([title, *table([head, *rows])])
