"""Answer normalisation: what two strings must share to count as the same answer, in SQuAD's rules and the papers' variants."""

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rrl.errors import UserError, one_of
from rrl.text.characters import canonical_unicode

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_QUOTES = "_‘’´`"
"""What TriviaQA counts as punctuation beyond ASCII's (of which two are there already)."""
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_SPACE_QUOTES = str.maketrans(dict.fromkeys(string.punctuation + _QUOTES, " "))
_BOOLEANS = {"True": "yes", "False": "no"}

YES_NO = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole where a rule says so (HotpotQA's script)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How answers are compared. The default is SQuAD's normalisation, with gold answers that it leaves empty kept."""

    punctuation: Literal["drop", "space", "quotes"] = "drop"
    """ASCII punctuation is dropped ("U.S." is "us"), becomes a space ("u s"), or so do typographic quotes too (TriviaQA)."""
    articles_first: bool = False
    """Articles go before the punctuation: "A-team" is "team" and not "ateam" (R3-RAG as released)."""
    booleans: bool = False
    """An answer that is "True" or "False" reads yes or no (TIRESRAG-R1 as released)."""
    yes_no_whole: bool = False
    """F1 is 0 where one side is yes, no or noanswer and the other is not the same (HotpotQA, TIRESRAG-R1)."""
    cover: Literal["phrase", "substring", "words"] = "phrase"
    """What cover-EM asks of the prediction: the gold words in a row; its characters ("art" in "party" counts); or all of
    its words in any order."""
    empty: Literal["written", "equal", "zero"] = "written"
    """A gold answer that normalises to nothing ("The The", "A", "!!!"): compared as it is written, so that an empty prediction
    never scores; as SQuAD 2.0, where two empty sides are equal; or as SQuAD 1.1, where they are equal for EM and F1 is 0."""
    f1_decimals: int | None = None
    """F1 rounded to so many decimals (R-Search as released: 2)."""
    canonical_unicode: bool = False
    """Texts are compared in one Unicode form (NFKC), HTML character references such as `&amp;` resolved. No published rule does
    so."""

    def __post_init__(self) -> None:
        one_of(_TABLES, self, "punctuation")
        one_of(("phrase", "substring", "words"), self, "cover")
        one_of(("written", "equal", "zero"), self, "empty")

    def normalize(self, text: str) -> str:
        """Lower case, without punctuation and articles, single spaces."""
        text = self._stripped(self.canonicalize(_BOOLEANS.get(text, text) if self.booleans else text))
        return " ".join(text.split())

    def canonicalize(self, text: str) -> str:
        """The text as it is written, in one form where the rule asks for that."""
        return canonical_unicode(text) if self.canonical_unicode else text

    def _stripped(self, text: str) -> str:
        text, table = text.lower(), _TABLES[self.punctuation]
        if self.articles_first:
            return _ARTICLES.sub(" ", text).translate(table)
        return _ARTICLES.sub(" ", text.translate(table))

    def normalize_all(self, texts: Sequence[str]) -> list[str]:
        """`normalize` of each, several times as fast where there are many: they are worked on as one text."""
        if self.booleans:
            texts = [_BOOLEANS.get(text, text) for text in texts]
        lines = self.canonicalize("\n".join(texts))
        if lines.count("\n") != len(texts) - 1:
            return [self.normalize(text) for text in texts]
        # Nothing reaches across a line break: it is neither part of a word nor punctuation.
        lines = self._stripped(lines)
        return [" ".join(line.split()) for line in lines.split("\n")]


_TABLES: dict[str, dict[int, Any]] = {
    "drop": _DROP_PUNCTUATION,
    "space": _SPACE_PUNCTUATION,
    "quotes": _SPACE_QUOTES,
}

RRL = Rule(canonical_unicode=True)
"""What rewards and training metrics use."""

RULES: Mapping[str, Rule] = {
    "rrl": RRL,
    "squad": Rule(empty="zero"),
    "squad2": Rule(empty="equal"),
    "hotpotqa": Rule(yes_no_whole=True, empty="zero"),
    "triviaqa": Rule(punctuation="quotes", empty="zero"),
    "flashrag": Rule(yes_no_whole=True, cover="substring", empty="zero"),
    "search-r1": Rule(cover="substring", empty="zero"),
    "r-search": Rule(empty="zero"),
    "r-search-released": Rule(empty="zero", f1_decimals=2),
    "r3-rag": Rule(empty="zero"),
    "r3-rag-released": Rule(articles_first=True, empty="zero"),
    "tiresrag-r1": Rule(punctuation="quotes", booleans=True, yes_no_whole=True, cover="words", empty="zero"),
    "r2ag": Rule(empty="zero"),
}
"""By name: SQuAD 1.1 and 2.0 (the latter is MuSiQue's too), HotpotQA's script (2WikiMultiHopQA's too), TriviaQA's,
FlashRAG's, Search-R1's, and the four papers'. R3-RAG compares every short answer that was extracted, and takes the best:
give a list of predictions. R2AG and the paper of R-Search say SQuAD's."""


def rule_named(name: str) -> Rule:
    """The rule of `RULES`; UserError for another name."""
    if name not in RULES:
        raise UserError(f"normalization={name!r} is unknown; choose one of {', '.join(RULES)}")
    return RULES[name]


def normalize_answer(text: str, rule: Rule = RRL) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces (SQuAD, Rajpurkar et al. 2016), or another rule.

    Punctuation goes before the articles, as in the official script: "U.S.A." becomes "usa", "(The) End" "end".
    """
    return rule.normalize(text)


def answer_tokens(text: str, rule: Rule = RRL) -> list[str]:
    """The words of the normalised answer, in order; the unit of token F1."""
    return rule.normalize(text).split()


def title_key(title: str) -> str:
    """What titles are compared by: case, white space, the Unicode form and HTML character references do not count."""
    return " ".join(canonical_unicode(title).casefold().split())
