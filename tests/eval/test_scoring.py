"""Scores of real trajectories equal those of a second implementation."""

import dataclasses
import time

import pytest

from rrl.errors import UserError
from rrl.eval.matching import questions_in_file
from rrl.eval.prediction_files import load_predictions
from rrl.eval.score_report import as_text, report
from rrl.eval.scoring import score
from tests.eval.predicted import QUESTIONS, SQUAD, predicted
from tests.shared_data import shared
from tests.text.test_metrics import reference_f1, words


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


def test_a_missing_answer_is_wrong_and_unparsed_verdicts_are_counted() -> None:
    predictions = predicted("Paris", "x", "yes", verdict=None)
    scores = score([predictions[0], None, predictions[2]], QUESTIONS, SQUAD, judged=True)
    assert scores.metrics["em"].tolist() == [1, 0, 1]
    assert scores.metrics["judge"].tolist() == [0, 0, 0]
    assert (scores.missing, scores.unparsed) == (1, 2)
    assert "1 questions without a prediction count as wrong" in as_text(report(scores))


def test_multiple_choice_is_scored_by_letter_and_not_mixed_with_free_answers() -> None:
    choosing = [dataclasses.replace(question, answers=("B",), choices=("x", "y")) for question in QUESTIONS]
    scores = score(predicted("The answer is (B)", "A", "b"), choosing, SQUAD)
    assert scores.metrics["acc"].tolist() == [1, 0, 0] and scores.main_metric == "acc"
    with pytest.raises(UserError, match="1 of 3 questions are multiple choice"):
        score(predicted("a", "b", "c"), [*QUESTIONS[:2], choosing[2]], SQUAD)


def test_retrieval_can_be_measured_by_ids_alone() -> None:
    (prediction,) = predicted("Paris", ids=("9", "1"))[:1]
    scores = score([prediction], [dataclasses.replace(QUESTIONS[0], gold_ids=("1",))], SQUAD)
    assert scores.retrieval_metrics["mrr"].tolist() == [0.5]
