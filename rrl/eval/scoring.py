"""From predictions and questions to a report: metrics with intervals, by kind and by hops, retrieval, cost, and a paired test."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from rrl.data.questions import UNANSWERABLE, Question, question_of
from rrl.data.records import read_records
from rrl.errors import UserError
from rrl.eval.intervals import bootstrap, compare
from rrl.eval.predictions import Prediction
from rrl.files import atomic_stream, saving
from rrl.report.summary import table
from rrl.retrieval.gold import TITLES, GoldHits, gold_key, hits_by
from rrl.text.characters import canonical_unicode
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL, Rule
from rrl.text.short_answers import choice_correct

CUTS = (2, 5, 10)
"""Ranks at which retrieval is reported, beside all that was found."""


SHORTCOMINGS = (
    ("missing", "questions without a prediction count as wrong"),
    ("judge_unparsed", "verdicts of the judge could not be understood and count as wrong"),
    ("short_unread", "answers whose short forms could not be understood are scored as they stand"),
    (
        "searches_failed",
        "searches failed, and nothing was found by them: mend the index or its service and evaluate into another --workdir",
    ),
)
"""Counts of a report that make it worth less, in words."""
FACTS = (
    ("cost", "cost", 1),
    ("ended", "ended by, percent", 100),
    ("seconds", "seconds a question, many at a time", 1),
)
"""Groups of figures of a report: name, in words, and what they are multiplied by where they are shown."""
COVERAGE = (
    ("retrieval", "gold passages, percent"),
    ("retrieval_by_answer", "first passage with an answer, percent"),
)
"""Groups with figures at several ranks, and in words."""
BESIDE = ("prompt_tokens", "environment_tokens", "reader_prompt_tokens", "reader_tokens")
"""Counts of tokens that the policy did not write: what it read, and what another model read and wrote that answers for it."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of one run, a value a question."""

    questions: Sequence[Question]
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """em, f1, cem (or acc, of multiple choices), judge; in [0, 1], 0 where nothing was predicted."""
    counts: Mapping[str, Float[np.ndarray, "Q"]]
    """searches, turns, tokens (sampled), those of `BESIDE`, and seconds, where every prediction has them; 0 where nothing was
    predicted."""
    titles: Sequence[Sequence[str]] | None
    """What was found for each question; None where a prediction does not say."""
    ids: Sequence[Sequence[str]] | None = None
    """The same by the ids of the passages."""
    missing: int = 0
    """Questions without a prediction, which count as wrong."""
    unparsed: int = 0
    """Verdicts of the judge that could not be understood, which count as wrong."""
    failed: int = 0
    """Searches that failed, as far as the predictions say."""

    @property
    def main(self) -> str:
        """The metric that says right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @functools.cached_property
    def gold_by(self) -> tuple[str, str]:
        """By what gold passages are recognised, and a warning, as of `gold_key`; "" where that is not known of what was found."""
        titles, ids = self.titles, self.ids
        if ids is None:
            titled = titles is not None and any(question.gold for question in self.questions)
            unknown = any(question.gold_ids for question in self.questions)
            warning = "the predictions do not have the ids of what was found" if unknown else ""
            return (TITLES if titled else ""), warning if titles is not None else ""
        found = (
            pair
            for at, row in enumerate(ids)
            for pair in zip(row, titles[at] if titles is not None else [""] * len(row), strict=True)
        )
        key, warning = gold_key(self.questions, found)
        return ("" if key == TITLES and titles is None else key), warning

    @functools.cached_property
    def hits(self) -> GoldHits | None:
        """Which of what was found is gold; None where what was found or gold passages are not known."""
        key, _ = self.gold_by
        return hits_by(key, self.ids or (), self.titles or (), self.questions) if key else None

    @property
    def coverage(self) -> dict[str, Float[np.ndarray, "Q"]]:
        """recall, full_recall, map, hits and mrr of all that was found, NaN for a question without gold passages."""
        return self.hits.metrics() if self.hits is not None else {}


def own_questions(predictions: Sequence[Prediction], name: str) -> list[Question]:
    """The questions and gold answers that stand in the prediction file `name` itself, those of unanswerable questions empty (see
    `scorable`); UserError names the line that has none."""
    questions = []
    for position, prediction in enumerate(predictions):
        try:
            # KILT's gold answers stand under "output" too, which holds the predictions here.
            fields = {name: value for name, value in prediction.record.items() if name != "output"}
            questions.append(question_of(position, fields, unanswerable="empty"))
        except ValueError as error:
            raise UserError(
                f"{name}, {prediction.place}: {error}. The file holds no gold answers of its own: give the questions with --data."
            ) from error
    return questions


def scorable(questions: Sequence[Question], rule: Rule) -> list[bool]:
    """Which questions count: unanswerable ones only where `rule` pays for an empty answer, as SQuAD 2.0's does.

    Of MuSiQue-Full, where both of a pair have one id, the answerable one counts, as in its own evaluation of answers.
    """
    answered = {question.id for question in questions if question.answers != UNANSWERABLE}
    counts = rule.empty == "equal"
    return [q.answers != UNANSWERABLE or (counts and q.id not in answered) for q in questions]


def without(
    predictions: Sequence[Prediction], questions: Sequence[Question], counts: Sequence[bool]
) -> list[Prediction]:
    """The predictions but for those to questions that do not count (see `scorable`)."""
    kept = [question for question, count in zip(questions, counts, strict=True) if count]
    left = [question for question, count in zip(questions, counts, strict=True) if not count]
    ids = {question.id for question in left} - {question.id for question in kept}
    texts = {_plain(question.text) for question in left} - {_plain(question.text) for question in kept}
    return [p for p in predictions if (_plain(p.question) not in texts if p.id is None else p.id not in ids)]


def matched(
    predictions: Sequence[Prediction],
    questions: Sequence[Question],
    name: str,
    data: str,
    missing: Literal["refuse", "wrong"] = "refuse",
    by: Literal["id", "question"] = "id",
) -> list[Prediction | None]:
    """The prediction for each question, `by` id, or by text where that is asked for or the predictions have no ids.

    A text that several questions share is matched in order. With `missing` "wrong", None stands where there is no prediction.

    Raises UserError that names the line: an id or text in `name` that is none of `data`'s, one that is there too often, or a
    question of `data` without a prediction.
    """
    by_id = by == "id" and predictions[0].id is not None
    keys: Sequence[Any] = [q.id for q in questions] if by_id else _texts([q.text for q in questions])
    wanted: dict[Any, int] = {}
    for at, key in enumerate(keys):
        if key in wanted:
            raise UserError(
                f"{data}, {_place(data, at)}: id {key!r} is there twice, first at {_place(data, wanted[key])}"
            )
        wanted[key] = at
    # Ids that only number the questions may number them in another order.
    texts: dict[str, list[int]] = {}
    for at, question in enumerate(questions):
        texts.setdefault(_plain(question.text), []).append(at)
    given: Sequence[Any] = [p.id for p in predictions] if by_id else _texts([p.question for p in predictions])
    found: list[Prediction | None] = [None] * len(questions)
    known = strange = 0
    for prediction, key in zip(predictions, given):
        if key not in wanted:
            what = f"id {prediction.id!r}" if by_id else f"question {prediction.question!r:.80}"
            raise UserError(
                f"{name}, {prediction.place}: {what} is none of the {len(questions)} questions of {data}"
                + ("" if by_id else ", or is there more often than among them")
                + ". Give the questions that were asked"
                + (
                    ", or match by their texts with --match=question."
                    if by_id and prediction.question
                    else "."
                )
            )
        asked = _plain(prediction.question)
        if by_id and asked:
            known += 1
            strange += _plain(questions[wanted[key]].text) not in asked
        places = texts.get(asked, [])
        if by_id and places and wanted[key] not in places:
            raise UserError(
                f"{name}, {prediction.place}: id {prediction.id!r} was asked {prediction.question!r:.80}, which in {data} is "
                f"{_place(data, places[0])}, id {questions[places[0]].id!r}. Match by the texts with --match=question."
            )
        found[wanted[key]] = prediction
    if strange > known / 2:
        raise UserError(
            f"{name}: {strange} of {known} predictions were asked another question than the one that has their id in {data}. "
            "Give the questions that were asked; where the ids are right all the same, leave the texts out of the predictions."
        )
    lost = [at for at, prediction in enumerate(found) if prediction is None]
    if lost and missing == "refuse":
        ids = ", ".join(repr(questions[at].id) for at in lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise UserError(
            f"{name}: no prediction for {len(lost)} of the {len(questions)} questions of {data} (ids {ids}; the first at "
            f"{_place(data, lost[0])}). Predict them, or count them as wrong with --missing=wrong."
        )
    return found


def score(
    predictions: Sequence[Prediction | None],
    questions: Sequence[Question],
    rule: Rule = RRL,
    judged: bool = False,
) -> Scores:
    """Scores each prediction for the question beside it; None is wrong. `judged`: a judge's verdicts are among the metrics.

    Raises UserError where some questions are a multiple choice and others are not.
    """
    # Where an empty answer can be right, no answer is one.
    none = ("",) if rule.empty == "equal" else ()
    given = [(prediction.answers or none) if prediction else () for prediction in predictions]
    there = [prediction for prediction in predictions if prediction]
    metrics: dict[str, np.ndarray] = {}
    choosing = sum(bool(question.choices) for question in questions)
    if choosing == len(questions):
        metrics["acc"] = np.array(
            [
                max((choice_correct(answer, q.answers, q.choices) for answer in answers), default=0.0)
                for answers, q in zip(given, questions, strict=True)
            ]
        )
    elif choosing:
        raise UserError(
            f"{choosing} of {len(questions)} questions are a multiple choice: score them apart from the others"
        )
    else:
        found = score_answers(given, [question.answers for question in questions], rule)
        columns = np.array(found, np.float64).reshape(-1, 3).T
        metrics |= {"em": columns[0], "f1": columns[1], "cem": columns[2]}
    if judged:
        metrics["judge"] = np.array([float(bool(p and p.verdict)) for p in predictions])
    counts = {
        name: np.array([p.counts[name] if p else 0.0 for p in predictions])
        for name in (there[0].counts if there else ())
        if all(name in p.counts for p in there)
    }
    known = bool(there) and all(p.titles is not None for p in there)
    titles = [(p.titles or ()) if p else () for p in predictions] if known else None
    named = bool(there) and all(p.ids is not None for p in there)
    ids = [(p.ids or ()) if p else () for p in predictions] if named else None
    return Scores(
        questions,
        metrics,
        counts,
        titles,
        ids,
        missing=len(predictions) - len(there),
        unparsed=sum(p.verdict is None for p in there) if judged else 0,
        failed=sum(p.failed for p in there),
    )


def report(scores: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Means with bootstrap intervals, the means by kind and by hops, retrieval, and cost; plain values, for JSON."""
    found: dict[str, Any] = {
        "questions": len(scores.questions),
        "missing": scores.missing,
        "level": level,
        "metrics": {
            name: dataclasses.asdict(bootstrap(values, level=level, seed=seed))
            for name, values in scores.metrics.items()
        },
    }
    if "judge" in scores.metrics:
        found["judge_unparsed"] = scores.unparsed
    if scores.failed:
        found["searches_failed"] = scores.failed
    groups = {
        "by_kind": [q.kind for q in scores.questions],
        "by_hops": [str(q.hops) if q.hops else "" for q in scores.questions],
    }
    for name, labels in groups.items():
        if any(labels):
            found[name] = {label or "other": _means(scores, labels, label) for label in sorted(set(labels))}
    by, warning = scores.gold_by
    if warning:
        found["retrieval_warning"] = warning
    if scores.hits is not None:
        found["retrieval"] = scores.hits.report(CUTS)
        found["retrieval_by"] = by
        found["retrieval_intervals"] = {
            name: dataclasses.asdict(bootstrap(values[~np.isnan(values)], level=level, seed=seed))
            for name, values in scores.coverage.items()
        }
    found["cost"] = costs(scores.counts, scores.metrics[scores.main])
    return found


