"""The judge prompts of the papers: each class has the prompt for one judgement, and parses the judge's reply to it.

`parse` returns a score in 0..1, or None if the reply contains no score. Callers count None as 0 and report how often it occurs.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Protocol

from rrl.data.passages import Passage, render
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.text.chat import Prompt, after_thought, trailing_think_tag
from rrl.text.metrics import AnswerScores, score_answer
from rrl.text.normalize import RRL, Rule
from rrl.text.short_answers import EXTRACT_TEMPLATE, listed_answers
from rrl.text.spans import Tag, enclosed_content, without_tags

_CRITERION = (
    "IF the CONTEXT is sufficient to infer the ANSWER to the question and 0 IF the CONTEXT cannot be used to infer the "
    "ANSWER to the question. Make the sufficiency judgment based solely on the context, without relying on your memory to "
    "determine whether the question can be answered from the context."
)
_PROCEDURE = (
    "First, output a list of step-by-step questions that would be used to arrive at a label for the criteria. Make sure to "
    "include questions about assumptions implicit in the QUESTION. Include questions about any mathematical calculations or "
    "arithmetic that would be required.\n\n"
    "Next, answer each of the questions. Please note that you may answer these questions only on the basis of the given "
    "context; do not use your own outside knowledge. Make sure to work step by step through any required mathematical "
    "calculations or arithmetic."
)
_EXPERT = "You are an expert LLM evaluator that excels at evaluating a QUESTION, ANSWER and REFERENCES."

SUFFICIENCY_SYSTEM = (
    f"{_EXPERT} Consider the following criteria:\n\n"
    f"Sufficient Context To The Given Answer: 1 {_CRITERION}\n\n"
    f"{_PROCEDURE} Finally, use these answers to evaluate the criteria.\n\n"
    "EVALUATION (JSON)\n\n"
    "EXAMPLE:\n\n"
    "### QUESTION\n"
    "In which year did the publisher of Roald Dahl's Guide to Railway Safety cease to exist?\n\n"
    "### ANSWER\n"
    "2001\n\n"
    "### References\n"
    "Roald Dahl's Guide to Railway Safety was published in 1991 by the British Railways Board. The British Railways Board "
    "had asked Roald Dahl to write the text of the booklet, and Quentin Blake to illustrate it, to help young people enjoy "
    "using the railways safely. The British Railways Board (BRB) was a nationalised industry in the United Kingdom that "
    "operated from 1963 to 2001. Until 1997 it was responsible for most railway services in Great Britain, trading under "
    "the brand name British Railways and, from 1965, British Rail. It did not operate railways in Northern Ireland, where "
    "railways were the responsibility of the Government of Northern Ireland.\n\n"
    "### EXPLANATION\n"
    "The context mentions that Roald Dahl's Guide to Railway Safety was published by the British Railways Board. It also "
    "states that the British Railways Board operated from 1963 to 2001, meaning the year it ceased to exist was 2001. "
    "Therefore, the context does provide a precise answer to the question.\n\n"
    "### JSON\n"
    '{ "Sufficient Context To The Given Answer": 1 }\n\n'
    f"Remember the instructions: {_EXPERT} Consider the following criteria: Sufficient Context: 1 {_CRITERION}\n\n"
    f"{_PROCEDURE}\n\n"
    "Finally, use these answers to evaluate the criteria. Output the ### EXPLANATION (Text). Then, use the EXPLANATION to "
    "output the ### EVALUATION (JSON)"
)
"""TIRESRAG-R1, Figure 11; criteria and steps appear twice, as in the figure."""

THINKING_SYSTEM = (
    "You are an expert reasoning evaluator for Retrieval-Augmented Generation (RAG) tasks. Your goal is to judge the "
    "reasoning quality of the model's thinking process based on the retrieved context and question. You will assign a reward "
    "score between 0 and 1. This score reflects only the quality of the reasoning process, not whether the final answer is "
    "correct.\n\n"
    "Evaluation Criteria:\n\n"
    "1. Logical Soundness - Is the reasoning coherent and structured?\n"
    "2. Contextual Alignment - Does it use retrieved evidence correctly?\n"
    "3. Error Awareness - Does it avoid unsupported assumptions?\n"
    "4. Clarity and Precision - Is it concise, relevant, and non-redundant?\n\n"
    "Scoring:\n\n"
    "0.0: Completely flawed reasoning\n"
    "1.0: Perfect reasoning\n"
    "Intermediate (e.g., 0.3, 0.7) are allowed.\n\n"
    "Important:\n\n"
    "- Judge only the thinking process, not the answer.\n"
    "- Reward accurate, grounded, and structured reasoning.\n\n"
    "Your Output:\n\n"
    "A single float-type score from {0.0, 0.1, 0.2, ..., 1.0}.\n"
    "No explanation. Only the score."
)
"""TIRESRAG-R1, Figure 12."""

CORRECTNESS_TEMPLATE = (
    "Given a Question and its Golden Answer, verify whether the Predicted Answer is correct. The prediction is correct if it "
    "fully aligns with the meaning and key information of the Golden Answer. Respond with True if the prediction is correct "
    "and False otherwise.\n\n"
    "Question: {question}\n"
    "Golden Answer: {reference}\n"
    "Predicted Answer: {prediction}"
)
"""TIRESRAG-R1, Figure 13."""

VALIDATION_SYSTEM = (
    "You are an excellent teacher. You will be given a query and its corresponding label, along with a student's answer to "
    "validate. Your task is to determine if the answer correctly answers the query based on the label.\n"
    'Provide your validation in the form: Validation: ["Correct"] or Validation: ["Wrong"]. Learn from the instances below:\n'
    "### Instance 1\n"
    "#### User's input:\n"
    'Query: "What is the majority party in the country where Canberra is located in 2024?"\n'
    'Label: "The Labor Party."\n'
    'Student\'s Answer: "The Labor Party is the majority party in the country where Canberra is located in 2024."\n'
    "#### Expected response:\n"
    "Analysis:\n"
    "The student's answer correctly matches the label, as it accurately restates that the Labor Party is the majority party "
    "in the country where Canberra is located in 2024.\n"
    'Validation: ["Correct"]\n'
    "### Instance 2\n"
    "#### User's input:\n"
    'Query: "Are either Baz Warne or Marty Balin actors?"\n'
    'Label: "no"\n'
    'Student\'s Answer: "Baz Warne is an actor while Marty Balin is not."\n'
    "#### Expected response:\n"
    "Analysis:\n"
    "The label indicates that neither Baz Warne nor Marty Balin are actors. However, the student's answer incorrectly states "
    "that Baz Warne is an actor. This contradicts the label. Therefore, the student's answer does not match the correct "
    "information provided by the label.\n"
    'Validation: ["Wrong"]\n\n'
    "Now process the user query."
)
"""R2AG, Figure A.4."""

RELEVANCE_SYSTEM = (
    "You judge how relevant retrieved documents are to a question. A document is relevant if it states a fact that is needed "
    "on the way to the answer, even where it does not state the answer itself; one that only shares names or topic with the "
    "question is not.\n\n"
    "Give one score for the documents together, one of 0, 0.1, 0.2, ..., 1: 0 means that nothing in them helps, 1 that they "
    "state what is needed. Write the score alone."
)
"""In our own words: R3-RAG describes this instruction and its scores (Eq. 3, section 3.2.2), but does not print it."""

ERROR_ANALYSIS_TEMPLATE = (
    "A search agent was asked a question and answered it wrongly. You see what it thought and found.\n\n"
    "Question: {question}\nRight answer: {gold}\nIts answer: {predicted}\n\nWhat it thought and found:\n"
)
ERROR_ASPECTS = {
    "mistaken": "Did it take what it had found about something else for what the question asks about?",
    "faithful": "Does what it thought agree with what it had found, without anything that was not found?",
    "reached": "Did it arrive at the right answer in its thoughts?",
}
"""Questions in our own words that determine the error type of TIRESRAG-R1's Table 2; the authors classified by hand."""


