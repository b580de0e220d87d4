"""Tests of short answers in long ones: R3-RAG's sections and lists, letters of multiple choices."""

import pytest

from rrl.text.short_answers import choice_correct, chosen_letter, final_answer, listed_answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The problem analysis: so.\nThe final answer: Paris, in France.", "Paris, in France."),
        ("The final answer: Rome\nStep 2:\nThe final answer:\n Lyon \n\nBecause", "Lyon"),
        ("The final answer: Rome\nThe problem analysis: no", "Rome"),
        (" just this ", "just this"),
        ("The final answer:", ""),
    ],
)
def test_the_final_answer_is_the_last_section_of_that_name(text: str, expected: str) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('Sure: ["July 4, 1776", "4 July 1776"] and more [x]', ["July 4, 1776", "4 July 1776"]),
        ("['a', 7, ' b ', '']", ["a", "7", "b"]),
        ("[]", []),
        ("none", None),
        ("[a, b]", None),
        ('["a", ["b"]]', None),
        ('Short answers [all equal]: ["x", "y"]', ["x", "y"]),
        ('["Apollo [13]", "13"]', ["Apollo [13]", "13"]),
        ("[" * 300 + "]", None),
    ],
)
def test_lists_of_short_answers_are_read_or_refused(reply: str, expected: list[str] | None) -> None:
    assert listed_answers(reply) == expected


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("The correct answer is B", "B"),
        ("**Answer: C**", "C"),
        ("Answer: **C**", "C"),
        ("B", "B"),
        ("(C) because", "C"),
        ("b. Foo", ""),
        ("B. Foo", "B"),
        ("A is wrong. The answer is D.", "D"),
        ("A) no\nB) yes", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("The answer is (B).\nA) is wrong", "B"),
        ("The correct answer is: B", "B"),
        ("The correct answer is: (B)", "B"),
        ("**Answer:** B", "B"),
        ("\\boxed{B}", "B"),
        ("The answer is $\\boxed{C}$", "C"),
        ("The correct answer is (B). Option A ignores the text, and choice C is not supported.", "B"),
        ("Option A is wrong, so option C", "C"),
        ("A dog", ""),
        ("the answer is a cat", ""),
        ("the answer is E", ""),
        ("", ""),
    ],
)
def test_chosen_letter_is_the_letter_that_a_reply_settles_on(text: str, letter: str) -> None:
    assert chosen_letter(text, 4) == letter


def test_gold_answers_of_choices_are_letters_or_texts() -> None:
    choices = ["red", "green", "blue"]
    assert choice_correct("The answer is (B)", ["B"], choices) == 1
    assert choice_correct("The answer is (B)", ["green"], choices) == 1
    assert choice_correct("The answer is (B)", ["blue"], choices) == 0
    assert choice_correct("green", ["green"], choices) == 0
    assert choice_correct("", ["purple"], choices) == 0
