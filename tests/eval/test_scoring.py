"""Scores of real trajectories equal those of a second implementation, and reports equal counts by hand."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest

from rrl.data.gold_answers import EMPTY_ANSWER
from rrl.data.questions import Question, load_questions
from rrl.errors import UserError
from rrl.eval.predictions import Prediction, load_predictions
from rrl.eval.scoring import (
    as_text,
    compare_scores,
    drop_unscorable,
    match_predictions,
    questions_in_file,
    report,
    scorable,
    score,
    write_report,
)
from rrl.files import SaveError
from rrl.text.normalize import RULES
from tests.shared_data import shared
from tests.text.test_metrics import reference_f1, words

SQUAD = RULES["squad"]
QUESTIONS = [
    Question("a", "Who?", ("Paris",), "bridge", ("T", "U"), 2),
    Question("b", "What?", ("the red house",), "bridge", ("V",), 3),
    Question("c", "Is it?", ("yes",), "comparison"),
]


def predicted(*answers: str, **more: object) -> list[Prediction]:
    return [
        Prediction(f"line {at}", question.id, question.text, (answer,), **more)
        for at, (question, answer) in enumerate(zip(QUESTIONS, answers), 1)
    ]


@pytest.mark.parametrize("name", ["r1_searcher_2wiki_qwen", "r1_searcher_hotpotqa_qwen"])
def test_real_records_have_the_scores_of_a_second_implementation(name: str) -> None:
    file = shared(f"rollouts/{name}.jsonl.gz")
    predictions = load_predictions(file, judge_field="gpt4o_output")
    scores = score(predictions, questions_in_file(predictions, str(file)), SQUAD, judged=True)
    assert len(predictions) == 500 and scores.unparsed == 0
    for at, prediction in enumerate(predictions):
        given, gold = prediction.record["pred_ans"], prediction.record["answer"]
        assert scores.metrics["em"][at] == float(words(given) == words(gold)), prediction.place
        assert scores.metrics["f1"][at] == pytest.approx(reference_f1(given, gold), abs=1e-12), (
            prediction.place
        )
        assert scores.metrics["judge"][at] == float(prediction.record["gpt4o_output"] == "True"), (
            prediction.place
        )


def test_scoring_is_fast() -> None:
    """At least 20,000 predictions per second of thread time in the best round; garbage collection may slow down a round."""
    file = shared("rollouts/r1_searcher_2wiki_qwen.jsonl.gz")
    predictions = load_predictions(file)
    questions = questions_in_file(predictions, str(file)) * 40
    took = []
    for _ in range(3):
        started = time.thread_time()
        score(predictions * 40, questions, SQUAD)
        took.append(time.thread_time() - started)
    assert 500 * 40 / min(took) > 20_000


def test_a_report_equals_counts_by_hand() -> None:
    predictions = [
        dataclasses.replace(prediction, titles=titles, counts={"searches": searches, "tokens": tokens})
        for prediction, titles, searches, tokens in zip(
            predicted("Paris", "a house", "no"), (("T", "x"), ("y", "V"), ()), (1, 2, 0), (10, 20, 60)
        )
    ]
    scores = score(predictions, QUESTIONS, SQUAD)
    found = report(scores)
    assert scores.metrics["f1"].tolist() == [1, pytest.approx(2 / 3), 0]
    assert found["metrics"]["em"]["mean"] == pytest.approx(1 / 3)
    assert found["by_kind"]["bridge"] == {"questions": 2, "em": 0.5, "f1": pytest.approx(5 / 6), "cem": 0.5}
    assert found["by_hops"] == {
        "2": {"questions": 1, "em": 1, "f1": 1, "cem": 1},
        "3": {"questions": 1, "em": 0, "f1": pytest.approx(2 / 3), "cem": 0},
        "other": {"questions": 1, "em": 0, "f1": 0, "cem": 0},
    }
    assert found["retrieval"]["recall"] == pytest.approx(
        (1 / 2 + 1) / 2
    )  # the third question has no gold passages
    assert found["retrieval"]["passages"] == 2
    interval = found["retrieval_intervals"]["recall"]
    assert (interval["mean"], interval["low"], interval["high"], interval["count"]) == (0.75, 0.5, 1.0, 2)
    shown = next(line for line in as_text(found).splitlines() if line.startswith("recall "))
    assert shown.split()[:5] == ["recall", "75.0", "50.0", "–", "100.0"]
    assert found["cost"] == {"searches": 1, "tokens": 30, "tokens_when_correct": 10, "tokens_per_correct": 90}
    assert "33.3" in as_text(found) and "tokens_per_correct 90.00" in as_text(found)


def test_a_missing_answer_is_wrong_and_unparsed_verdicts_are_counted() -> None:
    predictions = predicted("Paris", "x", "yes", verdict=None)
    scores = score([predictions[0], None, predictions[2]], QUESTIONS, SQUAD, judged=True)
    assert scores.metrics["em"].tolist() == [1, 0, 1]
    assert scores.metrics["judge"].tolist() == [0, 0, 0]
    assert (scores.missing, scores.unparsed) == (1, 2)
    assert "1 questions without a prediction count as wrong" in as_text(report(scores))


def test_the_report_mentions_failed_searches_only_if_there_are_any() -> None:
    predictions = predicted("Paris", "x", "yes")
    assert "searches_failed" not in report(score(predictions, QUESTIONS, SQUAD))
    predictions[1] = dataclasses.replace(predictions[1], failed_searches=2)
    found = report(score([*predictions[:2], None], QUESTIONS, SQUAD))
    assert found["searches_failed"] == 2 and "2 searches failed" in as_text(found)


def test_multiple_choice_is_scored_by_letter_and_not_mixed_with_free_answers() -> None:
    choosing = [dataclasses.replace(question, answers=("B",), choices=("x", "y")) for question in QUESTIONS]
    scores = score(predicted("The answer is (B)", "A", "b"), choosing, SQUAD)
    assert scores.metrics["acc"].tolist() == [1, 0, 0] and scores.main_metric == "acc"
    with pytest.raises(UserError, match="1 of 3 questions are multiple choice"):
        score(predicted("a", "b", "c"), [*QUESTIONS[:2], choosing[2]], SQUAD)


def test_two_runs_are_compared_by_question() -> None:
    first = score(predicted("Paris", "red house", "yes"), QUESTIONS, SQUAD)
    second = score(predicted("Lyon", "red house", "yes"), QUESTIONS, SQUAD)
    found = compare_scores(first, second)
    assert set(found) == {"em", "f1", "cem"}  # retrieved passages are not known
    lists = [[["T", "U"], ["V"], []], [["T"], ["V"], []]]
    some, fewer = (dataclasses.replace(first, titles=titles) for titles in lists)
    more = compare_scores(some, fewer)["full_recall"]  # the third question has no gold passages
    assert (more["difference"], more["better"], more["worse"], more["same"]) == (0.5, 1, 0, 1)
    assert found["em"]["difference"] == pytest.approx(1 / 3)
    assert (found["em"]["better"], found["em"]["worse"], found["em"]["same"]) == (1, 0, 2)
    text = as_text(report(first) | {"against": found, "against_file": "other.jsonl"})
    assert "em against other.jsonl: +33.3" in text and "p = 1 (McNemar)" in text


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


def test_reports_are_written_atomically(tmp_path: Path) -> None:
    scores = score(predicted("Paris", "x", "yes"), QUESTIONS, SQUAD)
    write_report(tmp_path / "out", report(scores), scores)
    assert json.loads((tmp_path / "out/metrics.json").read_text())["questions"] == 3
    lines = [json.loads(line) for line in (tmp_path / "out/scores.jsonl").read_text().splitlines()]
    assert [line["em"] for line in lines] == [1, 0, 1] and lines[0]["id"] == "a" and lines[1]["hops"] == 3
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["metrics.json", "scores.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made .*; give another folder"):
        write_report(tmp_path / "file", {}, scores)
    (tmp_path / "out/metrics.json").unlink()
    (tmp_path / "out/metrics.json").mkdir()
    with pytest.raises(SaveError, match=r"out/metrics\.json could not be saved: a folder is in its place"):
        write_report(tmp_path / "out", {}, scores)
    np.testing.assert_array_equal(scores.metrics["em"], [1, 0, 1])


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


def test_gold_passages_are_matched_by_ids_if_the_predictions_have_them() -> None:
    """T is the title of two passages; the gold one was not retrieved."""
    questions = [dataclasses.replace(QUESTIONS[0], gold_ids=("1", "2"))]
    (prediction,) = predicted("Paris", titles=("T", "U"), ids=("9", "2"))[:1]
    by_id = score([prediction], questions, SQUAD)
    by_title = score([dataclasses.replace(prediction, ids=None)], questions, SQUAD)
    assert by_id.gold_key_and_warning == ("gold ids", "")
    assert by_id.retrieval_metrics["recall"].tolist() == [0.5]
    assert by_title.gold_key_and_warning[0] == "gold titles"
    assert by_title.retrieval_metrics["recall"].tolist() == [1]
    assert "by gold ids" in as_text(report(by_id))
    shown = as_text(report(by_title))
    assert "by gold titles" in shown and "do not have the ids of the retrieved passages" in shown
    assert "recall" not in compare_scores(by_id, by_title) and "recall" in compare_scores(by_id, by_id)


def test_a_warning_names_gold_ids_of_which_none_was_retrieved() -> None:
    (prediction,) = predicted("Paris", titles=("T", "U"), ids=("9", "8"))[:1]
    ids_alone = score([prediction], [dataclasses.replace(QUESTIONS[0], gold=(), gold_ids=("1",))], SQUAD)
    assert ids_alone.retrieval_metrics["recall"].tolist() == [0]
    assert "no passage has one of the gold ids, such as '1'" in as_text(report(ids_alone))
    both = score([prediction], [dataclasses.replace(QUESTIONS[0], gold_ids=("1",))], SQUAD)
    assert both.gold_key_and_warning[0] == "gold titles" and "such as '1'" in as_text(report(both))


def test_retrieval_can_be_measured_by_ids_alone() -> None:
    (prediction,) = predicted("Paris", ids=("9", "1"))[:1]
    scores = score([prediction], [dataclasses.replace(QUESTIONS[0], gold_ids=("1",))], SQUAD)
    assert scores.retrieval_metrics["mrr"].tolist() == [0.5]
