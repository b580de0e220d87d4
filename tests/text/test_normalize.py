"""SQuAD normalisation."""

import re
import string

import pytest

from rrl.errors import UserError
from rrl.text.normalize import Rule, answer_tokens, normalize_answer, rule_named


def reference(text: str) -> str:
    """Written from the description in the SQuAD paper (section 6.1), character by character."""
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("U.S.A.", "usa"),
        ("an apple, a pear and the rest", "apple pear and rest"),
        ("theatre anna a-team", "theatre anna ateam"),
        ("", ""),
        ("The A An", ""),
        ("Ærø’s Æ", "ærø’s æ"),
    ],
)
def test_known_values(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize("text", ["The cat, the hat.", "A.B. C", " x\n\ny ", "don't an", "3,000 (three)"])
def test_agrees_with_a_second_implementation_and_is_idempotent(text: str) -> None:
    assert normalize_answer(text) == reference(text)
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


def test_tokens_are_the_words() -> None:
    assert answer_tokens("The red, red rose") == ["red", "red", "rose"]
    assert not re.search(r"\s", "".join(answer_tokens("a \u00a0 b")))


def test_rules_are_found_by_name_and_their_fields_checked() -> None:
    assert normalize_answer("U.S.", rule_named("triviaqa")) == "u s"
    with pytest.raises(UserError, match=r"normalization='squat' is unknown; choose one of rrl, squad"):
        rule_named("squat")
    for field in ("punctuation", "cover", "empty"):
        with pytest.raises(UserError, match=f"{field}='x' is unknown"):
            Rule(**{field: "x"})
