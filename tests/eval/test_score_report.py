"""Reports equal counts by hand, and are written atomically."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.eval.score_report import as_text, compare_scores, report, write_report
from rrl.eval.scoring import score
from rrl.files import SaveError
from tests.eval.predicted import QUESTIONS, SQUAD, predicted


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


def test_the_report_mentions_failed_searches_only_if_there_are_any() -> None:
    predictions = predicted("Paris", "x", "yes")
    assert "searches_failed" not in report(score(predictions, QUESTIONS, SQUAD))
    predictions[1] = dataclasses.replace(predictions[1], failed_searches=2)
    found = report(score([*predictions[:2], None], QUESTIONS, SQUAD))
    assert found["searches_failed"] == 2 and "2 searches failed" in as_text(found)


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
