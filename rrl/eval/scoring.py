"""Score predictions and make a report: answer metrics with intervals (also by kind and by hops), retrieval metrics and costs.

Read `match_predictions`, `score` and `report`, in this order.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from rrl.data.gold_answers import EMPTY_ANSWER
from rrl.data.questions import Question, question_of
from rrl.data.records import read_records
from rrl.errors import UserError
from rrl.eval.intervals import bootstrap, compare
from rrl.eval.predictions import Prediction
from rrl.files import atomic_stream, saving
from rrl.report.summary import table
from rrl.retrieval.gold import TITLES, GoldHits, gold_key, hits_by_key
from rrl.text.characters import canonical_unicode
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL, Rule
from rrl.text.short_answers import choice_correct

CUTS = (2, 5, 10)
"""Ranks at which retrieval is reported, in addition to all retrieved passages."""


REPORT_WARNINGS = (
    ("missing", "questions without a prediction count as wrong"),
    ("judge_unparsed", "verdicts of the judge could not be parsed and count as wrong"),
    ("short_unread", "answers are scored in full, because their short forms could not be parsed"),
    (
        "searches_failed",
        "searches failed and returned no passages: repair the index or its service, and evaluate into another --workdir",
    ),
)
"""Counts in a report that make its metrics less reliable: (key, explanation)."""
VALUE_GROUPS = (
    ("cost", "cost per question", 1),
    ("ended", "ended by, percent", 100),
    ("seconds", "seconds per question, batched", 1),
)
"""Parts of a report that are shown on one line: (key, heading, factor by which values are multiplied for display)."""
RETRIEVAL_GROUPS = (
    ("retrieval", "gold passages, percent"),
    ("retrieval_by_answer", "first passage with an answer, percent"),
)
"""Parts of a report with retrieval metrics at several ranks: (key, heading)."""
OTHER_TOKENS = ("prompt_tokens", "environment_tokens", "reader_prompt_tokens", "reader_tokens")
"""Counts of tokens that the policy did not sample: what it read, and what the reader model read and wrote."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of one run, one value per question."""

    questions: Sequence[Question]
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """em, f1, cem (acc for multiple choice) and judge, in [0, 1]; 0 for a question without a prediction."""
    counts: Mapping[str, Float[np.ndarray, "Q"]]
    """searches, turns, tokens (sampled), those of `OTHER_TOKENS`, and seconds; each only if every prediction has it. 0 for a
    question without a prediction."""
    titles: Sequence[Sequence[str]] | None
    """Titles of the passages retrieved for each question; None if a prediction lacks them."""
    ids: Sequence[Sequence[str]] | None = None
    """Ids of these passages; None if a prediction lacks them."""
    missing: int = 0
    """Number of questions without a prediction; these count as wrong."""
    unparsed: int = 0
    """Number of the judge's verdicts that could not be parsed; these count as wrong."""
    failed_searches: int = 0
    """Number of searches that the predictions mark as failed."""

    @property
    def main_metric(self) -> str:
        """The metric that counts an answer as right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @functools.cached_property
    def gold_key_and_warning(self) -> tuple[str, str]:
        """How gold passages are recognised, by ids or titles, and a warning or "": see `rrl.retrieval.gold.gold_key`.

        The key is "" if the predictions have neither ids nor titles of passages.
        """
        titles, ids = self.titles, self.ids
        if ids is None:
            by_titles = titles is not None and any(question.gold for question in self.questions)
            has_gold_ids = any(question.gold_ids for question in self.questions)
            warning = "the predictions do not have the ids of the retrieved passages" if has_gold_ids else ""
            return (TITLES if by_titles else ""), warning if titles is not None else ""
        passages = (
            pair
            for at, row in enumerate(ids)
            for pair in zip(row, titles[at] if titles is not None else [""] * len(row), strict=True)
        )
        key, warning = gold_key(self.questions, passages)
        return ("" if key == TITLES and titles is None else key), warning

    @functools.cached_property
    def hits(self) -> GoldHits | None:
        """Which of the retrieved passages are gold; None if retrieved or gold passages are not known."""
        key, _ = self.gold_key_and_warning
        return hits_by_key(key, self.ids or (), self.titles or (), self.questions) if key else None

    @property
    def retrieval_metrics(self) -> dict[str, Float[np.ndarray, "Q"]]:
        """recall, full_recall, map, hits and mrr of all retrieved passages, NaN for a question without gold passages."""
        return self.hits.metrics() if self.hits is not None else {}


def questions_in_file(predictions: Sequence[Prediction], name: str) -> list[Question]:
    """Return the questions and gold answers that the prediction file `name` itself contains.

    Unanswerable questions have empty gold answers (see `scorable`). Raises UserError, with the line, for a record without gold
    answers.
    """
    questions = []
    for position, prediction in enumerate(predictions):
        try:
            # KILT has its gold answers under "output" too, which holds the predictions here.
            fields = {name: value for name, value in prediction.record.items() if name != "output"}
            questions.append(question_of(position, fields, unanswerable="empty"))
        except ValueError as error:
            raise UserError(
                f"{name}, {prediction.place}: {error}. The file has no gold answers: give the questions with --data."
            ) from error
    return questions


def scorable(questions: Sequence[Question], rule: Rule) -> list[bool]:
    """Return for each question whether it counts.

    Unanswerable questions count only if `rule` rewards an empty answer, as SQuAD 2.0 does.

    In MuSiQue-Full an answerable and an unanswerable question share an id. The answerable one counts, as in MuSiQue's own
    evaluation of answers.
    """
    answered = {question.id for question in questions if question.answers != EMPTY_ANSWER}
    unanswerable_counts = rule.empty == "equal"
    return [q.answers != EMPTY_ANSWER or (unanswerable_counts and q.id not in answered) for q in questions]


def drop_unscorable(
    predictions: Sequence[Prediction], questions: Sequence[Question], counted: Sequence[bool]
) -> list[Prediction]:
    """Return the predictions without those for questions that do not count; `counted` comes from `scorable`."""
    kept = [question for question, count in zip(questions, counted, strict=True) if count]
    dropped = [question for question, count in zip(questions, counted, strict=True) if not count]
    ids = {question.id for question in dropped} - {question.id for question in kept}
    texts = {_plain(question.text) for question in dropped} - {_plain(question.text) for question in kept}
    return [p for p in predictions if (_plain(p.question) not in texts if p.id is None else p.id not in ids)]


def match_predictions(
    predictions: Sequence[Prediction],
    questions: Sequence[Question],
    name: str,
    data: str,
    missing: Literal["refuse", "wrong"] = "refuse",
    by: Literal["id", "question"] = "id",
) -> list[Prediction | None]:
    """Return the prediction for each question.

    A text that several questions share is matched in order.

    Args:
      predictions: of one file.
      questions: with unique ids.
      name: file of the predictions, for messages.
      data: file of the questions, for messages.
      missing: "wrong": None for a question without a prediction; "refuse": an error.
      by: match by "id", or by the text of the "question". Predictions without ids are always matched by text.

    Raises UserError, with the line, for an id or text that is not among the questions or occurs too often, and for a missing
    prediction unless `missing` is "wrong".
    """
    by_id = by == "id" and predictions[0].id is not None
    keys: Sequence[Any] = [q.id for q in questions] if by_id else _texts([q.text for q in questions])
    wanted: dict[Any, int] = {}
    for at, key in enumerate(keys):
        if key in wanted:
            raise UserError(
                f"{data}, {_place(data, at)}: id {key!r} occurs twice, first at {_place(data, wanted[key])}"
            )
        wanted[key] = at
    # Some files only number their questions. Texts show whether both files number them in the same order.
    texts: dict[str, list[int]] = {}
    for at, question in enumerate(questions):
        texts.setdefault(_plain(question.text), []).append(at)
    given: Sequence[Any] = [p.id for p in predictions] if by_id else _texts([p.question for p in predictions])
    matched: list[Prediction | None] = [None] * len(questions)
    compared = different = 0
    for prediction, key in zip(predictions, given):
        if key not in wanted:
            what = f"id {prediction.id!r}" if by_id else f"question {prediction.question!r:.80}"
            raise UserError(
                f"{name}, {prediction.place}: {what} is not among the {len(questions)} questions of {data}"
                + ("" if by_id else ", or occurs more often than there")
                + ". Give the questions of these predictions"
                + (
                    ", or match by their texts with --match=question."
                    if by_id and prediction.question
                    else "."
                )
            )
        text = _plain(prediction.question)
        if by_id and text:
            compared += 1
            different += _plain(questions[wanted[key]].text) not in text
        places = texts.get(text, [])
        if by_id and places and wanted[key] not in places:
            raise UserError(
                f"{name}, {prediction.place}: id {prediction.id!r} has the question {prediction.question!r:.80}, which in {data} "
                f"is {_place(data, places[0])}, id {questions[places[0]].id!r}. Match by the texts with --match=question."
            )
        matched[wanted[key]] = prediction
    if different > compared / 2:
        raise UserError(
            f"{name}: {different} of {compared} predictions have another question than the one with their id in {data}. "
            "Give the questions of these predictions; if the ids are right, leave the texts out of the predictions."
        )
    lost = [at for at, prediction in enumerate(matched) if prediction is None]
    if lost and missing == "refuse":
        ids = ", ".join(repr(questions[at].id) for at in lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise UserError(
            f"{name}: no prediction for {len(lost)} of the {len(questions)} questions of {data} (ids {ids}; the first at "
            f"{_place(data, lost[0])}). Predict them, or count them as wrong with --missing=wrong."
        )
    return matched


def score(
    predictions: Sequence[Prediction | None],
    questions: Sequence[Question],
    rule: Rule = RRL,
    judged: bool = False,
) -> Scores:
    """Score each prediction against its question; None counts as wrong.

    Args:
      predictions: one per question, as from `match_predictions`.
      questions: the questions.
      rule: normalisation of answers.
      judged: whether the predictions have verdicts of a judge, which become the metric "judge".

    Raises UserError if some questions are multiple choice and others are not.
    """
    # If an empty answer can be right, a missing answer counts as an empty one.
    no_answer = ("",) if rule.empty == "equal" else ()
    answers = [(prediction.answers or no_answer) if prediction else () for prediction in predictions]
    present = [prediction for prediction in predictions if prediction]
    metrics: dict[str, np.ndarray] = {}
    multiple_choice = sum(bool(question.choices) for question in questions)
    if multiple_choice == len(questions):
        metrics["acc"] = np.array(
            [
                max((choice_correct(answer, q.answers, q.choices) for answer in given), default=0.0)
                for given, q in zip(answers, questions, strict=True)
            ]
        )
    elif multiple_choice:
        raise UserError(
            f"{multiple_choice} of {len(questions)} questions are multiple choice: score them separately from the others"
        )
    else:
        scored = score_answers(answers, [question.answers for question in questions], rule)
        columns = np.array(scored, np.float64).reshape(-1, 3).T
        metrics |= {"em": columns[0], "f1": columns[1], "cem": columns[2]}
    if judged:
        metrics["judge"] = np.array([float(bool(p and p.verdict)) for p in predictions])
    counts = {
        name: np.array([p.counts[name] if p else 0.0 for p in predictions])
        for name in (present[0].counts if present else ())
        if all(name in p.counts for p in present)
    }
    have_titles = bool(present) and all(p.titles is not None for p in present)
    titles = [(p.titles or ()) if p else () for p in predictions] if have_titles else None
    have_ids = bool(present) and all(p.ids is not None for p in present)
    ids = [(p.ids or ()) if p else () for p in predictions] if have_ids else None
    return Scores(
        questions,
        metrics,
        counts,
        titles,
        ids,
        missing=len(predictions) - len(present),
        unparsed=sum(p.verdict is None for p in present) if judged else 0,
        failed_searches=sum(p.failed_searches for p in present),
    )


def report(scores: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Return means with bootstrap intervals, means by kind and by hops, retrieval and cost, as plain values for JSON."""
    summary: dict[str, Any] = {
        "questions": len(scores.questions),
        "missing": scores.missing,
        "level": level,
        "metrics": {
            name: dataclasses.asdict(bootstrap(values, level=level, seed=seed))
            for name, values in scores.metrics.items()
        },
    }
    if "judge" in scores.metrics:
        summary["judge_unparsed"] = scores.unparsed
    if scores.failed_searches:
        summary["searches_failed"] = scores.failed_searches
    groups = {
        "by_kind": [q.kind for q in scores.questions],
        "by_hops": [str(q.hops) if q.hops else "" for q in scores.questions],
    }
    for name, labels in groups.items():
        if any(labels):
            summary[name] = {label or "other": _means(scores, labels, label) for label in sorted(set(labels))}
    by, warning = scores.gold_key_and_warning
    if warning:
        summary["retrieval_warning"] = warning
    if scores.hits is not None:
        summary["retrieval"] = scores.hits.report(CUTS)
        summary["retrieval_by"] = by
        summary["retrieval_intervals"] = {
            name: dataclasses.asdict(bootstrap(values[~np.isnan(values)], level=level, seed=seed))
            for name, values in scores.retrieval_metrics.items()
        }
    summary["cost"] = costs(scores.counts, scores.metrics[scores.main_metric])
    return summary


