"""Tests of answer normalisation."""

import re
import string
import unicodedata

import pytest

from rrl.errors import UserError
from rrl.text.metrics import score_answer
from rrl.text.normalize import RULES, AnswerRule, answer_words, normalize_answer, rule_named, title_key


def reference(text: str) -> str:
    """An independent implementation of the description in the SQuAD paper (section 6.1)."""
    plain = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


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
def test_known_answers_are_normalised(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize("text", ["The cat, the hat.", "A.B. C", " x\n\ny ", "don't an", "3,000 (three)"])
def test_normalisation_agrees_with_a_second_implementation_and_is_idempotent(text: str) -> None:
    assert normalize_answer(text) == reference(text)
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


def test_answer_words_are_the_words() -> None:
    assert answer_words("The red, red rose") == ["red", "red", "rose"]
    assert not re.search(r"\s", "".join(answer_words("a \u00a0 b")))


def test_rules_are_found_by_name_and_their_fields_checked() -> None:
    assert normalize_answer("U.S.", rule_named("triviaqa")) == "u s"
    with pytest.raises(UserError, match=r"normalization='squat' is unknown; choose one of rrl, squad"):
        rule_named("squat")
    for field in ("punctuation", "cover", "empty_gold"):
        with pytest.raises(UserError, match=f"{field}='x' is unknown"):
            AnswerRule(**{field: "x"})


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("text", ["Zoé Lévêque", "Ｒ＆Ｄ １９１３", "Procter &amp; Gamble&#39;s", "ﬁlm"])
def test_unicode_forms_of_a_text_are_the_same_answer_and_title(text: str, form: str) -> None:
    plain = {
        "Ｒ＆Ｄ １９１３": "R&D 1913",
        "Procter &amp; Gamble&#39;s": "Procter & Gamble's",
        "ﬁlm": "film",
    }.get(text, text)
    other = unicodedata.normalize(form, text)
    assert score_answer(other, [plain]) == score_answer([other], [plain, "x"]) == (1, 1, 1)
    assert normalize_answer(other) == normalize_answer(plain)
    assert title_key(other) == title_key(plain)


def test_published_rules_do_not_change_the_unicode_form() -> None:
    composed, decomposed = (unicodedata.normalize(form, "Zoé") for form in ("NFC", "NFD"))
    for name in RULES.keys() - {"rrl"}:
        assert score_answer(decomposed, [composed], rule_named(name)).em == 0
        assert rule_named(name).normalize("P&amp;G").replace(" ", "") == "pampg"


def test_only_complete_references_are_resolved_and_their_line_breaks_do_not_split_texts() -> None:
    rule = rule_named("rrl")
    assert rule.normalize("AT&T rock&amplify &nosuch;") == "att rockamplify nosuch"
    assert rule.normalize_all(["x&#10;y", "z"]) == ["x y", "z"]


def test_an_answer_of_only_an_article_is_compared_as_written_in_canonical_unicode() -> None:
    assert score_answer("Ａ", ["A"]).em == 1
    assert score_answer("The", ["A"]).em == 0
