"""Finished evaluations beside each other: metrics with intervals, paired tests against the first, and what makes them unlike."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.data.questions import Question, load_questions
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError
from rrl.eval.intervals import PairedComparison, bootstrap, compare
from rrl.eval.result_card import UNKNOWN, ResultCard, card_of, differences
from rrl.eval.scoring import SHORTCOMINGS, shortcomings
from rrl.retrieval.gold import TITLES
from rrl.text.spans import Tag

STAGES = ("answer", "search", "read", "judge")
"""What the seconds of an evaluation go to."""
COSTS = (
    "searches",
    "turns",
    "tokens",
    "prompt_tokens",
    "environment_tokens",
    "reader_prompt_tokens",
    "reader_tokens",
    "tokens_when_correct",
    "tokens_per_correct",
    "all_tokens_per_correct",
)
"""Costs of a report that tables show; "tokens" are the policy's own."""
RETRIEVAL = (
    "recall",
    "full_recall",
    "map",
    "hits",
    "mrr",
    "passages",
    "eta_re",
    "hits_by_answer",
    "mrr_by_answer",
)
"""The same of coverage."""


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """One finished evaluation."""

    name: str
    folder: Path
    card: ResultCard
    found: Mapping[str, Any]
    """metrics.json: see `rrl.eval.scoring.report`."""
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """One value a question."""
    ids: Sequence[str]
    """Of the questions, in that order."""
    coverage: Mapping[str, Float[np.ndarray, "Q"]] = dataclasses.field(default_factory=dict)
    """recall, full_recall, map, hits and mrr, NaN for questions without gold passages; empty where none are known."""

    @property
    def main(self) -> str:
        """The metric that says right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @property
    def tags(self) -> dict[Tag, str]:
        """As `Recipe.tags`."""
        pairs = self.found.get("tags", [])
        return {tuple(tag) if isinstance(tag, list) else tag: kind for tag, kind in pairs}

    @property
    def curves(self) -> Path | None:
        """metrics.jsonl of the training run that the policy came from, where the policy lies in its workdir."""
        file = Path(self.card.model).parent / "metrics.jsonl"
        return file if file.is_file() else None

    @property
    def readable(self) -> bool:
        """Whether it keeps what was asked and done; a scored prediction file keeps neither."""
        return (self.folder / "questions.jsonl").is_file() and (self.folder / "results.jsonl").is_file()

    def questions(self) -> list[Question]:
        """What was asked, in the order of `metrics`."""
        return load_questions(self.folder / "questions.jsonl")

    def trajectories(self, ids: Sequence[str]) -> dict[str, Trajectory]:
        """What was done for some questions, by id, with the scores as metrics."""
        place = {question.id: at for at, question in enumerate(self.questions())}
        found = {}
        for trajectory in load_trajectories(self.folder / "results.jsonl"):
            identity = trajectory.question.id
            if identity in ids:
                values = {name: float(column[place[identity]]) for name, column in self.metrics.items()}
                trajectory.metrics = values | {"em": values[self.main]}
                found[identity] = trajectory
        if lacking := [identity for identity in ids if identity not in found]:
            raise UserError(
                f"run {self.folder}: results.jsonl has no answer to the question {lacking[0]!r}; give its command again, which "
                "asks what is missing"
            )
        return found


def load_run(folder: str | Path, name: str = "") -> EvaluationRun:
    """Reads what `rrl.eval.evaluate.run`, or launch/score.py with a card, left.

    Raises UserError for a folder that is no evaluation, one that is not finished, damaged, or has no card.
    """
    folder = Path(folder)
    if not (folder / "metrics.json").is_file():
        if (folder / "results.jsonl").is_file():
            done = (folder / "results.jsonl").read_bytes().count(b"\n")
            raise UserError(
                f"run {folder}: not finished ({done} questions are answered); give its command again, which continues it"
            )
        raise UserError(
            f"run {folder}: no evaluation (no metrics.json there); give a folder of launch/eval.py"
        )
    try:
        found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
        metrics = {name: np.array([line[name] for line in lines]) for name in found["metrics"]}
        ids = [str(line["id"]) for line in lines]
        coverage = {
            name: np.array([line[name] for line in lines], np.float64)
            for name in found.get("retrieval_intervals", {})
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"run {folder}: its metrics.json or scores.jsonl is damaged ({error!r}); give its command again, which writes both"
        ) from error
    if "card" not in found:
        raise UserError(
            f"run {folder}: its metrics.json has no result card; launch/score.py keeps one with --card, launch/eval.py always"
        )
    try:
        card = card_of(found["card"])
    except UserError as error:
        raise UserError(f"run {folder}: metrics.json, card: {error}") from error
    if len(lines) != card.questions:
        raise UserError(
            f"run {folder}: scores.jsonl has {len(lines)} lines for {card.questions} questions; give its command again, which "
            "writes it"
        )
    return EvaluationRun(
        name or folder.name.removeprefix("eval-"), folder, card, found, metrics, ids, coverage
    )


def load_runs(folders: Sequence[str | Path]) -> list[EvaluationRun]:
    """Several runs; those whose folders are named alike are called by their paths.

    Raises UserError for none, for a folder that is given twice, and as `load_run`.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if not paths:
        raise UserError("no run: give the folder of one evaluation or more")
    if repeated := [str(path) for path in paths if paths.count(path) > 1]:
        raise UserError(f"run {repeated[0]} is given twice; give each once")
    names = [path.name for path in paths]
    alike = {name for name in names if names.count(name) > 1}
    return [load_run(given, str(given) if name in alike else "") for given, name in zip(folders, names)]