def costs(counts: Mapping[str, Float[np.ndarray, "Q"]], right: Float[np.ndarray, "Q"]) -> dict[str, float]:
    """Return means of the counts and, if any answer is right, tokens per right answer."""
    means = {name: float(values.mean()) for name, values in counts.items()}
    answers = float(right.sum())
    if "tokens" in counts and answers:
        means["tokens_per_correct"] = float(counts["tokens"].sum()) / answers
        means["tokens_when_correct"] = float(counts["tokens"] @ right / answers)
        if others := [counts[name] for name in OTHER_TOKENS if name in counts]:
            means["all_tokens_per_correct"] = float(counts["tokens"].sum() + np.sum(others)) / answers
    return means


def compare_scores(first: Scores, second: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Return a paired comparison for each metric that both runs have. The runs have the same questions.

    A difference is the mean of `first` less the mean of `second`.

    Metrics of retrieval are compared only if both runs recognise gold passages in the same way (`gold_key_and_warning`).
    """
    same_key = first.gold_key_and_warning[0] == second.gold_key_and_warning[0]
    first_metrics, second_metrics = (
        {**scores.metrics, **(scores.retrieval_metrics if same_key else {})} for scores in (first, second)
    )
    known = {name: ~np.isnan(values) for name, values in first_metrics.items()}
    return {
        name: dataclasses.asdict(
            compare(second_metrics[name][known[name]], values[known[name]], level=level, seed=seed)
        )
        for name, values in first_metrics.items()
        if name in second_metrics
    }


def as_text(summary: Mapping[str, Any]) -> str:
    """Return a report as text."""
    percent = f"{100 * summary['level']:g} %"
    rows = [("", "mean", f"{percent} interval")]
    rows += [
        (name, f"{100 * interval['mean']:.1f}", f"{100 * interval['low']:.1f} – {100 * interval['high']:.1f}")
        for name, interval in summary["metrics"].items()
    ]
    lines = [f"{summary['questions']} questions, percent", *table(rows)]
    for group, title in (("by_kind", "kind"), ("by_hops", "hops")):
        if group in summary:
            names = list(summary["metrics"])
            body = [
                (label, str(means["questions"]), *(f"{100 * means[name]:.1f}" for name in names))
                for label, means in summary[group].items()
            ]
            lines += ["", *table([(title, "questions", *names), *body])]
    for name, heading in RETRIEVAL_GROUPS:
        if values := summary.get(name):
            lines += ["", *_retrieval_lines(values, heading, percent, summary.get(f"{name}_intervals", {}))]
            if by := summary.get(f"{name}_by"):
                lines.append(f"by {by}")
    if warning := summary.get("retrieval_warning"):
        lines += ["", f"gold passages: {warning}"]
    for name, heading, scale in VALUE_GROUPS:
        if values := summary.get(name):
            decimals = 3 if name == "seconds" else 2
            shown = (f"{key} {value * scale:.{decimals}f}" for key, value in values.items())
            lines += ["", f"{heading}: {'   '.join(shown)}"]
            if name == "seconds" and (timed := summary.get("timed", 0)) < summary["questions"] and timed:
                lines[-1] += f"   (measured on {timed} of them)"
    for name, test in summary.get("against", {}).items():
        lines += [
            "",
            f"{name} against {summary['against_file']}: {100 * test['difference']:+.1f} ({percent} interval "
            f"{100 * test['low']:+.1f} – {100 * test['high']:+.1f}), p = {test['p']:.4g} ({test['test']}); "
            f"better on {test['better']}, worse on {test['worse']}, the same on {test['same']}",
        ]
    for line in report_warnings(summary):
        lines += ["", line]
    return "\n".join(lines)


def report_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of failure in a report; [] if there was none."""
    return [f"{summary[name]:,} {words}" for name, words in REPORT_WARNINGS if summary.get(name)]


def _retrieval_lines(
    facts: Mapping[str, float], title: str, percent: str, intervals: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return a table with a row per metric and a column per rank, the interval of the mean, and the values without a rank."""
    names = [name for name in facts if f"{name}@{CUTS[0]}" in facts]
    body = [
        [name, *(f"{100 * facts[name + cut]:.1f}" for cut in ("", *(f"@{k}" for k in CUTS)))]
        for name in names
    ]
    head = [title, "all", *(f"@{k}" for k in CUTS)]
    if intervals:
        head.insert(2, f"{percent} interval")
        for row in body:
            interval = intervals[row[0]]
            row.insert(2, f"{100 * interval['low']:.1f} – {100 * interval['high']:.1f}")
    lines = table([head, *body])
    if "passages" in facts:
        lines.append(f"different passages {facts['passages']:.2f}   eta_re {100 * facts['eta_re']:.2f}")
    return lines


def write_report(folder: str | Path, summary: Mapping[str, Any], scores: Scores) -> None:
    """Write metrics.json (the report) and scores.jsonl (a line per question) into the folder, each atomically.

    Metrics of retrieval are null for a question without gold passages. Raises UserError if the folder cannot be made, and
    SaveError if a file cannot be written.
    """
    folder, lines, retrieval = Path(folder), [], scores.retrieval_metrics
    for at, question in enumerate(scores.questions):
        values = {
            name: None if np.isnan(column[at]) else float(column[at])
            for columns in (scores.metrics, scores.counts, retrieval)
            for name, column in columns.items()
        }
        lines.append(
            json.dumps({"id": question.id, "kind": question.kind, "hops": question.hops} | values) + "\n"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={str(folder)!r} cannot be made ({error}); give another folder") from error
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    for name, content in (("scores.jsonl", "".join(lines)), ("metrics.json", text)):
        with saving(folder / name), atomic_stream(folder / name) as stream:
            stream.write(content.encode())


def _means(scores: Scores, labels: Sequence[str], label: str) -> dict[str, float]:
    these = np.array([other == label for other in labels])
    means = {name: float(values[these].mean()) for name, values in scores.metrics.items()}
    return {"questions": int(these.sum())} | means


def _plain(text: str) -> str:
    """Return a text without case and extra white space, in one Unicode form."""
    return " ".join(canonical_unicode(text).casefold().split())


def _texts(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return each text without case and extra white space, and the number of times that it occurred before."""
    seen: dict[str, int] = {}
    keys = []
    for text in texts:
        key = _plain(text)
        keys.append((key, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return keys


def _place(data: str, at: int) -> str:
    """Return the place of a question in its file, or its number if `data` is not a file."""
    if Path(data).is_file():
        for position, (place, _) in enumerate(read_records(data)):
            if position == at:
                return place
    return f"question {at + 1}"