class JudgePrompt(Protocol):
    """One judgement that a judge is asked for."""

    @property
    def question(self) -> Question:
        """The question that the judged answer or reasoning belongs to."""

    @property
    def prompt(self) -> Prompt:
        """The prompt for a language model."""

    def parse(self, text: str) -> float | None:
        """Return the score in 0..1 that a model's reply contains; None if it contains none."""


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The reasoning and the documents of an episode, without its answers: RD of TIRESRAG-R1, section 3.1."""

    segments: tuple[tuple[int, str], ...]
    """(POLICY or ENVIRONMENT, text) pairs in order: reasoning and documents."""
    titles: tuple[str, ...] = ()
    """Titles of all passages shown."""

    @property
    def text(self) -> str:
        """The whole transcript."""
        return "".join(text for _, text in self.segments).strip()

    def text_of(self, role: int) -> str:
        """Return all text of one role, POLICY or ENVIRONMENT."""
        return "\n".join(text.strip() for segment_role, text in self.segments if segment_role == role)


def transcript_of(
    trajectory: Trajectory, answer: Tag, prefill: str = "", searches: int | None = None
) -> Transcript:
    """Return the reasoning and the documents of a trajectory without its answers, as in TIRESRAG-R1's released code.

    If the protocol starts new contexts (R3-RAG), the documents of a step are the part of the next prompt that follows its
    longest common prefix with the previous prompt.

    Args:
      trajectory: the episode. Its first prompt is not part of the transcript.
      answer: the tag of answers; its contents are removed.
      prefill: text at the end of the first prompt that counts as the start of the policy's text, such as "<think>". If empty, a
        `<think>` that the chat template adds at the end of a prompt counts.
      searches: maximum number of searches. The transcript ends before the documents of the search that would exceed it. None:
        no limit.
    """
    segments: list[tuple[int, str]] = []
    prompts: list[str] = []
    searches_per_turn = collections.Counter(search.turn for search in trajectory.searches)
    shown = 0  # searches whose documents are in `segments`
    for role, text in trajectory.segments:
        if role == POLICY:
            segments.append((role, prefill + without_tags(text, answer)))
            prefill = ""
            continue
        if role == PROMPT:
            prompts.append(text)
            prefill = prefill or trailing_think_tag(text)
            if len(prompts) == 1:
                continue
            common_prefix = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*prompts[-2:]))
            text, new_searches = text[len(list(common_prefix)) :], searches_per_turn[len(prompts) - 2]
        else:
            new_searches = int(enclosed_content(text) is not None)  # a correction has no observation tag
        if searches is not None and shown + new_searches > searches:
            break
        shown += new_searches
        segments.append((ENVIRONMENT, text))
    titles = (title for search in shown_searches(trajectory)[:searches] for title in search.titles)
    return Transcript(tuple(segments), tuple(dict.fromkeys(titles)))


def shown_searches(trajectory: Trajectory) -> Sequence[Search]:
    """Return the searches whose passages the policy saw: all but those that did not fit the context."""
    if trajectory.ended != "context_limit":
        return trajectory.searches
    segments = trajectory.segments
    later_contexts = sum(role == PROMPT for role, _ in segments) - 1
    observations = sum(role == ENVIRONMENT and enclosed_content(text) is not None for role, text in segments)
    turns = list(dict.fromkeys(search.turn for search in trajectory.searches))
    # The documents of a turn's searches are shown together, in a new context or in an observation.
    shown_turns = turns[: later_contexts + observations]
    return [search for search in trajectory.searches if search.turn in shown_turns]


@dataclasses.dataclass(frozen=True)
class Sufficiency:
    """Can the gold answer be inferred from the reasoning and the documents? 0 or 1 (TIRESRAG-R1, Eq. 2)."""

    question: Question
    transcript: Transcript

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            f"### QUESTION\n{self.question.text}\n\n### ANSWER\n{gold_text(self.question)}\n\n### References\n",
            self.transcript.text,
            system=SUFFICIENCY_SYSTEM,
        )

    def parse(self, text: str) -> float | None:
        labels = re.findall(
            r"sufficient[ _]context[^:\n]{0,40}:[\s\"'*]*(?:([01])(?:\.0+)?(?![\d.]*\d)|(true|false)\b)",
            after_thought(text).lower(),
        )
        return float(labels[-1][0] or labels[-1][1] == "true") if labels else None


@dataclasses.dataclass(frozen=True)
class Thinking:
    """How good is the reasoning, regardless of its answer? A score in tenths (TIRESRAG-R1, Eq. 3)."""

    question: Question
    transcript: Transcript

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            "### CONTEXT\n",
            self.transcript.text_of(ENVIRONMENT),
            f"\n\n### QUESTION\n{self.question.text}\n\n### MODEL THINKING PROCESS\n{self.transcript.text_of(POLICY)}",
            system=THINKING_SYSTEM,
        )

    def parse(self, text: str) -> float | None:
        return parse_tenths(text)


@dataclasses.dataclass(frozen=True)
class Correctness:
    """Is the predicted answer correct? 0 or 1 (TIRESRAG-R1, Figure 13)."""

    question: Question
    predicted: str

    @property
    def prompt(self) -> Prompt:
        text = CORRECTNESS_TEMPLATE.format(
            question=self.question.text, reference=gold_text(self.question), prediction=self.predicted
        )
        return Prompt(text)

    def parse(self, text: str) -> float | None:
        # The figure asks for True or False; its caption in appendix J speaks of yes and no.
        return parse_verdict(text)


@dataclasses.dataclass(frozen=True)
class Validation:
    """Is the predicted answer correct? 0 or 1, with R2AG's prompt (Figure A.4)."""

    question: Question
    predicted: str

    @property
    def prompt(self) -> Prompt:
        text = f'Query: "{self.question.text}"\nLabel: "{gold_text(self.question)}"\nStudent\'s Answer: "{self.predicted}"'
        return Prompt(text, system=VALIDATION_SYSTEM)

    def parse(self, text: str) -> float | None:
        labels = re.findall(r"validation\W*(correct|wrong)\b", after_thought(text).lower())
        return float(labels[-1] == "correct") if labels else None


