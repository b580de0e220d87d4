"""A judge that scores by gold passages, for data that names them, such as the built-in world and 2WikiMultihopQA."""

import re
from collections.abc import Iterable, Sequence

from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import ENVIRONMENT
from rrl.errors import UserError
from rrl.rewards.judge_prompts import (
    Correctness,
    ErrorAnalysis,
    JudgePrompt,
    Relevance,
    ShortAnswer,
    Sufficiency,
    Thinking,
    Validation,
)
from rrl.rewards.transcript import Transcript
from rrl.text.metrics import cover_exact_match
from rrl.text.normalize import normalize_answer, title_key

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_BOUNDARY = re.compile(r"<[^<>]*>|[.!?:\n]+")


class Oracle:
    """Scores by the gold passages and the gold answers of each question.

    - `Sufficiency`: 1 if all gold passages were found.
    - `Thinking`: `chain_coverage`, the fraction of gold passages that the reasoning names, times `groundedness`, the fraction of
      the names and numbers in the reasoning that appeared before in the question or a document; rounded to tenths.
    - `Relevance`: the fraction of the question's gold passages among the documents, rounded to tenths as in the papers'
      judges (one of four passages gives 0.2, as Python rounds 0.25 to 0.2).
    - `Correctness`, `Validation`: cover exact match.
    - `ShortAnswer`: the metric of the whole answer, without extraction.
    - `ErrorAnalysis`: "mistaken" is 1 if the last search found passages and none of them is gold; "faithful" is 1 if the
      reasoning is fully grounded; "reached" is 1 if the reasoning after the last search contains the gold answer.
    """

    def grade(self, prompts: Sequence[JudgePrompt]) -> list[float | None]:
        """See `rrl.rewards.judge.Judge`. Raises UserError if a score needs gold passages and the question names none."""
        return [self._grade(prompt) for prompt in prompts]

    def _grade(self, prompt: JudgePrompt) -> float:
        match prompt:
            case Sufficiency(question, transcript):
                return float(_title_keys(gold_titles(question)) <= _title_keys(transcript.titles))
            case Thinking(question, transcript):
                return round(chain_coverage(question, transcript) * groundedness(question, transcript), 1)
            case Relevance(question, passages):
                gold = _title_keys(gold_titles(question))
                return round(len(_title_keys(passage.title for passage in passages) & gold) / len(gold), 1)
            case Correctness(question, predicted) | Validation(question, predicted):
                return cover_exact_match(predicted, question.answers)
            case ShortAnswer():
                return prompt.score([prompt.predicted])
            case ErrorAnalysis(question, _, _, "mistaken", last_titles):
                return float(
                    bool(last_titles) and not _title_keys(last_titles) & _title_keys(gold_titles(question))
                )
            case ErrorAnalysis(question, transcript, _, "faithful"):
                return float(groundedness(question, transcript) == 1.0)
            case ErrorAnalysis(question, transcript, _, "reached"):
                return cover_exact_match(final_thought(transcript), question.answers)
        raise TypeError(f"the oracle has no rule for {type(prompt).__name__}")


def _title_keys(titles: Iterable[str]) -> set[str]:
    return {title_key(title) for title in titles}


def gold_titles(question: Question) -> tuple[str, ...]:
    """Return the titles of the gold passages. Raises UserError if the question names none."""
    if not question.gold:
        raise UserError(
            f"question {question.id!r} names no gold passages, so an oracle cannot judge it: give judge=FOLDER of a model, or "
            "judge=http://… of a service and its judge_model (or the flags --judge and --judge_model)"
        )
    return question.gold


def require_gold(questions: Iterable[Question]) -> None:
    """Raise UserError for the first question that names no gold passages."""
    for question in questions:
        gold_titles(question)


def chain_coverage(question: Question, transcript: Transcript) -> float:
    """Return the fraction of gold passages whose titles the reasoning names."""
    reasoning = " ".join(text for role, text in transcript.segments if role != ENVIRONMENT)
    reasoning = f" {normalize_answer(reasoning)} "
    named = [f" {normalize_answer(title)} " in reasoning for title in gold_titles(question)]
    return sum(named) / len(named)


def groundedness(question: Question, transcript: Transcript) -> float:
    """Return the fraction of the names and numbers in the reasoning that are grounded; 1 if it has none."""
    grounded = [grounded for _, grounded in word_grounding(question, transcript)]
    return sum(grounded) / len(grounded) if grounded else 1.0


def word_grounding(question: Question, transcript: Transcript) -> list[tuple[str, bool]]:
    """Return each name and number in the reasoning, and whether it is grounded.

    A number is a word that contains a digit. A name is a word of at least two characters that begins with a capital letter and
    does not start a sentence. Either is grounded if it appeared in the question or in an earlier document.
    """
    seen = _words(with_choices(question, instruct=False))
    result = []
    for role, text in transcript.segments:
        if role == ENVIRONMENT:
            seen |= _words(text)
            continue
        result += [(word, word.lower() in seen) for word in _names_and_numbers(text)]
    return result


def final_thought(transcript: Transcript) -> str:
    """Return the reasoning after the last search."""
    texts: list[str] = []
    for role, text in transcript.segments:
        texts = [] if role == ENVIRONMENT else [*texts, text]
    return " ".join(texts)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _names_and_numbers(text: str) -> Iterable[str]:
    """Yield the numbers and names of a text, as `word_grounding` defines them."""
    for sentence in _SENTENCE_BOUNDARY.split(text):
        for index, word in enumerate(_WORD.findall(sentence)):
            if any(c.isdigit() for c in word) or (index and len(word) > 1 and word[0].isupper()):
                yield word