def paired(
    first: EvaluationRun, run: EvaluationRun, metric: str, level: float = 0.95, seed: int = 0
) -> PairedComparison | None:
    """What `run` does better than `first` by a metric, also one of retrieval; None for other questions, or a metric that one of
    them lacks."""
    same = first.card.questions_sha256 == run.card.questions_sha256
    if metric in first.coverage:
        gold = {card.gold_sha256 for card in (first.card, run.card)} - {""}
        by = {of.found.get("retrieval_by", TITLES) for of in (first, run) if of.coverage}
        same = same and len(gold) < 2 and len(by) < 2
    ours, theirs = ({**of.metrics, **of.coverage}.get(metric) for of in (first, run))
    if run is first or not same or ours is None or theirs is None:
        return None
    if list(first.ids) != list(run.ids):
        raise UserError(
            f"the runs {first.name} and {run.name} have their scores.jsonl in different orders; give the commands again, which "
            "write them"
        )
    known = ~(np.isnan(ours) | np.isnan(theirs))  # without gold passages there is no recall
    if not known.any():
        return None
    return compare(ours[known], theirs[known], level=level, seed=seed)


def remarks(runs: Sequence[EvaluationRun]) -> list[str]:
    """In what the runs cannot be compared as they stand: corpus, retriever, questions, normalisation; and what is missing of
    each, and why."""
    unknown = [run.name for run in runs if run.card.corpus and not run.card.corpus_sha256]
    lines = differences({run.name: run.card for run in runs})
    if unknown and len(runs) > 1:
        lines.append(f"corpus not known of {', '.join(unknown)}: {UNKNOWN}, and may have held another corpus")
    return lines + [f"{run.name}: {line}" for run in runs for line in shortcomings(run.found)]


def unlike(first: EvaluationRun, run: EvaluationRun) -> bool:
    """Whether a run's row needs a mark beside the first's."""
    return bool(differences({"first": first.card, "run": run.card}) or shortcomings(run.found))


def common(runs: Sequence[EvaluationRun]) -> list[tuple[str, str]]:
    """What all runs share, in words."""
    parted = {line.partition(" differs: ")[0] for line in remarks(runs)}
    return [(part, value) for part, value in runs[0].card.setting.items() if part not in parted]


def records(runs: Sequence[EvaluationRun], level: float = 0.95, seed: int = 0) -> list[dict[str, Any]]:
    """One flat record a run: card, metrics with intervals, differences from the first run with p, coverage and costs."""
    rows = []
    for run in runs:
        card = run.card
        row: dict[str, Any] = {"run": run.name, "method": card.method, "model": card.model}
        row |= {"dataset": card.dataset, "questions": card.questions, "corpus": card.corpus}
        row |= {
            "corpus_passages": card.passages,
            "retriever": card.retriever.get("kind", ""),
            "top_k": card.top_k,
        }
        row |= {
            "seed": card.seed,
            "normalization": card.normalization,
            "comparable": not unlike(runs[0], run),
        }
        for metric, values in (*run.metrics.items(), *run.coverage.items()):
            interval = bootstrap(values[~np.isnan(values)], level=level, seed=seed)
            row |= {metric: interval.mean, f"{metric}_low": interval.low, f"{metric}_high": interval.high}
            test = paired(runs[0], run, metric, level, seed)
            if test is not None:
                row |= {
                    f"{metric}_difference": test.difference,
                    f"{metric}_difference_low": test.low,
                    f"{metric}_difference_high": test.high,
                    f"{metric}_p": test.p,
                }
        row |= {name: run.found.get(name, 0) for name, _ in SHORTCOMINGS}
        row |= run.found.get("retrieval", {}) | run.found.get("cost", {})
        by_answer = run.found.get("retrieval_by_answer", {})
        row |= {f"{name}_by_answer": value for name, value in by_answer.items()}
        row |= {f"seconds_{stage}": value for stage, value in run.found.get("seconds", {}).items()}
        rows.append(row)
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The records as a table of all their fields."""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


Cells = list[tuple[str, ...]]
"""The rows of a table that is shown, the first of which is its head."""


def main_table(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> Cells:
    """Each run with its metrics and intervals, and the difference of the main one from the first run's."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    main = runs[0].main
    against = f"{main} against the first"
    table: Cells = [("run", "model", *metrics, *([against] if len(runs) > 1 else []))]
    for run, row in zip(runs, rows, strict=True):
        cells = [run.name + (" *" if unlike(runs[0], run) else ""), run.card.model]
        for metric in metrics:
            cells.append(_interval(row, metric) if metric in row else "–")
        if len(runs) > 1:
            cells.append(_difference(row, main))
        table.append(tuple(cells))
    return table


