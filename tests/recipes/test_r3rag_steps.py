"""The steps of R3-RAG: parser, prompts, documents, limits."""

import dataclasses
import hashlib

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search
from rrl.recipes.base import uses_chat
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment, Step, parse_step
from rrl.rollout.protocol import CONTEXT, EOS, TURN_TOKENS, Episode, Finish, Restart, SearchFor
from tests.recipes.r3rag_episodes import (
    ASK,
    ASK_MORE,
    BOOK,
    BROKEN,
    FILM,
    QUESTION,
    RIGHT,
    after,
)

# -- parser (Eqs. 1 and 4; Figures 2, 6 and 7) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (ASK, Step("I need the director.", query="director of Silver Harbour")),
        (RIGHT, Step("It says so.", answer="It was Marta Velikov.")),
        ("The problem analysis: a The final answer: b", Step("a", answer="b")),
        ("The problem analysis: **a** 2 * 3\nThe final answer: **b**", Step("**a** 2 * 3", answer="**b**")),
        ("\n Step 12: \nThe problem analysis:a\n\nb\nThe retrieval query:c?\n", Step("a\n\nb", query="c?")),
        (
            "Step 1:\nThe problem analysis: a\nStep 2: b\nThe final answer: c",
            Step("a\nStep 2: b", answer="c"),
        ),
    ],
)
def test_a_well_formed_step_is_parsed(text, step):
    assert parse_step(text) == step


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "The final answer: b",
        "The retrieval query: b",
        "The problem analysis: a",
        "The retrieval query: b\nThe problem analysis: a",
        f"{ASK}\nThe retrieval query: another",  # Figure 2, trajectory 2: two queries
        f"{ASK}\nThe final answer: both",  # Figure 2, trajectory 3: a query and an answer
        f"{RIGHT}\nThe final answer: Edda Tolvik",
        f"{RIGHT}\nThe retrieval query: more",
        f"{ASK}\n{RIGHT}",  # continues with a second step
        f"{ASK}\nThe retrieval documents: (Title: T) a document of my own",
        "The retrieval documents: x\nThe problem analysis: a\nThe final answer: b",
        "The problem analysis: a\nThe problem analysis: b\nThe final answer: c",
        "The problem analysis:\nThe final answer: b",
        "The problem analysis: a\nThe final answer:  \n",
        "The problem analysis: a\nThe retrieval query:",
        f"Sure, here it is.\n{ASK}",
        "Step one:\nThe problem analysis: a\nThe final answer: b",
        "Step 1: Step 2: The problem analysis: a\nThe final answer: b",
        "the problem analysis: a\nthe final answer: b",
        "The problem analysis: I could write The final answer: here.\nThe final answer: b",
        "**The problem analysis**: a\n**The final answer**: b",
        "The question: x\nThe problem analysis: a\nThe final answer: b",
        "The problem analysis: a\n**The retrieval query:** b",
        "The problem analysis: a\nThe retrieval query:** b",
        "The problem analysis: a\n### The final answer: b",
        "The problem analysis: a\n**Either:**\nThe retrieval query: b",
        "The problem analysis: a\nOR:\nThe final answer: b",
    ],
)
def test_a_malformed_step_is_none(text):
    assert parse_step(text) is None


def test_parsing_inverts_to_text():
    for step in (Step("a\nb", query="c"), Step("a", answer="c: d")):
        assert parse_step(step.to_text(3)) == step
    assert Step("a", query="b").to_text(2) == "Step 2:\nThe problem analysis: a\nThe retrieval query: b"


# -- protocol (3.1) ----------------------------------------------------------------------------------------------------


def test_a_step_ends_only_with_the_text_or_a_limit():
    environment, episode = R3RagEnvironment(), Episode(QUESTION)
    assert environment.stops == () and environment.turn_tokens == 512
    assert environment.step(episode, ASK, EOS) == SearchFor("director of Silver Harbour")
    assert environment.step(episode, RIGHT, EOS) == Finish("answer")
    assert environment.step(episode, BROKEN, EOS) == Finish("malformed")
    assert environment.step(episode, RIGHT, TURN_TOKENS) == Finish("length")
    assert environment.step(episode, RIGHT, CONTEXT) == Finish("context_limit")


def test_every_step_has_a_new_prompt_with_question_and_past_steps():
    assert R3Rag().prompt(QUESTION) == "The question: Who directed Silver Harbour?"
    assert uses_chat(R3Rag())
    first = (
        "The question: Who directed Silver Harbour?\n"
        "Step 1:\n"
        "The problem analysis: I need the director.\n"
        "The retrieval query: director of Silver Harbour\n"
        "The retrieval documents: (Title: Silver Harbour) Silver Harbour is a film by Marta Velikov."
    )
    assert after((ASK, [FILM])) == Restart(first)
    second = (
        f"{first}\n"
        "Step 2:\n"
        "The problem analysis: Not yet.\n"
        "The retrieval query: Silver Harbour film\n"
        "The retrieval documents: (Title: Silver Book) The author of Silver Book is Edda Tolvik."
    )
    assert after((ASK, [FILM]), (f"  {ASK_MORE}\n\n", [BOOK])) == Restart(second)


