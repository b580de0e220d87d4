"""What finished runs have measured, as the claims ask for it: a value a question, for each seed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.eval.comparison import load_run
from rrl.eval.results import read_lines
from rrl.retrieval.gold import Hits, hits_of

SEED = "{seed}"
"""In a run's name: each seed has one of its own."""


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """One evaluation, in the order of its questions."""

    ids: Sequence[str]
    columns: Mapping[str, Float[np.ndarray, "Q"]]
    """em and f1 in [0, 1]; searches, and tokens (written)."""
    titles: Sequence[Sequence[str]]
    """What all searches of a question found, best first."""
    gold: Sequence[Sequence[str]]
    questions_sha256: str = ""
    """Of the result card, as the next."""
    corpus_sha256: str = ""
    """ "" where nothing was searched."""

    @property
    def hits(self) -> Hits:
        """Which of what was found is gold."""
        return hits_of(self.titles, self.gold)


def read_evaluation(folder: Path) -> EvaluationResult:
    """Reads what launch/eval.py left. Raises UserError for a folder that is no finished evaluation."""
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
    """Raises UserError where evaluations, by their runs' names, had other questions or another corpus than the first."""
    first, *others = evaluations
    for name in others:
        one, two = evaluations[first], evaluations[name]
        corpora = {one.corpus_sha256, two.corpus_sha256} - {""}
        asked = [(list(each.ids), each.questions_sha256) for each in (one, two)]
        if asked[0] != asked[1] or len(corpora) > 1:
            what = "searched different corpora" if asked[0] == asked[1] else "were asked different questions"
            raise UserError(f"the runs {first} and {name} {what}; delete those that are out of date")


@dataclasses.dataclass(frozen=True)
class ReproductionResults:
    """The finished runs of a folder."""

    seeds: Sequence[int]
    evaluation: Callable[[str], EvaluationResult]
    """By the run's name."""
    training: Callable[[str], Sequence[Mapping[str, float]]]
    """The lines of metrics.jsonl, by the run's name."""

    def evaluations(self, name: str) -> list[EvaluationResult]:
        """That of each seed, or the only one of a name without `SEED`.

        Raises UserError where they were not asked the same questions over the same corpus.
        """
        found = {each: self.evaluation(each) for each in expand_seeds(name, self.seeds)}
        refuse_incomparable(found)
        return list(found.values())

    def trainings(self, name: str) -> list[Sequence[Mapping[str, float]]]:
        """The same of training runs."""
        return [self.training(each) for each in expand_seeds(name, self.seeds)]


def expand_seeds(name: str, seeds: Sequence[int]) -> list[str]:
    """The runs that a name with `SEED` stands for, or the one without."""
    return [name.replace(SEED, str(seed)) for seed in seeds] if SEED in name else [name]