@dataclasses.dataclass(frozen=True)
class Relevance:
    """How relevant are the documents of a step? A score in tenths (R3-RAG, Eq. 3)."""

    question: Question
    passages: tuple[Passage, ...]

    @property
    def prompt(self) -> Prompt:
        after = "\n\nScore:"
        return Prompt(
            f"Question: {self.question.text}\n\nDocuments:\n", render(self.passages), after, RELEVANCE_SYSTEM
        )

    def parse(self, text: str) -> float | None:
        return parse_tenths(text)


@dataclasses.dataclass(frozen=True)
class ShortAnswer:
    """A metric of the short answers that the model extracts from a long answer (R3-RAG, 4.1); the best one counts."""

    question: Question
    predicted: str
    metric: str
    """A field of `AnswerScores`: "em", "f1" or "cem". The prompt does not depend on it."""
    rule: Rule = RRL
    """How answers are compared."""

    @property
    def prompt(self) -> Prompt:
        return Prompt(EXTRACT_TEMPLATE.format(question=self.question.text, answer=self.predicted))

    def parse(self, text: str) -> float | None:
        answers = listed_answers(after_thought(text))
        return None if answers is None else self.score(answers)

    def score(self, answers: Sequence[str]) -> float:
        """Return the metric of these short answers."""
        scores: AnswerScores = score_answer(answers, self.question.answers, self.rule)
        return float(getattr(scores, self.metric))