def test_documents_shown_before_are_omitted():
    assert after((ASK, [FILM]), (ASK_MORE, [FILM, BOOK])) == after((ASK, [FILM]), (ASK_MORE, [BOOK]))
    later = after((ASK, [FILM]), (ASK_MORE, [BOOK]), (ASK_MORE, [FILM]))
    assert later.prompt.count("(Title: Silver Harbour)") == 1  # shown two steps before
    nothing_new = after((ASK, [FILM, FILM]), (ASK_MORE, [FILM]))
    assert nothing_new.prompt.endswith("Silver Harbour film\nThe retrieval documents: ")
    assert nothing_new.prompt.count("(Title:") == 1
    action = after((ASK, [FILM]), (ASK_MORE, [FILM, BOOK]), environment=R3RagEnvironment(drop_seen=False))
    assert action.prompt.count("(Title: Silver Harbour)") == 2


def test_the_prompt_says_that_a_search_failed():
    assert after((ASK, [])).prompt.endswith("The retrieval documents: ")
    assert after((ASK, None)).prompt.endswith("The retrieval documents: The search failed.")


def test_512_characters_limit_each_document_or_the_block():
    # paper (appendix C) and released code
    long = [Passage(str(i), f"T{i}", str(i) * 600) for i in range(3)]
    search = [Search(0, "q", (), False, tuple(long))]
    (shown,) = R3RagEnvironment().documents(search)
    assert [p.text for p in shown] == [str(i) * 512 for i in range(3)]
    (block,) = R3RagEnvironment(cut="block").documents(search)
    assert [p.text for p in block] == ["0" * (512 - len("(Title: T0) "))]
    short = [dataclasses.replace(p, text=p.text[:200]) for p in long]
    (block,) = R3RagEnvironment(cut="block").documents([Search(0, "q", (), False, tuple(short))])
    assert [len(p.text) for p in block] == [200, 200, 512 - 2 * len("(Title: T0) ") - 400 - 2 - 12]
    assert len("\n".join(f"(Title: {p.title}) {p.text}" for p in block)) == 512
    (whole,) = R3RagEnvironment(document_characters=0).documents(search)
    assert list(whole) == long


def test_a_document_that_did_not_fit_the_block_counts_as_not_shown():
    long = tuple(Passage(str(i), f"T{i}", str(i) * 600) for i in range(3))
    first, second = Search(0, "q", (), False, long), Search(1, "r", (), False, long[1:])
    shown = R3RagEnvironment(cut="block").documents([first, second])
    assert [[p.title for p in passages] for passages in shown] == [["T0"], ["T1"]]


def test_at_most_five_steps_and_the_last_query_is_searched():
    # Algorithm 1, lines 9 to 14
    steps = [(ASK, [FILM])] * 5
    assert isinstance(after(*steps[:4]), Restart)
    assert after(*steps) == Finish("turn_limit")
    assert R3RagEnvironment().step(Episode(QUESTION, turn=4), ASK, EOS) == SearchFor(
        "director of Silver Harbour"
    )
    assert isinstance(after(*steps, environment=R3RagEnvironment(max_steps=10)), Restart)


def test_paper_prompts_are_figures_6_and_7():
    paper = R3RagEnvironment(opening="paper")
    first = R3Rag(environment=paper).prompt(QUESTION)
    assert first.startswith(
        "# Role\nYou are an expert in large language models and knowledge retrieval, with"
    )
    assert first.endswith("#### Current Input: The question: Who directed Silver Harbour?\n#### Output:\n")
    later = after((ASK, [FILM]), environment=paper).prompt
    assert later.startswith("# Role: You are an expert in large language models and knowledge retrieval.\n")
    assert (
        "    - **Review Previous Steps**: Examine all prior steps, including analyses, queries, and documents."
        in later
    )
    assert later.endswith(
        "Who directed Silver Harbour?. The Previous Steps:\n"
        "Step 1:\n"
        "The problem analysis: I need the director.\n"
        "The retrieval query: director of Silver Harbour\n"
        "The retrieval documents: (Title: Silver Harbour) Silver Harbour is a film by Marta Velikov.\n"
        "#### Output:\n"
    )


def test_figures_6_and_7_have_the_printed_words():
    # sha256 of the figures' words with single spaces and empty placeholders
    paper = R3RagEnvironment(opening="paper")
    empty = Question("q", "", ("",))
    texts = (paper.prompt(empty, []), paper.prompt(empty, [(Step("a", query="b"), [])]))
    later = texts[1].replace(
        "\nStep 1:\nThe problem analysis: a\nThe retrieval query: b\nThe retrieval documents: ", ""
    )
    words = [" ".join(text.split()) for text in (texts[0], later)]
    assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in words] == FIGURES


FIGURES = ["9709d859b6ab7e29", "709cd561cc870b38"]
