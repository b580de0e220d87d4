"""The oracle on the built-in world: the scripted expert gets full scores, faulty reasoning gets lower ones."""

import dataclasses

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.tiresrag import TiresRag
from rrl.rewards.judge_prompts import Correctness, Relevance, ShortAnswer, Sufficiency, Thinking, Validation
from rrl.rewards.oracle import Oracle, groundedness
from rrl.rewards.transcript import Transcript

QUESTION = Question(
    "q",
    "Who is the spouse of the director of Silver Harbour?",
    ("Ivo Danes",),
    gold=("Silver Harbour", "Marta Velikov"),
)
FOUND = "<information>\n(Title: Silver Harbour) Silver Harbour was directed by Marta Velikov in 1950.\n</information>"


def transcript(*segments, titles=()):
    return Transcript(tuple(segments), titles)


def grade(case):
    (score,) = Oracle().grade([case])
    return score


@pytest.mark.parametrize("kind", KINDS)
def test_expert_gets_full_sufficiency_and_thinking_scores(kind):
    wiki = generate("train", 0, 200)
    by_title = {passage.title: passage for passage in wiki.passages}
    for item in wiki.questions(kind, 10, 0):
        found = {hop.query: [by_title[hop.title], wiki.passages[0]] for hop in item.plan.hops}
        segments = []
        for part in demonstrate(TiresRag(shown_reflections=0), item, found.__getitem__):
            own = isinstance(part, str)
            segments.append(
                (POLICY, part) if own else (ENVIRONMENT, f"{part.prefix}{part.body}{part.suffix}")
            )
        titles = tuple(passage.title for passages in found.values() for passage in passages)
        assert grade(Sufficiency(item.question, transcript(*segments, titles=titles))) == 1.0
        assert grade(Thinking(item.question, transcript(*segments, titles=titles))) == 1.0


@pytest.mark.parametrize(
    ("titles", "score"),
    [((), 0.0), (("Silver Harbour",), 0.0), (("Marta Velikov", "Elsewhere", "Silver Harbour"), 1.0)],
)
def test_sufficiency_is_one_if_all_gold_passages_were_found(titles, score):
    assert grade(Sufficiency(QUESTION, transcript(titles=titles))) == score


@pytest.mark.parametrize(
    ("thought", "score"),
    [
        ("The director of Silver Harbour is Marta Velikov.", 1.0),
        ("The film Silver Harbour is known.", 0.5),  # half of the chain is named
        (
            "The director of Silver Harbour is Marta Velikov, or Edda Tolvik.",
            0.7,
        ),  # two of six names are not grounded
        ("The director of Silver Harbour is Marta Velikov, since 1960.", 0.8),  # a year from no document
        ("So it is clear.", 0.0),
        ("", 0.0),
    ],
)
def test_thinking_is_chain_coverage_times_groundedness(thought, score):
    segments = ((POLICY, "<think> Search."), (ENVIRONMENT, FOUND), (POLICY, thought))
    assert grade(Thinking(QUESTION, transcript(*segments))) == score


def test_a_later_document_does_not_ground_an_earlier_claim():
    thought = (POLICY, "It must be Marta Velikov.")
    assert groundedness(QUESTION, transcript((ENVIRONMENT, FOUND), thought)) == 1.0
    assert groundedness(QUESTION, transcript(thought, (ENVIRONMENT, FOUND))) == 0.0


def test_names_in_the_choices_are_grounded():
    asked = dataclasses.replace(QUESTION, choices=("Zora Quill", "Ada Berg"), answers=("A",))
    thought = (POLICY, "<think> It is Zora Quill. </think>")
    assert groundedness(QUESTION, transcript(thought)) == 0.0
    assert groundedness(asked, transcript(thought)) == 1.0


@pytest.mark.parametrize(
    ("titles", "score"), [((), 0.0), (("Elsewhere",), 0.0), (("Silver Harbour", "Elsewhere"), 0.5)]
)
def test_relevance_is_the_fraction_of_gold_passages(titles, score):
    shown = tuple(Passage(str(i), title, "text") for i, title in enumerate(titles))
    assert grade(Relevance(QUESTION, shown)) == score
    steps = [("Marta Velikov", "x"), ("Silver Harbour",)]
    scores = Oracle().grade([Relevance(QUESTION, tuple(Passage("", t, "") for t in step)) for step in steps])
    assert sum(scores) == 1.0


def test_titles_match_regardless_of_case_and_space():
    found = transcript((POLICY, ""), titles=("silver  harbour ", "MARTA VELIKOV"))
    assert grade(Sufficiency(QUESTION, found)) == 1
    assert grade(Relevance(QUESTION, [Passage("1", " Silver harbour", "x")])) == 0.5


def test_correctness_is_cover_exact_match():
    assert grade(Correctness(QUESTION, "It is Ivo Danes.")) == grade(Validation(QUESTION, "Ivo Danes")) == 1.0
    assert grade(Correctness(QUESTION, "Danes")) == 0.0


def test_a_question_without_gold_passages_is_refused():
    with pytest.raises(UserError, match=r"question 'q' names no gold passages.*judge=FOLDER"):
        Oracle().grade([Sufficiency(Question("q", "Who?", ("x",)), transcript())])


def test_oracle_scores_the_unchanged_short_answer():
    assert grade(ShortAnswer(QUESTION, "Ivo Danes", "em")) == 1
    assert grade(ShortAnswer(QUESTION, "It is Ivo Danes", "em")) == 0
    assert grade(ShortAnswer(QUESTION, "Ivo Tolvik", "f1")) == 0.5