@dataclasses.dataclass(frozen=True)
class ErrorAnalysis:
    """One question about the cause of a wrong answer: 0 or 1 (for the error types of TIRESRAG-R1, Table 2)."""

    question: Question
    transcript: Transcript
    predicted: str
    aspect: str
    """One of ERROR_ASPECTS."""
    last_titles: tuple[str, ...] = ()
    """Titles of the passages of the last search."""

    @property
    def prompt(self) -> Prompt:
        opening = ERROR_ANALYSIS_TEMPLATE.format(
            question=self.question.text, gold=gold_text(self.question), predicted=self.predicted
        )
        return Prompt(
            opening, self.transcript.text, f"\n\n{ERROR_ASPECTS[self.aspect]} Answer True or False."
        )

    def parse(self, text: str) -> float | None:
        return parse_verdict(text)


def gold_text(question: Question) -> str:
    """Return the gold answers as a judge reads them."""
    return " or ".join(question.answers)


_ENDS = r"(?:0(?:\.0+)?|1(?:\.0+)?)"
_SCALE = re.compile(
    rf"(?:\bout of\s*|/\s*)1(?:\.0+)?(?![\w.]*\d)|(?<![\w.,]){_ENDS}\s*(?:to|and|-|–)\s*{_ENDS}(?![\w.,]*\d)"
    rf"|(?<![\w.,]){_ENDS}\s*(?:=|means\b|meaning\b)"
)
"""Matches descriptions of the scale, such as "out of 1", "from 0 to 1" and "0 = irrelevant"."""

