"""Scores of real trajectories against a second implementation, and reports whose figures are counted by hand."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest

from rrl.data.questions import UNANSWERABLE, Question, load_questions
from rrl.errors import UserError
from rrl.eval.predictions import Prediction, load_predictions
from rrl.eval.scoring import (
    against,
    as_text,
    matched,
    own_questions,
    report,
    scorable,
    score,
    without,
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


def said(*answers: str, **more: object) -> list[Prediction]:
    return [
        Prediction(f"line {at}", question.id, question.text, (answer,), **more)
        for at, (question, answer) in enumerate(zip(QUESTIONS, answers), 1)
    ]


@pytest.mark.parametrize("name", ["r1_searcher_2wiki_qwen", "r1_searcher_hotpotqa_qwen"])
def test_every_real_record_is_judged_as_by_a_second_implementation(name: str) -> None:
    file = shared(f"rollouts/{name}.jsonl.gz")
    predictions = load_predictions(file, judge_field="gpt4o_output")
    scores = score(predictions, own_questions(predictions, str(file)), SQUAD, judged=True)
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
    """At least 20,000 predictions a second of this thread's time, at best: a collection of garbage may fall into a round."""
    file = shared("rollouts/r1_searcher_2wiki_qwen.jsonl.gz")
    predictions = load_predictions(file)
    questions = own_questions(predictions, str(file)) * 40
    took = []
    for _ in range(3):
        started = time.thread_time()
        score(predictions * 40, questions, SQUAD)
        took.append(time.thread_time() - started)
    assert 500 * 40 / min(took) > 20_000


