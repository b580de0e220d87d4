"""Tests of answer metrics, against independent implementations."""

import difflib
import gzip
import json
import string

import pytest

from rrl.errors import UserError
from rrl.text.metrics import (
    AnswerScores,
    cover_exact_match,
    exact_match,
    score_answer,
    score_answers,
    token_f1,
)
from rrl.text.normalize import RULES
from tests.shared_data import shared


def words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def reference_f1(prediction: str, answer: str) -> float:
    """F1 from precision and recall, with the overlap counted by matching blocks of the sorted words."""
    predicted, gold = sorted(words(prediction)), sorted(words(answer))
    blocks = difflib.SequenceMatcher(None, predicted, gold, autojunk=False).get_matching_blocks()
    # The blocks may be smaller than the multiset overlap, so count that too.
    overlap = max(sum(b.size for b in blocks), sum(min(predicted.count(w), gold.count(w)) for w in set(gold)))
    if not overlap:
        return 0.0
    precision, recall = overlap / len(predicted), overlap / len(gold)
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
def test_metrics_have_hand_computed_values(
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
def test_metrics_agree_with_a_second_implementation_on_real_answers(name: str) -> None:
    with gzip.open(shared(f"rollouts/{name}.jsonl.gz"), "rt") as stream:
        records = [json.loads(line) for line in stream]
    assert len(records) == 500
    for record in records:
        prediction, gold = record["pred_ans"], record["answer"]
        assert exact_match(prediction, [gold]) == float(words(prediction) == words(gold))
        assert token_f1(prediction, [gold]) == pytest.approx(reference_f1(prediction, gold), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "prediction", "gold", "em", "f1", "cem"),
    [
        ("rrl", "", "The The", 0, 0, 0),
        ("squad", "", "The The", 1, 0, 1),  # as in the script of SQuAD 1.1: equal strings, no shared words
        ("squad2", "", "The The", 1, 1, 1),
        ("squad", "yes it is", "yes", 0, 0.5, 1),
        ("hotpotqa", "yes it is", "yes", 0, 0, 1),
        ("hotpotqa", "no", "no way", 0, 0, 0),
        ("tiresrag-r1", "True", "yes", 1, 1, 1),
        ("hotpotqa", "True", "yes", 0, 0, 0),
        ("squad", "well-known", "well known", 0, 0, 0),
        ("tiresrag-r1", "well-known", "well known", 1, 1, 1),
        ("triviaqa", "rock ‘n’ roll", "rock n roll", 1, 1, 1),
        ("squad", "rock ‘n’ roll", "rock n roll", 0, 2 / 3, 0),
        ("rrl", "a party", "art", 0, 0, 0),
        ("search-r1", "a party", "art", 0, 0, 1),
        ("flashrag", "a party", "art", 0, 0, 1),
        # Every text contains a gold answer that normalises to nothing.
        ("flashrag", "a party", "The The", 0, 0, 1),
        ("search-r1", "a party", "!!!", 0, 0, 1),
        ("squad", "a party", "The The", 0, 0, 0),
        ("rrl", "England, in London", "London, England", 0, 4 / 5, 0),
        ("tiresrag-r1", "England, in London", "London, England", 0, 4 / 5, 1),
        ("r3-rag", "A-Team", "team", 0, 0, 0),
        ("r3-rag-released", "A-Team", "team", 1, 1, 1),
        ("r-search", "in 1931", "1931", 0, 2 / 3, 1),
        ("r-search-released", "in 1931", "1931", 0, 0.67, 1),
    ],
)
def test_published_rules_score_their_characteristic_cases(
    name: str, prediction: str, gold: str, em: float, f1: float, cem: float
) -> None:
    assert score_answer(prediction, [gold], RULES[name]) == pytest.approx((em, f1, cem))


@pytest.mark.parametrize("name", RULES)
def test_score_answer_equals_the_three_single_metrics(name: str) -> None:
    rule = RULES[name]
    texts = [
        "",
        "The",
        "yes",
        "no",
        "True",
        "Paris",
        "the Paris",
        "Paris, France",
        "a b c",
        "c b",
        "noanswer x",
    ]
    for prediction in texts:
        for answers in ([gold] for gold in texts):
            for more in (answers, [*answers, "Paris"]):
                single = [
                    metric(prediction, more, rule) for metric in (exact_match, token_f1, cover_exact_match)
                ]
                assert score_answer(prediction, more, rule) == tuple(single), (prediction, more)


def test_the_best_of_several_short_answers_counts() -> None:
    assert score_answer(["in 1931", "x"], ["1931"]) == (0, pytest.approx(2 / 3), 1)
    assert score_answer(["x", "1931"], ["1931"]) == (1, 1, 1)
    assert score_answer([], ["1931"]) == AnswerScores(0, 0, 0)
    with pytest.raises(UserError, match="answers"):
        score_answer("Paris", [])


@pytest.mark.parametrize("name", RULES)
def test_score_answers_equals_score_answer_of_each_prediction(name: str) -> None:
    rule = RULES[name]
    pairs = [
        ("the Paris", ["Paris"]),
        ("two\nlines", ["two lines", "x"]),
        (["True", "b"], ["yes"]),
        ("ΟΔΟΣ", ["οδος", "ΟΔΟΣ x"]),
        ("", ["the"]),
        ([], ["x"]),
    ]
    for some in (pairs, pairs[:1] + pairs[2:]):  # with and without a line break in a text
        many = score_answers([p for p, _ in some] * 2000, [a for _, a in some] * 2000, rule)
        assert many == [score_answer(p, a, rule) for p, a in some] * 2000
    with pytest.raises(UserError, match="answers"):
        score_answers(["x", "y"], [["x"], []], rule)
    with pytest.raises(ValueError):
        score_answers(["x", "y"], [["x"]], rule)
