"""Predictions are matched to questions by id or text, and errors name the line."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from rrl.data.gold_answers import EMPTY_ANSWER
from rrl.data.questions import Question, load_questions
from rrl.errors import UserError
from rrl.eval.matching import drop_unscorable, match_predictions, questions_in_file, scorable
from rrl.eval.prediction_files import load_predictions
from rrl.eval.predictions import Prediction
from rrl.eval.scoring import score
from rrl.text.normalize import RULES
from tests.eval.predicted import QUESTIONS, SQUAD, predicted


def test_predictions_are_matched_by_id_in_any_order() -> None:
    predictions = predicted("Paris", "red house", "yes")
    assert match_predictions(predictions[::-1], QUESTIONS, "p", "d") == predictions


def test_matching_by_question_ignores_ids() -> None:
    predictions = [dataclasses.replace(p, id=f"test_{p.id}") for p in predicted("Paris", "red house", "yes")]
    assert match_predictions(predictions[::-1], QUESTIONS, "p", "d", by="question") == predictions


def test_predictions_without_ids_are_matched_by_text_and_occurrence() -> None:
    questions = [*QUESTIONS, dataclasses.replace(QUESTIONS[0], id="d")]
    predictions = [
        Prediction(f"line {at}", None, text, (text,))
        for at, text in enumerate(["is IT?", "who? ", "What?", "Who?"])
    ]
    found = match_predictions(predictions, questions, "p", "d")
    assert [p and p.place for p in found] == ["line 1", "line 2", "line 0", "line 3"]
    with pytest.raises(
        UserError, match=r"p, line 3: question 'Who\?' is not among the 3 questions of d, or occurs more"
    ):
        match_predictions(predictions, QUESTIONS, "p", "d")


def test_ids_that_number_the_questions_in_another_order_are_rejected() -> None:
    predictions = [
        dataclasses.replace(p, question=q.text) for p, q in zip(predicted("x", "y", "z"), QUESTIONS)
    ]
    assert match_predictions(predictions, QUESTIONS, "p", "d") == predictions
    turned = [dataclasses.replace(p, question=q.text) for p, q in zip(predictions, QUESTIONS[::-1])]
    with pytest.raises(
        UserError, match=r"p, line 1: id 'a' has the question '.*', which in d is .*--match=question"
    ):
        match_predictions(turned, QUESTIONS, "p", "d")
    spelled = [dataclasses.replace(p, question=f"Question: {p.question}") for p in predictions]
    assert match_predictions(spelled, QUESTIONS, "p", "d") == spelled  # the text equals no other question
    strange = [dataclasses.replace(p, question=f"Another one, {p.id}?") for p in predictions]
    with pytest.raises(UserError, match=r"p: 3 of 3 predictions have another question than .* in d\. Give"):
        match_predictions(strange, QUESTIONS, "p", "d")
    assert (
        match_predictions([*strange[:1], *predictions[1:]], QUESTIONS, "p", "d")[0] == strange[0]
    )  # one reworded question is allowed


def test_errors_name_the_line_of_an_unmatched_prediction_or_question(tmp_path: Path) -> None:
    data = tmp_path / "dev.jsonl"
    data.write_text("\n".join(json.dumps({"id": q.id, "question": q.text, "answer": "x"}) for q in QUESTIONS))
    questions, predictions = load_questions(data), predicted("x", "y", "z")
    with pytest.raises(
        UserError,
        match=r"p.jsonl: no prediction for 2 of the 3 questions of .*dev.jsonl \(ids 'b', 'c'; the first at line 2\)",
    ):
        match_predictions(predictions[:1], questions, "p.jsonl", str(data))
    assert match_predictions(predictions[:1], questions, "p.jsonl", str(data), "wrong") == [
        predictions[0],
        None,
        None,
    ]
    stranger = dataclasses.replace(predictions[0], id="z", place="line 9")
    with pytest.raises(
        UserError, match=r"p.jsonl, line 9: id 'z' is not among the 3 questions of .*--match=question"
    ):
        match_predictions([stranger], questions, "p.jsonl", str(data))
    with pytest.raises(UserError, match=r"dev.jsonl, question 4: id 'a' occurs twice, first at line 1"):
        match_predictions(predictions, [*questions, questions[0]], "p.jsonl", str(data))
    with pytest.raises(
        UserError, match=r"p.jsonl, line 1: question or text.*has no gold answers: give .*--data"
    ):
        questions_in_file(predictions, "p.jsonl")


def test_unanswerable_questions_count_only_under_squad2(
    tmp_path: Path,
) -> None:
    questions = [
        Question("a", "Who?", ("A",)),
        Question("b", "Why?", EMPTY_ANSWER),
        Question("c", "How?", EMPTY_ANSWER),
    ]
    file = tmp_path / "predictions.json"
    file.write_text('{"a": "A", "b": "", "c": "x"}')
    predictions = load_predictions(file)
    for rule, em in ((RULES["squad2"], [1, 1, 0]), (SQUAD, [1])):
        counts = scorable(questions, rule)
        scored = [question for question, count in zip(questions, counts) if count]
        pairs = match_predictions(drop_unscorable(predictions, questions, counts), scored, "p", "d")
        assert score(pairs, scored, rule).metrics["em"].tolist() == em
    file.write_text('{"b": null}')
    assert score(load_predictions(file), questions[1:2], RULES["squad2"]).metrics["em"].tolist() == [1]


@pytest.mark.parametrize("by", ["id", "question"])
def test_without_predictions_every_question_is_missing(by: Literal["id", "question"]) -> None:
    with pytest.raises(UserError, match="p: no prediction for 3 of the 3 questions of d"):
        match_predictions([], QUESTIONS, "p", "d", by=by)
    assert match_predictions([], QUESTIONS, "p", "d", "wrong", by) == [None, None, None]


def test_of_two_questions_with_one_id_the_answerable_one_counts() -> None:
    """MuSiQue-Full has each question twice: with passages that answer it, and with passages that do not."""
    pair = [Question("a", "Who?", ("A",)), Question("a", "Who?", EMPTY_ANSWER)]
    assert scorable(pair, RULES["squad2"]) == [True, False]
    prediction = Prediction("line 1", "a", "", ("A",))
    assert drop_unscorable([prediction], pair, [True, False]) == [prediction]


def test_kilt_predictions_are_not_read_as_gold_answers(tmp_path: Path) -> None:
    file = tmp_path / "kilt.jsonl"
    file.write_text('{"id": "1", "input": "Who?", "output": [{"answer": "A"}]}\n')
    with pytest.raises(UserError, match="line 1: no gold answer"):
        questions_in_file(load_predictions(file), str(file))


@pytest.mark.parametrize("field", ["prediction", "answer"])
def test_results_and_trajectories_contain_their_gold_answers(tmp_path: Path, field: str) -> None:
    """The answer in the record is the policy's, not a gold answer."""
    file = tmp_path / "results.jsonl"
    question = {
        "id": "a",
        "text": "Who?",
        "answers": ["A", "the A"],
        "kind": "one",
        "gold": ["T"],
        "hops": 0,
        "choices": [],
    }
    records = [
        {"id": name, field: answer, "answer": answer, "question": question | {"id": name}, "ended": "answer"}
        for name, answer in (("a", "B"), ("b", "A"))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    predictions = load_predictions(file)
    questions = questions_in_file(predictions, str(file))
    assert [q.answers for q in questions] == [("A", "the A")] * 2 and questions[0].gold == ("T",)
    pairs = match_predictions(predictions, questions, "p", "d")
    assert score(pairs, questions, SQUAD).metrics["em"].tolist() == [0, 1]
