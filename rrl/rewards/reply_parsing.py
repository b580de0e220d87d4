"""Parse the scores and verdicts in the replies of judges. Read `parse_tenths` and `parse_verdict` first."""

import re

from rrl.text.chat import after_thought

_SCALE_END = r"(?:0(?:\.0+)?|1(?:\.0+)?)"
"""Matches an end of the scale, 0 or 1."""
_SCALE = re.compile(
    rf"(?:\bout of\s*|/\s*)1(?:\.0+)?(?![\w.]*\d)|(?<![\w.,]){_SCALE_END}\s*(?:to|and|-|–)\s*{_SCALE_END}(?![\w.,]*\d)"
    rf"|(?<![\w.,]){_SCALE_END}\s*(?:=|means\b|meaning\b)"
)
"""Matches descriptions of the scale, such as "out of 1", "from 0 to 1" and "0 = irrelevant"."""
_UNIT_NUMBER = r"(?<![\w.,/-])(0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?![\w%/]|[.,]\d)"
"""A number in 0..1, such as "0.7", ".7" and "1"."""
_LABELLED_SCORE = re.compile(rf"score\W*[:=]\W*?{_UNIT_NUMBER}", re.IGNORECASE)
"""Matches a number after the word "score", such as "Score: 0.7"."""
_LEADING_SCORE = re.compile(rf"\A[\s*\"'(]*(?!1\.\s){_UNIT_NUMBER}(?=[\s*\"')]*(?:$|[,;:(\n–-]|\.(?!\d)))")
"""Matches a number at the start, but not a count ("1 of the documents ...") or a list item ("1.")."""
_FINAL_SCORE = re.compile(rf"(?:^|[:=]|\bis\b)[\s*\"'(]*{_UNIT_NUMBER}[\s*\"').]*\Z", re.MULTILINE)
"""Matches a number at the end, after a colon, an equals sign or "is", or alone on its line."""

_JUDGE_VERB = (
    "(?:assist|help|answer|comply|determine|judge|evaluate|verify|assess|decide|say|tell|rate|score|give)"
)
_UNABLE = r"(?:(?:['’]m| am) (?:not able|unable) to| can(?:not|['’]t| not)| won['’]t| will not)"
_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? )?(?:(?:i['’]m|i am) (?:very |so )?sorry\b|sorry,? (?:but )?i\b|(?:i|we) apologi[sz]e\b"
    r"|(?:my )?apologies\b|as an? (?:\w+ )?(?:ai|language model)\b"
    r"|i (?:must |have to |will )?(?:respectfully )?(?:decline|refuse)\b"
    r"|(?:i['’]m|i am) not comfortable\b|i (?:do not|don['’]t) (?:feel comfortable|have (?:enough|sufficient) \w+ to)\b"
    rf"|i{_UNABLE} (?:\w+ly |in good conscience )?{_JUDGE_VERB}\b"
    # Without "whether" or "if" the sentence may be about the judged documents ("it is impossible to determine the year").
    rf"|(?:we can(?:not|['’]t| not)|it(?: is|['’]s) (?:not possible|impossible) to) {_JUDGE_VERB} (?:whether|if)\b)",
    re.IGNORECASE,
)
"""Matches the start of a reply that refuses to judge. Numbers and verdicts after it are not a score."""

_NO = r"no\b(?=\W*$|\s*[^\w\s]|\s+(?:it|the|this|that|they|there|he|she|because|since|as)\b)"
"""Matches a "no" that is a verdict, unlike that in "no doubt"."""
_LEADING_VERDICT = re.compile(rf"\W*(?!(?:true|yes|false|no)\s+or\b)(true\b|yes\b|false\b|{_NO})")
"""Matches a verdict at the start, but not a choice ("True or False")."""
_VERDICT = re.compile(r"(\bnot\s+(?:\w+ly\s+)?|n['’]t\s+(?:\w+ly\s+)?)?\b(true|false)\b")
"""Matches true or false with the negation before it."""


def parse_tenths(text: str) -> float | None:
    """Return the score in 0..1 of a reply, rounded to tenths; None if the reply refuses or has no such score.

    "7", "70%", "7/10" and "high" are not such scores.

    The first of these rules that applies gives the score:
    1. the last number after the word "score";
    2. the number that the reply starts with;
    3. the last number with a decimal point;
    4. a whole number at the end, after a colon, an equals sign, "is", or alone on its line. Other whole numbers are not
       scores; they may number documents ("document 1 is irrelevant").
    Descriptions of the scale ("out of 1", "from 0 to 1", "0 = irrelevant") are ignored.
    """
    reply = after_thought(text)
    if _REFUSAL.match(reply):
        return None
    reply = _SCALE.sub(" ", reply)
    decimals = [number for number in re.findall(_UNIT_NUMBER, reply) if "." in number]
    # `_LEADING_SCORE` and `_FINAL_SCORE` are anchored, so each matches at most once.
    candidates = (
        _LABELLED_SCORE.findall(reply)
        or _LEADING_SCORE.findall(reply)
        or decimals
        or _FINAL_SCORE.findall(reply)
    )
    return round(float(candidates[-1]), 1) if candidates else None


def parse_verdict(text: str) -> float | None:
    """Return 1 for true or yes, 0 for false or no; None if the reply contains neither or refuses.

    The first of these rules that applies gives the verdict:
    1. the true, yes, false or no that the reply starts with, but not a choice ("True or False") or the no of "no doubt";
    2. the last true or false, negated by a "not" before it;
    3. the last yes or no.
    """
    reply = after_thought(text).lower()
    if _REFUSAL.match(reply):
        return None
    if opening := _LEADING_VERDICT.match(reply):
        return float(opening[1] in ("true", "yes"))
    if verdicts := _VERDICT.findall(reply):
        negation, word = verdicts[-1]
        return float((word == "true") != bool(negation))
    plain = re.findall(r"\b(yes|no)\b", reply)
    return float(plain[-1] == "yes") if plain else None