def costs(counts: Mapping[str, Float[np.ndarray, "Q"]], right: Float[np.ndarray, "Q"]) -> dict[str, float]:
    """Means of the counts, and what a right answer costs in tokens, where any is right."""
    found = {name: float(values.mean()) for name, values in counts.items()}
    answers = float(right.sum())
    if "tokens" in counts and answers:
        found["tokens_per_correct"] = float(counts["tokens"].sum()) / answers
        found["tokens_when_correct"] = float(counts["tokens"] @ right / answers)
        if beside := [counts[name] for name in BESIDE if name in counts]:
            found["all_tokens_per_correct"] = float(counts["tokens"].sum() + np.sum(beside)) / answers
    return found


def against(first: Scores, second: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """For each metric that both runs have, what the first does better than the second on the same questions; also of retrieval,
    where gold passages are recognised in both by the same (`gold_by`)."""
    alike = first.gold_by[0] == second.gold_by[0]
    ours, theirs = ({**scores.metrics, **(scores.coverage if alike else {})} for scores in (first, second))
    known = {name: ~np.isnan(values) for name, values in ours.items()}
    return {
        name: dataclasses.asdict(
            compare(theirs[name][known[name]], values[known[name]], level=level, seed=seed)
        )
        for name, values in ours.items()
        if name in theirs
    }


def as_text(found: Mapping[str, Any]) -> str:
    """A report as a table."""
    percent = f"{100 * found['level']:g} %"
    rows = [("", "mean", f"{percent} interval")]
    rows += [
        (name, f"{100 * of['mean']:.1f}", f"{100 * of['low']:.1f} – {100 * of['high']:.1f}")
        for name, of in found["metrics"].items()
    ]
    lines = [f"{found['questions']} questions, percent", *table(rows)]
    for group, title in (("by_kind", "kind"), ("by_hops", "hops")):
        if group in found:
            names = list(found["metrics"])
            body = [
                (label, str(of["questions"]), *(f"{100 * of[name]:.1f}" for name in names))
                for label, of in found[group].items()
            ]
            lines += ["", *table([(title, "questions", *names), *body])]
    for name, words in COVERAGE:
        if facts := found.get(name):
            lines += ["", *_coverage(facts, words, percent, found.get(f"{name}_intervals", {}))]
            if by := found.get(f"{name}_by"):
                lines.append(f"by {by}")
    if warning := found.get("retrieval_warning"):
        lines += ["", f"gold passages: {warning}"]
    for name, words, scale in FACTS:
        if facts := found.get(name):
            decimals = 3 if name == "seconds" else 2
            shown = (f"{key} {value * scale:.{decimals}f}" for key, value in facts.items())
            lines += ["", f"{words}: {'   '.join(shown)}"]
            if name == "seconds" and (timed := found.get("timed", 0)) < found["questions"] and timed:
                lines[-1] += f"   (measured over {timed} of them)"
    for name, of in found.get("against", {}).items():
        lines += [
            "",
            f"{name} against {found['against_file']}: {100 * of['difference']:+.1f} ({percent} interval "
            f"{100 * of['low']:+.1f} – {100 * of['high']:+.1f}), p = {of['p']:.4g} ({of['test']}); "
            f"better on {of['better']}, worse on {of['worse']}, the same on {of['same']}",
        ]
    for line in shortcomings(found):
        lines += ["", line]
    return "\n".join(lines)


def shortcomings(found: Mapping[str, Any]) -> list[str]:
    """What was missing or failed where the report `found` was made, a line each; empty where all went well."""
    return [f"{found[name]:,} {words}" for name, words in SHORTCOMINGS if found.get(name)]


def _coverage(
    facts: Mapping[str, float], title: str, percent: str, intervals: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """A row a metric, a column a rank, the interval of the first; and what has no rank."""
    names = [name for name in facts if f"{name}@{CUTS[0]}" in facts]
    body = [
        [name, *(f"{100 * facts[name + cut]:.1f}" for cut in ("", *(f"@{k}" for k in CUTS)))]
        for name in names
    ]
    head = [title, "all", *(f"@{k}" for k in CUTS)]
    if intervals:
        head.insert(2, f"{percent} interval")
        for row in body:
            of = intervals[row[0]]
            row.insert(2, f"{100 * of['low']:.1f} – {100 * of['high']:.1f}")
    lines = table([head, *body])
    if "passages" in facts:
        lines.append(f"different passages {facts['passages']:.2f}   eta_re {100 * facts['eta_re']:.2f}")
    return lines


def write_report(folder: str | Path, found: Mapping[str, Any], scores: Scores) -> None:
    """Writes metrics.json (the report) and scores.jsonl (a line a question) into the folder, each only when it is whole.

    Of a question without gold passages the metrics of retrieval are null. Raises UserError where the folder cannot be made, and
    SaveError where a file cannot be written.
    """
    folder, lines, coverage = Path(folder), [], scores.coverage
    for at, question in enumerate(scores.questions):
        values = {
            name: None if np.isnan(column[at]) else float(column[at])
            for columns in (scores.metrics, scores.counts, coverage)
            for name, column in columns.items()
        }
        lines.append(
            json.dumps({"id": question.id, "kind": question.kind, "hops": question.hops} | values) + "\n"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={str(folder)!r} cannot be made ({error}); give another folder") from error
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    for name, content in (("scores.jsonl", "".join(lines)), ("metrics.json", text)):
        with saving(folder / name), atomic_stream(folder / name) as stream:
            stream.write(content.encode())


def _means(scores: Scores, labels: Sequence[str], label: str) -> dict[str, float]:
    these = np.array([other == label for other in labels])
    means = {name: float(values[these].mean()) for name, values in scores.metrics.items()}
    return {"questions": int(these.sum())} | means


def _plain(text: str) -> str:
    """Without case and extra white space, in one Unicode form."""
    return " ".join(canonical_unicode(text).casefold().split())


def _texts(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Each text without case and extra white space, and how often it has occurred before."""
    seen: dict[str, int] = {}
    keys = []
    for text in texts:
        key = _plain(text)
        keys.append((key, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return keys


def _place(data: str, at: int) -> str:
    """Where a question stands in its file; its number where that is no file."""
    if Path(data).is_file():
        for position, (place, _) in enumerate(read_records(data)):
            if position == at:
                return place
    return f"question {at + 1}"