def test_a_report_counts_what_can_be_counted_by_hand() -> None:
    predictions = [
        dataclasses.replace(prediction, titles=titles, counts={"searches": searches, "tokens": tokens})
        for prediction, titles, searches, tokens in zip(
            said("Paris", "a house", "no"), (("T", "x"), ("y", "V"), ()), (1, 2, 0), (10, 20, 60)
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


def test_no_answer_is_wrong_and_unparsed_verdicts_are_counted() -> None:
    predictions = said("Paris", "x", "yes", verdict=None)
    scores = score([predictions[0], None, predictions[2]], QUESTIONS, SQUAD, judged=True)
    assert scores.metrics["em"].tolist() == [1, 0, 1]
    assert scores.metrics["judge"].tolist() == [0, 0, 0]
    assert (scores.missing, scores.unparsed) == (1, 2)
    assert "1 questions without a prediction count as wrong" in as_text(report(scores))


def test_searches_that_failed_are_told_where_there_are_any() -> None:
    predictions = said("Paris", "x", "yes")
    assert "searches_failed" not in report(score(predictions, QUESTIONS, SQUAD))
    predictions[1] = dataclasses.replace(predictions[1], failed=2)
    found = report(score([*predictions[:2], None], QUESTIONS, SQUAD))
    assert found["searches_failed"] == 2 and "2 searches failed" in as_text(found)


def test_choices_are_scored_by_letter_and_not_mixed() -> None:
    choosing = [dataclasses.replace(question, answers=("B",), choices=("x", "y")) for question in QUESTIONS]
    scores = score(said("The answer is (B)", "A", "b"), choosing, SQUAD)
    assert scores.metrics["acc"].tolist() == [1, 0, 0] and scores.main == "acc"
    with pytest.raises(UserError, match="1 of 3 questions are a multiple choice"):
        score(said("a", "b", "c"), [*QUESTIONS[:2], choosing[2]], SQUAD)


def test_two_runs_are_compared_question_by_question() -> None:
    first = score(said("Paris", "red house", "yes"), QUESTIONS, SQUAD)
    second = score(said("Lyon", "red house", "yes"), QUESTIONS, SQUAD)
    found = against(first, second)
    assert set(found) == {"em", "f1", "cem"}  # what was found is not known
    lists = [[["T", "U"], ["V"], []], [["T"], ["V"], []]]
    some, fewer = (dataclasses.replace(first, titles=titles) for titles in lists)
    more = against(some, fewer)["full_recall"]  # the third question has no gold passages
    assert (more["difference"], more["better"], more["worse"], more["same"]) == (0.5, 1, 0, 1)
    assert found["em"]["difference"] == pytest.approx(1 / 3)
    assert (found["em"]["better"], found["em"]["worse"], found["em"]["same"]) == (1, 0, 2)
    text = as_text(report(first) | {"against": found, "against_file": "other.jsonl"})
    assert "em against other.jsonl: +33.3" in text and "p = 1 (McNemar)" in text


def test_predictions_are_matched_by_id_in_any_order() -> None:
    predictions = said("Paris", "red house", "yes")
    assert matched(predictions[::-1], QUESTIONS, "p", "d") == predictions


def test_ids_of_another_release_are_passed_over_where_texts_are_to_match() -> None:
    predictions = [dataclasses.replace(p, id=f"test_{p.id}") for p in said("Paris", "red house", "yes")]
    assert matched(predictions[::-1], QUESTIONS, "p", "d", by="question") == predictions


def test_predictions_without_ids_are_matched_by_text_and_occurrence() -> None:
    questions = [*QUESTIONS, dataclasses.replace(QUESTIONS[0], id="d")]
    predictions = [
        Prediction(f"line {at}", None, text, (text,))
        for at, text in enumerate(["is IT?", "who? ", "What?", "Who?"])
    ]
    found = matched(predictions, questions, "p", "d")
    assert [p and p.place for p in found] == ["line 1", "line 2", "line 0", "line 3"]
    with pytest.raises(
        UserError, match=r"p, line 3: question 'Who\?' is none of the 3 questions of d, or is there more"
    ):
        matched(predictions, QUESTIONS, "p", "d")


def test_ids_that_number_the_questions_in_another_order_are_refused() -> None:
    predictions = [dataclasses.replace(p, question=q.text) for p, q in zip(said("x", "y", "z"), QUESTIONS)]
    assert matched(predictions, QUESTIONS, "p", "d") == predictions
    turned = [dataclasses.replace(p, question=q.text) for p, q in zip(predictions, QUESTIONS[::-1])]
    with pytest.raises(
        UserError, match=r"p, line 1: id 'a' was asked '.*', which in d is .*--match=question"
    ):
        matched(turned, QUESTIONS, "p", "d")
    spelled = [dataclasses.replace(p, question=f"Question: {p.question}") for p in predictions]
    assert matched(spelled, QUESTIONS, "p", "d") == spelled  # in no other question's words
    strange = [dataclasses.replace(p, question=f"Another one, {p.id}?") for p in predictions]
    with pytest.raises(
        UserError, match=r"p: 3 of 3 predictions were asked another question than .* in d\. Give"
    ):
        matched(strange, QUESTIONS, "p", "d")
    assert matched([*strange[:1], *predictions[1:]], QUESTIONS, "p", "d")[0] == strange[0]  # one was reworded


def test_what_does_not_match_is_named_with_its_line(tmp_path: Path) -> None:
    data = tmp_path / "dev.jsonl"
    data.write_text("\n".join(json.dumps({"id": q.id, "question": q.text, "answer": "x"}) for q in QUESTIONS))
    questions, predictions = load_questions(data), said("x", "y", "z")
    with pytest.raises(
        UserError,
        match=r"p.jsonl: no prediction for 2 of the 3 questions of .*dev.jsonl \(ids 'b', 'c'; the first at line 2\)",
    ):
        matched(predictions[:1], questions, "p.jsonl", str(data))
    assert matched(predictions[:1], questions, "p.jsonl", str(data), "wrong") == [predictions[0], None, None]
    stranger = dataclasses.replace(predictions[0], id="z", place="line 9")
    with pytest.raises(
        UserError, match=r"p.jsonl, line 9: id 'z' is none of the 3 questions of .*--match=question"
    ):
        matched([stranger], questions, "p.jsonl", str(data))
    with pytest.raises(UserError, match=r"dev.jsonl, question 4: id 'a' is there twice, first at line 1"):
        matched(predictions, [*questions, questions[0]], "p.jsonl", str(data))
    with pytest.raises(
        UserError, match=r"p.jsonl, line 1: question or text.*no gold answers of its own: give .*--data"
    ):
        own_questions(predictions, "p.jsonl")


def test_reports_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    scores = score(said("Paris", "x", "yes"), QUESTIONS, SQUAD)
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


def test_unanswerable_questions_score_an_empty_answer_under_squad2_and_are_left_out_otherwise(
    tmp_path: Path,
) -> None:
    questions = [
        Question("a", "Who?", ("A",)),
        Question("b", "Why?", UNANSWERABLE),
        Question("c", "How?", UNANSWERABLE),
    ]
    file = tmp_path / "predictions.json"
    file.write_text('{"a": "A", "b": "", "c": "x"}')
    predictions = load_predictions(file)
    for rule, em in ((RULES["squad2"], [1, 1, 0]), (SQUAD, [1])):
        counts = scorable(questions, rule)
        scored = [question for question, count in zip(questions, counts) if count]
        pairs = matched(without(predictions, questions, counts), scored, "p", "d")
        assert score(pairs, scored, rule).metrics["em"].tolist() == em
    file.write_text('{"b": null}')
    assert score(load_predictions(file), questions[1:2], RULES["squad2"]).metrics["em"].tolist() == [1]


def test_of_a_pair_with_one_id_the_answerable_question_counts() -> None:
    """MuSiQue-Full asks each question twice, over passages that answer it and that do not."""
    pair = [Question("a", "Who?", ("A",)), Question("a", "Who?", UNANSWERABLE)]
    assert scorable(pair, RULES["squad2"]) == [True, False]
    prediction = Prediction("line 1", "a", "", ("A",))
    assert without([prediction], pair, [True, False]) == [prediction]


def test_kilts_predictions_are_not_their_own_gold_answers(tmp_path: Path) -> None:
    file = tmp_path / "kilt.jsonl"
    file.write_text('{"id": "1", "input": "Who?", "output": [{"answer": "A"}]}\n')
    with pytest.raises(UserError, match="line 1: no gold answer"):
        own_questions(load_predictions(file), str(file))


@pytest.mark.parametrize("field", ["prediction", "answer"])
def test_our_own_results_and_trajectories_score_by_themselves(tmp_path: Path, field: str) -> None:
    """The answer beside the question is the policy's, not a gold one."""
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
        {"id": name, field: said, "answer": said, "question": question | {"id": name}, "ended": "answer"}
        for name, said in (("a", "B"), ("b", "A"))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    predictions = load_predictions(file)
    questions = own_questions(predictions, str(file))
    assert [q.answers for q in questions] == [("A", "the A")] * 2 and questions[0].gold == ("T",)
    pairs = matched(predictions, questions, "p", "d")
    assert score(pairs, questions, SQUAD).metrics["em"].tolist() == [0, 1]


def test_gold_passages_are_counted_by_their_ids_where_the_predictions_have_them() -> None:
    """T is the title of two passages, of which the gold one was not found."""
    questions = [dataclasses.replace(QUESTIONS[0], gold_ids=("1", "2"))]
    (prediction,) = said("Paris", titles=("T", "U"), ids=("9", "2"))[:1]
    by_id = score([prediction], questions, SQUAD)
    by_title = score([dataclasses.replace(prediction, ids=None)], questions, SQUAD)
    assert by_id.gold_by == ("gold ids", "") and by_id.coverage["recall"].tolist() == [0.5]
    assert by_title.gold_by[0] == "gold titles" and by_title.coverage["recall"].tolist() == [1]
    assert "by gold ids" in as_text(report(by_id))
    shown = as_text(report(by_title))
    assert "by gold titles" in shown and "do not have the ids of what was found" in shown
    assert "recall" not in against(by_id, by_title) and "recall" in against(by_id, by_id)


def test_gold_ids_none_of_which_was_found_are_named() -> None:
    (prediction,) = said("Paris", titles=("T", "U"), ids=("9", "8"))[:1]
    ids_alone = score([prediction], [dataclasses.replace(QUESTIONS[0], gold=(), gold_ids=("1",))], SQUAD)
    assert ids_alone.coverage["recall"].tolist() == [0]
    assert "no passage has one of the gold ids, such as '1'" in as_text(report(ids_alone))
    both = score([prediction], [dataclasses.replace(QUESTIONS[0], gold_ids=("1",))], SQUAD)
    assert both.gold_by[0] == "gold titles" and "such as '1'" in as_text(report(both))


def test_ids_alone_are_enough() -> None:
    (prediction,) = said("Paris", ids=("9", "1"))[:1]
    scores = score([prediction], [dataclasses.replace(QUESTIONS[0], gold_ids=("1",))], SQUAD)
    assert scores.coverage["mrr"].tolist() == [0.5]
