"""Renders a report of several evaluations as one self-contained HTML page: tables, training curves, and
the trajectories of all runs for the same question. Read `report_page` first.

The page loads nothing from the network. Without JavaScript it shows all questions, one below the other.
All text of policies and passages is escaped.
"""

import base64
import html
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.eval.comparison import comparability_notes, shared_settings
from rrl.eval.comparison_tables import Table, tables
from rrl.eval.evaluation_run import EvaluationRun
from rrl.report.article import article, correctness, in_words

QUESTIONS_SHOWN = 60
"""Default number of questions on a page."""
MARKS = {"right": "✓", "partly": "◐", "wrong": "✗", "unscored": "·"}
"""Verdict of a trajectory -> its mark in the list of questions."""


def report_page(
    runs: Sequence[EvaluationRun],
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str = "Evaluations",
    curves: bytes = b"",
    shown: int = QUESTIONS_SHOWN,
) -> str:
    """Return the page as HTML.

    Args:
      runs: finished evaluations; all others are compared with the first.
      rows: one record per run (`rrl.eval.comparison.comparison_rows`).
      title: title and heading of the page.
      curves: a PNG of training curves; empty: no such section.
      shown: number of questions whose trajectories are shown, starting with those on which the runs
        differ most.
    """
    first_table, *other_tables = tables(runs, rows)
    shared = "".join(
        f"<dt>{_text(part)}</dt><dd>{_text(value)}</dd>" for part, value in shared_settings(runs)
    )
    notes = "".join(f"<li>{_text(note)}</li>" for note in comparability_notes(runs))
    notes_html = (
        f"<div class='notes'>* not directly comparable with the first row, or with failures:<ul>{notes}</ul></div>"
        if notes
        else ""
    )
    figure = ""
    if curves:
        data = base64.b64encode(curves).decode()
        figure = (
            "<section><h2>Training of the policies</h2><figure><img alt='training curves' "
            f"src='data:image/png;base64,{data}'></figure></section>"
        )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<title>{_text(title)}</title>
<style>{_resource("page.css")}{_resource("report.css")}</style></head>
<body class="rrl report">
<h1>{_text(title)}</h1>
<section><dl class="shared">{shared}</dl>
<p class="quiet">Percent, with intervals over questions.</p>{_table(first_table)}{notes_html}
{"".join(map(_table, other_tables))}</section>
{figure}
<section><h2>How each result was produced</h2>{"".join(map(_card, runs))}</section>
{_browser(runs, shown)}
<script>{_resource("page.js")}</script>
</body></html>
"""


def most_different_questions(runs: Sequence[EvaluationRun], count: int) -> list[Question]:
    """Return at most `count` questions that all runs answered, sorted by the spread of the main metric
    over runs.

    The list is empty if a run stores no trajectories.
    """
    if not all(run.has_trajectories for run in runs):
        return []
    by_run = [
        dict(zip(((q.id, q.text) for q in run.questions()), run.metrics[run.main_metric], strict=True))
        for run in runs
    ]
    shared = [q for q in runs[0].questions() if all((q.id, q.text) in values for values in by_run)]
    spread = np.array([np.ptp([values[q.id, q.text] for values in by_run]) for q in shared])
    return [shared[index] for index in np.argsort(-spread, kind="stable")[:count]]


def _browser(runs: Sequence[EvaluationRun], count: int) -> str:
    """Return the section with the list of questions and, for each question, its trajectories side by side."""
    questions = most_different_questions(runs, count)
    if not questions:
        why = "no question was asked in all runs, or one of them stores no trajectories"
        return f"<section><p class='quiet'>Nothing to show side by side: {why}.</p></section>"
    ids = {question.id for question in questions}
    by_run = [run.trajectories(list(ids)) for run in runs]
    trajectories_by_question = [
        [trajectories[question.id] for trajectories in by_run] for question in questions
    ]
    links = "".join(
        _link(index, q, trajectories)
        for index, (q, trajectories) in enumerate(zip(questions, trajectories_by_question, strict=True))
    )
    slots = "".join(
        _slot(index, q, trajectories, runs)
        for index, (q, trajectories) in enumerate(zip(questions, trajectories_by_question, strict=True))
    )
    filters = _filters(trajectories_by_question)
    return f"""<div class="browser"><header class="bar"><h1>The same question, side by side</h1>
