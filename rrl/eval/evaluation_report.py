"""Report an evaluation whose questions are all answered: scores, report, result card and a page of trajectories.

Read `report_evaluation` first.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.eval.judging import Judgements
from rrl.eval.matching import match_predictions
from rrl.eval.prediction_files import load_predictions
from rrl.eval.result_card import ResultCard, save_card
from rrl.eval.results import read_lines
from rrl.eval.score_report import CUTS, report, write_report
from rrl.eval.scoring import Scores, score
from rrl.eval.settings import EvaluationSettings
from rrl.eval.timing import read_timing, seconds_per_question
from rrl.files import saving
from rrl.report.trajectories_html import write_html
from rrl.retrieval.gold import hits_from_ranks
from rrl.text.metrics import AnswerScores
from rrl.text.normalize import rule_named

MAX_SHOWN = 100
"""Largest number of trajectories on a run's page."""


def report_evaluation(
    workdir: Path,
    card: ResultCard,
    questions: Sequence[Question],
    settings: EvaluationSettings,
    judgements: Judgements,
) -> dict[str, Any]:
    """Score the answers in results.jsonl, and write and return the report. metrics.json is written last."""
    scores = scores_of(workdir, questions, card.normalization, judgements)
    summary: dict[str, Any] = {"normalization": card.normalization}
    summary |= report(scores, seed=settings.eval.seed, level=settings.eval.level)
    if judgements.short_scores:
        summary["short_unread"] = sum(each is None for each in judgements.short_scores.values())
    if not card.corpus:  # nothing was searched
        for name in ("retrieval", "retrieval_by", "retrieval_warning", "retrieval_intervals"):
            summary.pop(name, None)
    lines = read_lines(workdir / "results.jsonl", "answer_rank", "ended")
    # Gold passages measure retrieval better, so passages with an answer count only if no question has gold passages.
    if card.corpus and "retrieval" not in summary:
        summary |= _retrieval_by_answer(lines)
    endings = collections.Counter(line["ended"] for line in lines)
    summary["ended"] = {name: count / len(lines) for name, count in endings.most_common()}
    summary["seconds"] = seconds_per_question(workdir, judgements.file_name)
    # Questions of batches that ran to their end: only these have a measured time.
    summary["timed"] = sum(line["questions"] for line in read_timing(workdir) if "answer" in line)
    # A tag may be a pair of markers, which cannot be a key in JSON.
    summary["tags"] = list(settings.method.tags.items())
    summary["card"] = dataclasses.asdict(card)
    shown, page = scored_trajectories(workdir, scores)[:MAX_SHOWN], workdir / "trajectories.html"
    with saving(page):
        write_html(shown, page, f"{card.method}: {card.dataset}", tags=settings.method.tags)
    with saving(workdir / "card.json"):
        save_card(workdir / "card.json", card)
    write_report(workdir, summary, scores)
    return summary


def _retrieval_by_answer(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return hits and MRR of the first passage that contains a gold answer; {} if no record has its rank."""
    ranks = [line["answer_rank"] for line in lines if line["answer_rank"] is not None]
    if not ranks:
        return {}
    means = hits_from_ranks(ranks).report(CUTS)
    return {
        "retrieval_by_answer": {
            name: value for name, value in means.items() if name.startswith(("hits", "mrr"))
        }
    }


def scores_of(
    workdir: Path,
    questions: Sequence[Question],
    normalization: str,
    judgements: Judgements,
) -> Scores:
    """Return the scores of all questions, including a judge's verdicts if there are any.

    If the judge scored short forms of long answers, those scores replace the scores of the full answers.

    Raises UserError, with the line, for a missing or repeated answer, or an answer to another question.
    """
    file = workdir / "results.jsonl"
    predictions = load_predictions(file, "prediction")
    if verdicts := judgements.verdicts:
        predictions = [dataclasses.replace(p, verdict=verdicts[p.id or ""]) for p in predictions]
    pairs = match_predictions(predictions, questions, str(file), str(workdir / "questions.jsonl"))
    scores = score(pairs, questions, rule_named(normalization), judged=bool(verdicts))
    return with_short_forms(scores, judgements.short_scores) if judgements.short_scores else scores


def with_short_forms(scores: Scores, short_scores: Mapping[str, AnswerScores | None]) -> Scores:
    """Replace em, f1 and cem by the scores of short forms, given by id; None leaves the scores of a question unchanged."""
    metrics = dict(scores.metrics)
    by_question = [short_scores[question.id] for question in scores.questions]
    for name in AnswerScores._fields:
        full = scores.metrics[name].tolist()
        metrics[name] = np.array(
            [
                value if short is None else getattr(short, name)
                for value, short in zip(full, by_question, strict=True)
            ]
        )
    return dataclasses.replace(scores, metrics=metrics)


def scored_trajectories(workdir: Path, scores: Scores) -> list[Trajectory]:
    """Return the trajectories in the order of the questions, with their scores as metrics."""
    by_id = {t.question.id: t for t in load_trajectories(workdir / "results.jsonl")}
    trajectories = []
    for at, question in enumerate(scores.questions):
        trajectory = by_id[question.id]
        trajectory.metrics = {name: float(values[at]) for name, values in scores.metrics.items()}
        if "acc" in trajectory.metrics:  # pages of trajectories mark right and wrong by "em"
            trajectory.metrics["em"] = trajectory.metrics["acc"]
        trajectories.append(trajectory)
    return trajectories
