"""Wordings of questions that compare two entities, and the conclusions that answer them."""

import dataclasses

from rrl.miniwiki.plans import Hop


@dataclasses.dataclass(frozen=True, slots=True)
class YearComparison:
    """Questions that compare two entities of a type by a year."""

    entity_type: str
    relation: str
    """Relation whose values are the years."""
    questions: tuple[tuple[str, str], ...]
    """(question, "earlier" or "later"): the wording, and which of the two years it asks for."""
    verb: str
    """Participle in the conclusion, such as "born" in "A was born in 1900 and B in 1910"."""


def _year_questions(noun: str, verb: str, ask_older: bool = True) -> tuple[tuple[str, str], ...]:
    """Return wordings of a comparison of years; a quarter or a third of them ask for the later year."""
    older = ((f"Which {noun} is older, {{0}} or {{1}}?", "earlier"),) if ask_older else ()
    return (
        (f"Which {noun} was {verb} first, {{0}} or {{1}}?", "earlier"),
        (f"Which {noun} was {verb} earlier, {{0}} or {{1}}?", "earlier"),
        (f"Which {noun} was {verb} later, {{0}} or {{1}}?", "later"),
        *older,
    )


BIRTH_QUESTIONS = (
    ("Who was born first, {0} or {1}?", "earlier"),
    ("Who was born earlier, {0} or {1}?", "earlier"),
    ("Who was born later, {0} or {1}?", "later"),
    ("Who is older, {0} or {1}?", "earlier"),
)

YEAR_COMPARISONS = (
    YearComparison("person", "birth year", BIRTH_QUESTIONS, "born"),
    YearComparison("film", "release year", _year_questions("film", "released", ask_older=False), "released"),
    YearComparison(
        "book", "publication year", _year_questions("book", "published", ask_older=False), "published"
    ),
    YearComparison("company", "founding year", _year_questions("company", "founded"), "founded"),
    YearComparison("city", "founding year", _year_questions("city", "founded"), "founded"),
)

EQUALITY_COMPARISONS = {
    ("person", "birthplace"): (
        "born in",
        "Were {} born in the same city?",
        "Do {} have the same birthplace?",
    ),
    ("person", "employer"): (
        "employed by",
        "Do {} work for the same company?",
        "Do {} have the same employer?",
    ),
    ("company", "headquarters"): (
        "based in",
        "Are {} based in the same city?",
        "Do {} share one headquarters city?",
    ),
    ("city", "country"): ("located in", "Are {} in the same country?", "Do {} lie in the same country?"),
}
"""By (type, relation): the words between "is" and the value in the conclusion, then the wordings of the yes/no question
whether two entities have the same value."""

BRIDGES = (("film", "director"), ("book", "author"), ("company", "founder"))
"""First relations of bridge comparisons. The value is a person, and a fact of that person is compared."""
BRIDGE_QUESTIONS = (
    ("Which {kind} has the {role} who was born earlier, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} born first, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} who was born later, {0} or {1}?", "later"),
)
"""Wordings of bridge comparisons, as `YearComparison.questions`."""


def conclude_equality(branches: tuple[tuple[Hop, ...], ...], verb: str) -> tuple[str, str]:
    """Return answer and conclusion for two branches whose last values may be the same."""
    a, b = (branch[-1] for branch in branches)
    answer = "yes" if a.value == b.value else "no"
    word = "the same" if answer == "yes" else "not the same"
    return answer, f"{a.subject} is {verb} {a.value} and {b.subject} is {verb} {b.value}, {word}."


def conclude_years(
    branches: tuple[tuple[Hop, ...], ...], word: str, verb: str, bridge: str
) -> tuple[str, str]:
    """Return answer and conclusion for two branches that end in different years.

    `word` is "earlier" or "later". `bridge` names the first relation of a bridge comparison, such as "the director of"; otherwise
    it is "".
    """
    a, b = (branch[-1] for branch in branches)
    first_wins = (int(a.value) < int(b.value)) == (word == "earlier")
    winner = branches[0] if first_wins else branches[1]
    answer = winner[0].subject
    end = f", {bridge} {answer}" if bridge else ""
    return answer, (
        f"{a.subject} was {verb} in {a.value} and {b.subject} in {b.value}, "
        f"so {winner[-1].subject} was {verb} {word}{end}."
    )