<p class="quiet">{len(questions)} questions, starting with those on which the runs differ most</p>{filters}</header>
<nav id="list" aria-label="questions">{links}</nav>
<main>{slots}<p id="none" hidden>No question matches this filter.</p></main></div>"""


def _agreement(trajectories: Sequence[Trajectory]) -> str:
    """Return whether all, some or none of the runs are right. `trajectories` are those of one question, one per run."""
    right = sum(correctness(trajectory) == "right" for trajectory in trajectories)
    return "all right" if right == len(trajectories) else "some right" if right else "none right"


def _filters(trajectories_by_question: Sequence[Sequence[Trajectory]]) -> str:
    kinds = sorted({trajectories[0].question.kind for trajectories in trajectories_by_question} - {""})
    agreements = sorted({_agreement(trajectories) for trajectories in trajectories_by_question})
    selects = [("agreement", "right or wrong", agreements), ("kind", "every kind", kinds)]
    boxes = "".join(
        f'<select data-field="{field}" aria-label="{field}"><option value="">{every}</option>'
        + "".join(f'<option value="{_text(value)}">{in_words(value)}</option>' for value in values)
        + "</select>"
        for field, every, values in selects
        if values
    )
    search = '<input type="search" placeholder="words in the question or answers" aria-label="words">'
    return f'<form id="filters">{boxes}{search}<output></output></form>'


def _link(index: int, question: Question, trajectories: Sequence[Trajectory]) -> str:
    marks = "".join(f'<b class="{correctness(t)}">{MARKS[correctness(t)]}</b>' for t in trajectories)
    return (
        f'<a href="#t{index}" data-at="{index}"><span><span class="asked">{_text(question.text)}</span>'
        f"<small>{marks} {in_words(question.kind)}</small></span></a>"
    )


def _slot(
    index: int, question: Question, trajectories: Sequence[Trajectory], runs: Sequence[EvaluationRun]
) -> str:
    """Return the trajectories of question number `index` in columns, one per run; page.js shows one question at a time."""
    searchable = [
        question.text,
        question.id,
        *question.answers,
        *(trajectory.answer for trajectory in trajectories),
    ]
    columns = "".join(
        f"<div><h3>{_text(run.name)}</h3>{article(trajectory, tags=run.tags)}</div>"
        for run, trajectory in zip(runs, trajectories, strict=True)
    )
    return (
        f'<div class="slot" id="t{index}" data-kind="{_text(question.kind)}" data-agreement="{_agreement(trajectories)}" '
        f'data-words="{_text(" ".join(searchable).lower())}">'
        f'<h2>{_text(question.text)}</h2><div class="sides">{columns}</div></div>'
    )


def _table(table: Table) -> str:
    head, *body = table
    left = [index for index, name in enumerate(head) if index == 0 or name == "model"]

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in left else ''}>{_text(text)}</{tag}>"
            for index, text in enumerate(cells)
        )

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in body)
    top = f"<thead><tr>{row(head, 'th')}</tr></thead>"
    return f"<div class='scroll'><table class='results'>{top}<tbody>{rows}</tbody></table></div>"


def _card(run: EvaluationRun) -> str:
    card = run.card
    facts = card.setting | {
        "method": card.method,
        **card.models,
        "limits": ", ".join(f"{name} {value}" for name, value in card.limits.items()),
        "temperature": f"{card.temperature:g}",
        "seed": str(card.seed),
        "judge": card.judge or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
        "command": card.command,
    }
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"<details><summary>{_text(run.name)}</summary><dl class='shared'>{rows}</dl></details>"


def _text(text: str) -> str:
    return html.escape(text)


def _resource(name: str) -> str:
    return importlib.resources.files("rrl.report").joinpath(name).read_text(encoding="utf-8")
