"""Answer normalisation: when two strings count as the same answer, by SQuAD's rule and the variants of the papers.

Read `AnswerRule` and `RULES` first.
"""

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rrl.errors import UserError, one_of
from rrl.text.characters import canonical_unicode

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_QUOTES = "_‘’´`"
"""Characters that TriviaQA's script adds to ASCII punctuation (two of them are ASCII)."""
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_SPACE_QUOTES = str.maketrans(dict.fromkeys(string.punctuation + _QUOTES, " "))
_BOOLEANS = {"True": "yes", "False": "no"}

YES_NO = ("yes", "no", "noanswer")
"""Answers for which a rule with `yes_no_exact` gives F1 only if both sides are equal (HotpotQA's script)."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerRule:
    """How answers are compared. The default is SQuAD's, except for gold answers that normalise to nothing (`empty_gold`)."""

    punctuation: Literal["drop", "space", "quotes"] = "drop"
    """How to treat ASCII punctuation: "drop" removes it ("U.S." is "us"); "space" replaces it by spaces ("u s"); "quotes"
    replaces typographic quotes too (TriviaQA)."""
    articles_first: bool = False
    """Remove articles before punctuation: "A-team" is "team", not "ateam" (R3-RAG's released code)."""
    booleans: bool = False
    """Read the answers "True" and "False" as yes and no (TIRESRAG-R1's released code)."""
    yes_no_exact: bool = False
    """F1 is 0 if the prediction or the gold answer is yes, no or noanswer and the other differs (HotpotQA, TIRESRAG-R1)."""
    cover: Literal["phrase", "substring", "words"] = "phrase"
    """What cover-EM requires of the prediction: "phrase": the gold words, consecutive and in order; "substring": the gold
    characters ("art" in "party" counts); "words": all gold words in any order."""
    empty_gold: Literal["unnormalized", "equal", "zero"] = "unnormalized"
    """How to score a gold answer that normalises to nothing ("The The", "A", "!!!"). "unnormalized": compare the texts before
    normalisation, in lower case, so that an empty prediction never scores. "equal": a prediction that also normalises to nothing
    is equal to it (SQuAD 2.0). "zero": as "equal", but F1 is 0 (SQuAD 1.1)."""
    f1_decimals: int | None = None
    """Decimals to which F1 is rounded (R-Search's released code: 2); None: not rounded."""
    canonical_unicode: bool = False
    """Compare texts in NFKC with HTML character references such as `&amp;` resolved. No published rule does this."""

    def __post_init__(self) -> None:
        one_of(_PUNCTUATION_TABLES, self, "punctuation")
        one_of(("phrase", "substring", "words"), self, "cover")
        one_of(("unnormalized", "equal", "zero"), self, "empty_gold")

    def normalize(self, text: str) -> str:
        """Return the text in lower case, without punctuation and articles, with single spaces."""
        text = self._lower_and_strip(self.canonicalize(_BOOLEANS.get(text, text) if self.booleans else text))
        return " ".join(text.split())

    def canonicalize(self, text: str) -> str:
        """Return the text in canonical Unicode if the rule requires it, otherwise unchanged."""
        return canonical_unicode(text) if self.canonical_unicode else text

    def _lower_and_strip(self, text: str) -> str:
        """Return the text in lower case, without punctuation and articles."""
        text, table = text.lower(), _PUNCTUATION_TABLES[self.punctuation]
        if self.articles_first:
            return _ARTICLES.sub(" ", text).translate(table)
        return _ARTICLES.sub(" ", text.translate(table))

    def normalize_all(self, texts: Sequence[str]) -> list[str]:
        """Return `normalize` of each text. Many texts are processed as one, which is several times faster."""
        if self.booleans:
            texts = [_BOOLEANS.get(text, text) for text in texts]
        lines = self.canonicalize("\n".join(texts))
        if lines.count("\n") != len(texts) - 1:
            return [self.normalize(text) for text in texts]
        # Normalising the joined lines equals normalising each: a line break is neither part of a word nor punctuation.
        lines = self._lower_and_strip(lines)
        return [" ".join(line.split()) for line in lines.split("\n")]


_PUNCTUATION_TABLES: dict[str, dict[int, Any]] = {
    "drop": _DROP_PUNCTUATION,
    "space": _SPACE_PUNCTUATION,
    "quotes": _SPACE_QUOTES,
}

RRL_RULE = AnswerRule(canonical_unicode=True)
"""The rule that rrl uses for rewards and training metrics: SQuAD's, with canonical Unicode and `empty_gold` as "unnormalized"."""

RULES: Mapping[str, AnswerRule] = {
    "rrl": RRL_RULE,
    # The scripts of the data sets.
    "squad": AnswerRule(empty_gold="zero"),  # SQuAD 1.1
    "squad2": AnswerRule(empty_gold="equal"),  # SQuAD 2.0, also MuSiQue
    "hotpotqa": AnswerRule(yes_no_exact=True, empty_gold="zero"),  # also 2WikiMultiHopQA
    "triviaqa": AnswerRule(punctuation="quotes", empty_gold="zero"),
    # Other projects.
    "flashrag": AnswerRule(yes_no_exact=True, cover="substring", empty_gold="zero"),
    "search-r1": AnswerRule(cover="substring", empty_gold="zero"),
    # The four papers, and their released code where it differs. R2AG and R-Search's paper state SQuAD's rule. R3-RAG takes the
    # best of all extracted short answers: give `score_answer` a list of predictions.
    "r-search": AnswerRule(empty_gold="zero"),
    "r-search-released": AnswerRule(empty_gold="zero", f1_decimals=2),
    "r3-rag": AnswerRule(empty_gold="zero"),
    "r3-rag-released": AnswerRule(articles_first=True, empty_gold="zero"),
    "tiresrag-r1": AnswerRule(
        punctuation="quotes", booleans=True, yes_no_exact=True, cover="words", empty_gold="zero"
    ),
    "r2ag": AnswerRule(empty_gold="zero"),
}
"""Rules by the name that a config gives."""


def rule_named(name: str) -> AnswerRule:
    """Return a rule of `RULES`. Raises UserError for an unknown name."""
    if name not in RULES:
        raise UserError(f"normalization={name!r} is unknown; choose one of {', '.join(RULES)}")
    return RULES[name]


def normalize_answer(text: str, rule: AnswerRule = RRL_RULE) -> str:
    """Return the answer normalised by `rule`.

    The default gives canonical Unicode, lower case, no ASCII punctuation, no articles and single spaces. Like SQuAD's script
    (Rajpurkar et al. 2016), it removes punctuation before articles: "U.S.A." becomes "usa", "(The) End" becomes "end".
    """
    return rule.normalize(text)


def answer_words(text: str, rule: AnswerRule = RRL_RULE) -> list[str]:
    """Return the words of the normalised answer in order; they are the tokens of token F1."""
    return rule.normalize(text).split()


def title_key(title: str) -> str:
    """Return a key by which titles are compared; it ignores case, white space, Unicode form and HTML references."""
    return " ".join(canonical_unicode(title).casefold().split())
