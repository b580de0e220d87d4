"""Judge prompts in the papers' words, and the parsing of replies."""

import hashlib

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.rewards.judge_instructions import (
    CORRECTNESS_TEMPLATE,
    ERROR_ASPECTS,
    SUFFICIENCY_SYSTEM,
    THINKING_SYSTEM,
    VALIDATION_SYSTEM,
)
from rrl.rewards.judge_prompts import (
    Correctness,
    ErrorAnalysis,
    Relevance,
    ShortAnswer,
    Sufficiency,
    Thinking,
    Validation,
)
from rrl.rewards.transcript import Transcript

QUESTION = Question(
    "q", "Who directed Silver Harbour?", ("Marta Velikov", "M. Velikov"), gold=("Silver Harbour",)
)
TRANSCRIPT = Transcript(
    (
        (POLICY, "<think> Search the film. </think> <search>Silver Harbour</search>"),
        (ENVIRONMENT, "\n<information>\nIt was directed by Marta Velikov.\n</information>\n"),
        (POLICY, "<think> It is Marta Velikov. </think>"),
    ),
    ("Silver Harbour",),
)


def test_sufficiency_prompt_has_question_gold_answer_and_transcript():
    prompt = Sufficiency(QUESTION, TRANSCRIPT).prompt
    assert prompt.system == SUFFICIENCY_SYSTEM
    assert "Who directed Silver Harbour?" in prompt.before and "Marta Velikov or M. Velikov" in prompt.before
    assert prompt.body.startswith("<think> Search") and prompt.body.endswith("Velikov. </think>")
    assert "directed by Marta" in prompt.body


def test_thinking_prompt_has_documents_question_and_reasoning_but_no_gold_answer():
    case = Thinking(Question("q", "Who?", ("The Gold",)), TRANSCRIPT)
    assert case.prompt.system == THINKING_SYSTEM
    assert "directed by Marta" in case.prompt.body and "Search the film" not in case.prompt.body
    assert "Who?" in case.prompt.after and "Search the film" in case.prompt.after
    assert "The Gold" not in case.prompt.user_message


def test_every_judge_reads_the_choices_but_is_not_asked_to_choose():
    question = Question("q", "Who?", ("B",), choices=("Ada Berg", "Marta Velikov"))
    for case in (
        Sufficiency(question, TRANSCRIPT),
        Thinking(question, TRANSCRIPT),
        Correctness(question, "B"),
        Validation(question, "B"),
        Relevance(question, (Passage("0", "Silver Harbour", "A film."),)),
        ShortAnswer(question, "B", "em"),
        ErrorAnalysis(question, TRANSCRIPT, "B", next(iter(ERROR_ASPECTS))),
    ):
        assert "Who?\n(A) Ada Berg\n(B) Marta Velikov" in case.prompt.user_message
        assert "letter" not in case.prompt.user_message


def test_prompts_have_the_words_of_the_papers_figures():
    # Figures 11, 12, 13 of TIRESRAG-R1 and A.4 of R2AG: phrases of each, as printed
    for phrase in (
        "Sufficient Context To The Given Answer: 1 IF the CONTEXT is sufficient to infer the ANSWER to the question and 0",
        "without relying on your memory to determine whether the question can be answered from the context.",
        "First, output a list of step-by-step questions that would be used to arrive at a label for the criteria.",
        "In which year did the publisher of Roald Dahl's Guide to Railway Safety cease to exist?",
        "Then, use the EXPLANATION to output the ### EVALUATION (JSON)",
    ):
        assert phrase in SUFFICIENCY_SYSTEM
    assert "3. Error Awareness - Does it avoid unsupported assumptions?" in THINKING_SYSTEM
    assert "A single float-type score from {0.0, 0.1, 0.2, ..., 1.0}." in THINKING_SYSTEM
    assert "fully aligns with the meaning and key information of the Golden Answer" in CORRECTNESS_TEMPLATE
    assert 'Validation: ["Correct"] or Validation: ["Wrong"]' in VALIDATION_SYSTEM
    # sha256 of the figures' words with single spaces and straight quotes, without the # of Figure 11's headings
    figures = [SUFFICIENCY_SYSTEM, THINKING_SYSTEM, CORRECTNESS_TEMPLATE, VALIDATION_SYSTEM]
    words = [
        " ".join(word for word in text.split() if word != "###" or text == VALIDATION_SYSTEM)
        for text in figures
    ]
    assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in words] == [
        "44a13f12c6c81072",
        "3f2c13ca2cc46fdb",
        "6ff977dec6646652",
        "abe19f733472d6a5",
    ]


