"""Answer metrics, against implementations by another method."""

import difflib
import gzip
import json
import string

import pytest

from rrl.errors import UserError
from rrl.text.metrics import cover_exact_match, exact_match, token_f1
from tests.shared_data import shared


def words(text: str) -> list[str]:
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def reference_f1(prediction: str, answer: str) -> float:
    """Through precision and recall, the overlap counted by matching blocks of the sorted words."""
    given, wanted = sorted(words(prediction)), sorted(words(answer))
    blocks = difflib.SequenceMatcher(None, given, wanted, autojunk=False).get_matching_blocks()
    # Blocks over sorted words may be less than the multiset overlap, so count by hand as well.
    overlap = max(sum(b.size for b in blocks), sum(min(given.count(w), wanted.count(w)) for w in set(wanted)))
    if not overlap:
        return 0.0
    precision, recall = overlap / len(given), overlap / len(wanted)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "f1", "cover"),
    [
        ("The Paris", ["paris"], 1, 1, 1),
        ("Paris, France", ["Paris"], 0, 2 / 3, 1),
        ("Lyon", ["Paris", "Lyon, France"], 0, 2 / 3, 0),
        ("red red blue", ["red blue blue"], 0, 2 / 3, 0),
        ("", ["Paris"], 0, 0, 0),
        ("nothing", ["no"], 0, 0, 0),
        ("in 1931.", ["1931"], 0, 2 / 3, 1),
    ],
)
def test_hand_computed_values(
    prediction: str, answers: list[str], em: float, f1: float, cover: float
) -> None:
    assert exact_match(prediction, answers) == em
    assert token_f1(prediction, answers) == pytest.approx(f1)
    assert cover_exact_match(prediction, answers) == cover


@pytest.mark.parametrize("metric", [exact_match, token_f1, cover_exact_match])
def test_an_empty_prediction_never_scores(metric) -> None:
    for gold in ("The", "!!!", "a the", "x"):
        assert metric("", [gold]) == 0
        assert metric(gold, [gold]) == 1


@pytest.mark.parametrize("metric", [exact_match, token_f1, cover_exact_match])
def test_more_gold_answers_never_lower_the_score(metric) -> None:
    assert metric("the red house", ["blue"]) <= metric("the red house", ["blue", "house"])


@pytest.mark.parametrize("metric", [exact_match, token_f1, cover_exact_match])
@pytest.mark.parametrize("answers", [[], (), "Paris"])
def test_missing_gold_answers_are_refused(metric, answers) -> None:
    with pytest.raises(UserError, match="answers"):
        metric("Paris", answers)


@pytest.mark.parametrize("name", ["r1_searcher_2wiki_qwen", "r1_searcher_hotpotqa_qwen"])
def test_agrees_with_a_second_implementation_on_real_answers(name: str) -> None:
    with gzip.open(shared(f"rollouts/{name}.jsonl.gz"), "rt") as stream:
        records = [json.loads(line) for line in stream]
    assert len(records) == 500
    for record in records:
        prediction, gold = record["pred_ans"], record["answer"]
        assert exact_match(prediction, [gold]) == float(words(prediction) == words(gold))
        assert token_f1(prediction, [gold]) == pytest.approx(reference_f1(prediction, gold), abs=1e-12)
