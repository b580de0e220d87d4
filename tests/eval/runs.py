"""Folders of finished evaluations with scripted answers to a few questions; no model is needed."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rrl.data.questions import Question, save_questions
from rrl.data.trajectory import Search
from rrl.eval.answer_records import record_of_trajectory
from rrl.eval.evaluation_report import scores_of
from rrl.eval.judging import Judgements
from rrl.eval.provenance import installed_versions
from rrl.eval.result_card import ResultCard, questions_fingerprint
from rrl.eval.score_report import report, write_report
from tests.eval.fakes import fake

QUESTIONS = [
    Question("a", "Where is <Oslo>?", ("Norway",), "one_hop", ("Oslo",)),
    Question("b", "Who founded it?", ("Ada Berg",), "two_hop", ("Oslo", "Ada Berg")),
    Question("c", "When?", ("1947",), "two_hop", ("Ada Berg",)),
    Question("d", "Is it?", ("yes",), "one_hop", ("Oslo",)),
]


def finished(folder: Path, answers: Mapping[str, str], **card: object) -> Path:
    """Write a run with these answers by question id; missing ones are "wrong". `card` changes fields of its result card."""
    folder.mkdir(parents=True)
    save_questions(folder / "questions.jsonl", QUESTIONS)
    with (folder / "results.jsonl").open("w") as stream:
        for question in reversed(QUESTIONS):
            answer = answers.get(question.id, "wrong")
            searches = [Search(0, "capital", ("Oslo", "Rome"))]
            parts = [
                "<search> capital </search>",
                "\n<observation>\nOslo\n</observation>\n",
                f"<answer> {answer} </answer>",
            ]
            trajectory = fake(question, parts, searches, answer=answer)
            stream.write(json.dumps(record_of_trajectory(trajectory)) + "\n")
    made = ResultCard(
        method=folder.name,
        dataset="four",
        questions=4,
        questions_sha256=questions_fingerprint(QUESTIONS),
        corpus="wiki",
        corpus_sha256="c" * 64,
        passages=100,
        retriever={"kind": "bm25"},
        top_k=2,
        limits={"max_searches": 4},
        model="models/x",
        model_sha256="d" * 64,
        normalization="squad",
        versions=installed_versions(),
        command="python launch/eval.py",
    )
    scores = scores_of(folder, QUESTIONS, "squad", Judgements())
    found = report(scores) | {
        "tags": [["search", "search"], [["<answer>", "</answer>"], "answer"]],
        "seconds": {"answer": 0.5},
        "card": dataclasses.asdict(dataclasses.replace(made, **card)),
    }
    write_report(folder, found, scores)
    return folder
