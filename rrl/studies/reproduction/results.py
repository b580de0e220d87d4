"""Reads what finished runs measured, in the form that claims need: one value per question, for each seed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.eval.evaluation_run import load_run
from rrl.eval.results import read_lines
from rrl.retrieval.gold import GoldHits, gold_hits

SEED = "{seed}"
"""Placeholder in a run's name that stands for each of the seeds."""


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation; all arrays are in the order of its questions."""

    ids: Sequence[str]
    columns: Mapping[str, Float[np.ndarray, "Q"]]
    """Values per question by name: "em" and "f1" in [0, 1], "searches" (their number) and "tokens" (the number
    that the policy wrote)."""
    titles: Sequence[Sequence[str]]
    """For each question, the titles of the passages that its searches returned: search by search, best first in each."""
    gold: Sequence[Sequence[str]]
    """For each question, the titles of the gold passages."""
    questions_sha256: str = ""
    """From the result card."""
    corpus_sha256: str = ""
    """From the result card; "" if nothing was searched."""

    @property
    def hits(self) -> GoldHits:
        """Which of the retrieved passages are gold."""
        return gold_hits(self.titles, self.gold)


def read_evaluation(folder: Path) -> EvaluationResult:
    """Read the folder of a launch/eval.py run. Raises UserError if it is not a finished evaluation."""
    run = load_run(folder)
    file = folder / "results.jsonl"
    lines = {line["id"]: line for line in read_lines(file, "id", "searches", "tokens")}
    questions = run.questions()
    answered = [lines[question.id] for question in questions]
    columns = {name: run.metrics[name] for name in ("em", "f1")}
    columns["searches"] = np.array([len(line["searches"]) for line in answered], float)
    columns["tokens"] = np.array([line["tokens"] for line in answered], float)
    titles = [[title for search in line["searches"] for title in search["titles"]] for line in answered]
    ids, gold = [q.id for q in questions], [q.gold for q in questions]
    return EvaluationResult(ids, columns, titles, gold, run.card.questions_sha256, run.card.corpus_sha256)


def refuse_incomparable(evaluations: Mapping[str, EvaluationResult]) -> None:
    """Raise UserError if an evaluation has other questions or another corpus than the first.

    Args:
      evaluations: by the name of their run.
    """
    first, *others = evaluations
    for name in others:
        one, two = evaluations[first], evaluations[name]
        corpora = {one.corpus_sha256, two.corpus_sha256} - {""}
        questions = [(list(each.ids), each.questions_sha256) for each in (one, two)]
        if questions[0] != questions[1] or len(corpora) > 1:
            what = (
                "searched different corpora"
                if questions[0] == questions[1]
                else "answered different questions"
            )
            raise UserError(f"the runs {first} and {name} {what}; delete those that are out of date")


@dataclasses.dataclass(frozen=True)
class ReproductionResults:
    """The finished runs of a reproduction."""

    seeds: Sequence[int]
    read_evaluation: Callable[[str], EvaluationResult]
    """Full name of a run, with its seed -> its evaluation. (The function of the same name in this module reads a folder.)"""
    read_training: Callable[[str], Sequence[Mapping[str, float]]]
    """Full name of a run, with its seed -> the lines of its metrics.jsonl."""

    def evaluations(self, name: str) -> list[EvaluationResult]:
        """Return one evaluation per seed, or a single one if the name has no `SEED`.

        Raises UserError if their questions or corpora differ.
        """
        evaluations = {run: self.read_evaluation(run) for run in expand_seeds(name, self.seeds)}
        refuse_incomparable(evaluations)
        return list(evaluations.values())

    def trainings(self, name: str) -> list[Sequence[Mapping[str, float]]]:
        """Return the metrics of one training run per seed, or of a single one."""
        return [self.read_training(run) for run in expand_seeds(name, self.seeds)]


def expand_seeds(name: str, seeds: Sequence[int]) -> list[str]:
    """Return the run names that a name with `SEED` stands for, or the name itself."""
    return [name.replace(SEED, str(seed)) for seed in seeds] if SEED in name else [name]