def test_correctness_and_validation_prompts_have_question_gold_and_prediction():
    text = Correctness(QUESTION, "Velikov {x}").prompt.user_message
    assert "Question: Who directed Silver Harbour?\nGolden Answer: Marta Velikov or M. Velikov" in text
    assert text.endswith("Predicted Answer: Velikov {x}")
    prompt = Validation(QUESTION, "Velikov").prompt
    assert prompt.system == VALIDATION_SYSTEM and 'Student\'s Answer: "Velikov"' in prompt.user_message


def test_relevance_prompt_has_question_and_documents():
    prompt = Relevance(QUESTION, (Passage("0", "A", "first"), Passage("1", "B", "second"))).prompt
    assert "Silver Harbour" in prompt.before
    assert prompt.body == "(Title: A) first\n(Title: B) second"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('### EXPLANATION\nYes.\n### JSON\n{ "Sufficient Context To The Given Answer": 1 }', 1.0),
        ('{"Sufficient Context To The Given Answer": 0}', 0.0),
        ('{"Sufficient Context": "1"}', 1.0),
        ('{"sufficient context to the given answer" : 1.0}', 1.0),
        ('first {"Sufficient Context": 1}, no: {"Sufficient Context": 0}', 0.0),
        ('<think>{"Sufficient Context": 1}</think>{"Sufficient Context": 0}', 0.0),
        ('<think>{"Sufficient Context": 1} and then it was cut', None),
        ("{'Sufficient Context To The Given Answer': 1}", 1.0),
        ("**Sufficient Context**: 0", 0.0),
        ('"Sufficient_Context": true', 1.0),
        ('{"Sufficient Context": false}', 0.0),
        ("Sufficient context: no number", None),
        ('{"Sufficient Context": 10}', None),
        ('{"Sufficient Context": 0.5}', None),
        ("The context is sufficient: 1", None),
        ("", None),
    ],
)
def test_sufficiency_is_parsed_from_json(text, score):
    assert Sufficiency(QUESTION, TRANSCRIPT).parse(text) == score


def test_thinking_and_relevance_are_parsed_in_tenths():
    assert Thinking(QUESTION, TRANSCRIPT).parse("Score: 0.74") == Relevance(QUESTION, ()).parse("0.74") == 0.7


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("True", 1.0),
        ("false.", 0.0),
        ("yes", 1.0),
        ("No", 0.0),
        ("Is it true? No: False", 0.0),
        ("untrue", None),
        ("True. There is no discrepancy.", 1.0),
        ("**True** - no further details are needed", 1.0),
        ("False. It is not true that both were born there.", 0.0),
        ("True or False: false", 0.0),
        ("The prediction has no mistake: True. No doubt.", 1.0),
        ("No doubt, the prediction is True", 1.0),
        ("No discrepancy: True", 1.0),
        ("No, it says True in the document", 0.0),
        ("No the answer is not that", 0.0),
        ("The answer is not true", 0.0),
        ("The answer isn't entirely true", 0.0),
        ("It is not false", 1.0),
        ("", None),
    ],
)
def test_correctness_is_parsed_from_true_or_false(text, score):
    assert Correctness(QUESTION, "x").parse(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('Analysis:\nThe answer is right.\nValidation: ["Correct"]', 1.0),
        ("Validation: [“Wrong”]", 0.0),
        ("Validation: Correct", 1.0),
        ("Correct", None),
    ],
)
def test_validation_is_parsed_from_its_form(text, score):
    assert Validation(QUESTION, "x").parse(text) == score


@pytest.mark.parametrize(
    ("reply", "em", "f1"),
    [
        ('["It was her", "M. Velikov"]', 1.0, 1.0),  # the best of several counts
        ('Short: ["Marta Danes"]', 0.0, 0.5),
        ("[]", 0.0, 0.0),
        ('<think>["Marta Velikov"]</think>["Ivo Danes"]', 0.0, 0.0),
        ("Marta Velikov", None, None),
        ('["Marta Velikov"', None, None),
    ],
)
def test_short_answers_are_scored_from_the_listed_answers(reply, em, f1):
    long = "It was Marta Velikov who directed it."
    cases = [ShortAnswer(QUESTION, long, name) for name in ("em", "f1")]
    assert cases[0].prompt == cases[1].prompt  # so a model answers it once
    assert QUESTION.text in cases[0].prompt.user_message and long in cases[0].prompt.user_message
    assert [case.parse(reply) for case in cases] == [em, f1]
