"""Answer normalisation of SQuAD: what two strings must share to count as the same answer."""

import re
import string

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces (SQuAD, Rajpurkar et al. 2016).

    Punctuation goes before the articles, as in the official script: "U.S.A." becomes "usa", "(The) End" "end".
    """
    text = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def answer_tokens(text: str) -> list[str]:
    """The words of the normalised answer, in order; the unit of token F1."""
    return normalize_answer(text).split()