def cost_table(rows: Sequence[Mapping[str, Any]]) -> Cells:
    """Searches, turns and tokens by role, means over questions, and what a right answer costs; no rows where none are known."""
    names = [name for name in COSTS if any(name in row for row in rows)]
    table: Cells = [("a question", *map(_words, names))]
    table += [(row["run"], *(f"{row[name]:.2f}" if name in row else "–" for name in names)) for row in rows]
    return table if names else []


def coverage_table(rows: Sequence[Mapping[str, Any]]) -> Cells:
    """How well what was found covers the gold passages, with intervals, and by how much more of it is found in full than by the
    first run; no rows where no run knows of any."""
    names = [name for name in RETRIEVAL if any(name in row for row in rows)]
    known = [row for row in rows if any(name in row for name in names)]
    if not known:
        return []
    tested = any("full_recall_p" in row for row in known)
    table: Cells = [("run", *map(_words, names), *["full recall against the first"] * tested)]
    for row in known:
        shown = [_covered(row, name) if name in row else "–" for name in names]
        table.append((row["run"], *shown, *[_difference(row, "full_recall")] * tested))
    return table


def _covered(row: Mapping[str, Any], name: str) -> str:
    if name == "passages":
        return f"{row[name]:.2f}"
    return _interval(row, name) if f"{name}_low" in row else f"{100 * row[name]:.1f}"


def group_table(runs: Sequence[EvaluationRun], group: str) -> Cells:
    """The main metric by kind ("by_kind") or by hops ("by_hops"), and the numbers of questions, of each run that had others than
    the first; no rows where no run has them."""
    labels = sorted({label for run in runs for label in run.found.get(group, {})})
    if not labels:
        return []
    table: Cells = [(f"{runs[0].main} {_words(group)}", *map(_words, labels))]
    for run in runs:
        parts = run.found.get(group, {})
        shown = (f"{100 * parts[label][run.main]:.1f}" if label in parts else "–" for label in labels)
        table.append((run.name, *shown))
    for run in runs:
        parts = run.found.get(group, {})
        told = tuple(str(parts[label]["questions"]) if label in parts else "–" for label in labels)
        if run is runs[0] or told != table[len(runs) + 1][1:]:
            table.append(("questions" if run is runs[0] else f"questions of {run.name}", *told))
    return table


def latency_table(runs: Sequence[EvaluationRun]) -> Cells:
    """Seconds a question by stage."""
    stages = [s for s in STAGES if any(s in r.found.get("seconds", {}) for r in runs)]
    table: Cells = [("seconds a question, many at a time", *stages, "measured over")]
    for run in runs:
        seconds = run.found.get("seconds", {})
        shown = (f"{seconds[s]:.3f}" if s in seconds else "–" for s in stages)
        # A stretch that was broken off has no time, so that a run that went on has it of some of its questions.
        table.append((run.name, *shown, str(run.found.get("timed", "–"))))
    return table if stages else []


def tables(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> list[Cells]:
    """All tables that are shown, in order."""
    found = [main_table(runs, rows), group_table(runs, "by_kind"), group_table(runs, "by_hops")]
    found += [coverage_table(rows), cost_table(rows), latency_table(runs)]
    return [table for table in found if table]


def as_markdown(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables, above them what all runs share, below the first what makes them unlike."""
    lines = [f"- {part}: {value}" for part, value in common(runs)]
    first, *others = tables(runs, rows)
    lines += ["", "Percent, with intervals over questions.", "", *_markdown(first)]
    if notes := remarks(runs):
        lines += ["", "\\* not comparable with the first row as it stands:", ""]
        lines += [f"- {note}" for note in notes]
    for table in others:
        lines += ["", *_markdown(table)]
    return "\n".join(lines) + "\n"


def _markdown(table: Cells) -> list[str]:
    head, *body = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in table]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def _interval(row: Mapping[str, Any], metric: str) -> str:
    return f"{100 * row[metric]:.1f} [{100 * row[f'{metric}_low']:.1f}, {100 * row[f'{metric}_high']:.1f}]"


def _difference(row: Mapping[str, Any], metric: str) -> str:
    if f"{metric}_p" not in row:
        return "–"
    low, high = 100 * row[f"{metric}_difference_low"], 100 * row[f"{metric}_difference_high"]
    return f"{100 * row[f'{metric}_difference']:+.1f} [{low:+.1f}, {high:+.1f}], p = {row[f'{metric}_p']:.2g}"


def _words(name: str) -> str:
    return name.replace("_", " ")