_TENTHS = r"(?<![\w.,/-])(0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?![\w%/]|[.,]\d)"
"""A number in 0..1, such as "0.7", ".7" and "1"."""
_NAMED = re.compile(rf"score\W*[:=]\W*?{_TENTHS}", re.IGNORECASE)
"""Matches a number after the word "score"."""
_OPENING = re.compile(rf"\A[\s*\"'(]*(?!1\.\s){_TENTHS}(?=[\s*\"')]*(?:$|[,;:(\n–-]|\.(?!\d)))")
"""Matches a number at the start, but not a count ("1 of the documents ...") or a list item ("1.")."""
_CLOSING = re.compile(rf"(?:^|[:=]|\bis\b)[\s*\"'(]*{_TENTHS}[\s*\"').]*\Z", re.MULTILINE)
"""Matches a number at the end, after a colon, an equals sign or "is", or alone on its line."""


_JUDGING = (
    "(?:assist|help|answer|comply|determine|judge|evaluate|verify|assess|decide|say|tell|rate|score|give)"
)
_UNABLE = r"(?:(?:['’]m| am) (?:not able|unable) to| can(?:not|['’]t| not)| won['’]t| will not)"
_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? )?(?:(?:i['’]m|i am) (?:very |so )?sorry\b|sorry,? (?:but )?i\b|(?:i|we) apologi[sz]e\b"
    r"|(?:my )?apologies\b|as an? (?:\w+ )?(?:ai|language model)\b"
    r"|i (?:must |have to |will )?(?:respectfully )?(?:decline|refuse)\b"
    r"|(?:i['’]m|i am) not comfortable\b|i (?:do not|don['’]t) (?:feel comfortable|have (?:enough|sufficient) \w+ to)\b"
    rf"|i{_UNABLE} (?:\w+ly |in good conscience )?{_JUDGING}\b"
    # Without "whether" or "if" the sentence may be about the judged documents ("it is impossible to determine the year").
    rf"|(?:we can(?:not|['’]t| not)|it(?: is|['’]s) (?:not possible|impossible) to) {_JUDGING} (?:whether|if)\b)",
    re.IGNORECASE,
)
"""Matches the start of a reply that refuses to judge. Numbers and verdicts after it are not a score."""


def parse_tenths(text: str) -> float | None:
    """Return the score in 0..1 of a reply, rounded to tenths; None if the reply refuses or has no such score.

    "7", "70%", "7/10" and "high" are not such scores.

    The first of these rules that applies gives the score:
    1. the last number that is named "score";
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
    decimals = [number for number in re.findall(_TENTHS, reply) if "." in number]
    # `_OPENING` and `_CLOSING` are anchored, so each matches at most once.
    candidates = _NAMED.findall(reply) or _OPENING.findall(reply) or decimals or _CLOSING.findall(reply)
    return round(float(candidates[-1]), 1) if candidates else None


_NO = r"no\b(?=\W*$|\s*[^\w\s]|\s+(?:it|the|this|that|they|there|he|she|because|since|as)\b)"
"""Matches a "no" that is a verdict, unlike that in "no doubt"."""
_OPENING_VERDICT = re.compile(rf"\W*(?!(?:true|yes|false|no)\s+or\b)(true\b|yes\b|false\b|{_NO})")
"""Matches a verdict at the start, but not a choice ("True or False")."""
_VERDICT = re.compile(r"(\bnot\s+(?:\w+ly\s+)?|n['’]t\s+(?:\w+ly\s+)?)?\b(true|false)\b")
"""Matches true or false with the negation before it."""


def parse_verdict(text: str) -> float | None:
    """Return 1 for true or yes, 0 for false or no; None if the reply contains neither or refuses.

    The first of these rules that applies gives the verdict:
    1. the word that the reply starts with, whatever follows ("No doubt" is not a verdict);
    2. the last true or false, negated by a "not" before it;
    3. the last yes or no.
    """
    reply = after_thought(text).lower()
    if _REFUSAL.match(reply):
        return None
    if opening := _OPENING_VERDICT.match(reply):
        return float(opening[1] in ("true", "yes"))
    if verdicts := _VERDICT.findall(reply):
        negation, word = verdicts[-1]
        return float((word == "true") != bool(negation))
    plain = re.findall(r"\b(yes|no)\b", reply)
    return float(plain[-1] == "yes") if plain else None
