"""Methods with at most one search, and what all methods share."""

import dataclasses
import re
from pathlib import Path

import pytest

from rrl.data.trajectory import NOT_FINITE
from rrl.errors import UserError
from rrl.recipes.prompted.base import PromptedSettings, merge_passages, parse_list
from rrl.recipes.prompted.catalogue import METHODS, make_prompted_method
from rrl.rollout.workflow import Generate, PromptTooLong, Retrieve
from tests.recipes.prompted.scripted import FILM, PERSON, QUESTION, generated, play, ramble


def test_options_are_those_of_the_docs_table() -> None:
    text = (Path(__file__).parents[3] / "docs/evaluation.md").read_text(encoding="utf-8")
    documented = {}
    for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|[^|]+\|([^|]*)\|[^|]+\|$", text, re.MULTILINE):
        options = dict(part.split() for part in row[1].strip().split(", ") if part)
        documented |= dict.fromkeys(re.findall(r"`(\w+)`", row[0]), options)
    assert {name: documented.get(name) for name in METHODS} == {
        name: {option: str(value) for option, value in method.option_values.items()}
        for name, method in METHODS.items()
    }


def test_direct_generates_once_and_never_searches() -> None:
    outcome, prompts = play("direct", [(QUESTION.text, " Oslo ")])
    assert outcome.answer == "Oslo" and outcome.searches == () and outcome.titles == []
    assert len(outcome.generations) == 1 and outcome.sampled_tokens == 3 and outcome.prompt_tokens == 1
    assert "passages" not in prompts[0].lower()


def test_cot_returns_the_text_after_the_final_answer() -> None:
    outcome, _ = play("cot", [("step by step", "She was born there.\nThe final answer: Oslo")])
    assert outcome.answer == "Oslo"
    assert play("cot", [("", "just Oslo")])[0].answer == "just Oslo"


def test_naive_rag_searches_with_the_question_and_reads_table_5s_prompt() -> None:
    outcome, prompts = play("naive_rag", [("(Title: Silver Harbour) Silver Harbour is a film", "Oslo")])
    assert prompts[0].startswith("Answer the question based on the given passages. Only give me the answer")
    assert outcome.searches == ((QUESTION.text, (FILM,)),) and outcome.titles == ["Silver Harbour"]


def test_rag_with_cot_reasons_over_the_passages() -> None:
    outcome, prompts = play("rag_cot", [("directed by Ada Berg", "Hm.\nThe final answer: Oslo")])
    assert outcome.answer == "Oslo" and "step by step" in prompts[0]


def test_a_failed_or_empty_search_is_shown_in_the_prompt() -> None:
    for found in ({"Silver Harbour": None}, {}):
        outcome, _ = play("naive_rag", [("(nothing found)", "Oslo")], found=found)
        assert outcome.answer == "Oslo" and outcome.titles == []
    assert play("naive_rag", [("", "x")], found={"Silver": None})[0].searches == ((QUESTION.text, None),)


def test_finished_thoughts_are_not_part_of_the_answer() -> None:
    thought = "<think>\nHm, Rome? No.\n</think>\n\n"
    outcome, _ = play("direct", [("", f"{thought}Oslo")])
    assert outcome.answer == "Oslo" and "Rome" in outcome.generations[0].trajectory.segments[0][1]
    assert (
        play("direct", [("", "<think> Rome")])[0].answer == "<think> Rome"
    )  # truncated inside the thought: no answer
    script = [
        ("", f"{thought}Bergen\nOslo"),
        *[("", f"{thought}{text}") for text in ("a", "b", "False", "True", "2")],
    ]
    assert play("sure", script)[0].answer == "Oslo"


def test_a_line_after_the_final_answer_is_not_part_of_it() -> None:
    assert play("cot", [("", "Hm.\nThe final answer: Oslo\nOslo is a capital.")])[0].answer == "Oslo"


def test_choices_are_shown_with_letters_but_not_searched() -> None:
    question = dataclasses.replace(QUESTION, choices=("Oslo", "Rome"), answers=("A",))
    outcome, _ = play("naive_rag", [("(A) Oslo\n(B) Rome\nAnswer with the letter", "A")], question)
    assert outcome.searches[0][0] == QUESTION.text


def test_settings_limit_number_and_length_of_passages() -> None:
    settings = PromptedSettings(passage_chars=6, most_passages=1)
    _, prompts = play(
        "naive_rag",
        [("(Title: Silver Harbour) Silver\n", "x")],
        found={"": [FILM, PERSON]},
        settings=settings,
    )
    assert "Ada Berg" not in prompts[0]


def test_sure_takes_the_candidate_with_a_valid_summary() -> None:
    outcome, prompts = play(
        "sure",
        [
            ("2 different answers", "1. Bergen\n2. Oslo\n3. Rome"),
            ('answer "Bergen"', "nothing on Bergen"),
            ('answer "Oslo"', "she was born in Oslo"),
            ("Summary: nothing on Bergen", "False"),
            ("Summary: she was born in Oslo", "True"),
            ("Summary 1: nothing on Bergen\nSummary 2: she was born in Oslo", "2"),
        ],
    )
    assert outcome.answer == "Oslo" and len(prompts) == 6
    assert '"Bergen"' in prompts[3] and '"Oslo"' in prompts[4] and QUESTION.text in prompts[5]


@pytest.mark.parametrize(
    ("valid", "preferred", "answer"),
    [
        (("True", "True"), "1", "Bergen"),
        (("True", "True"), "2", "Oslo"),
        (("True", "False"), "2", "Bergen"),  # a tie: the earlier candidate wins
        (("False", "False"), "either 1 or 2", "Bergen"),
        (("False", "True"), "either 1 or 2", "Oslo"),
        (("True", "True"), "Summary 2 is more informative, as it names the year 1912.", "Oslo"),
        (("True", "True"), "2. Summary 2 states it; Summary 1 does not.", "Oslo"),
        (("False. It is not true that it says so.", "True"), "1 or 2?", "Oslo"),
        (("Untrue", "True"), "?", "Oslo"),
    ],
)
def test_sure_counts_validity_and_ranking(valid: tuple[str, str], preferred: str, answer: str) -> None:
    script = [("", "Bergen\nOslo"), ("", "a"), ("", "b"), ("", valid[0]), ("", valid[1]), ("", preferred)]
    assert play("sure", script)[0].answer == answer


def test_sure_with_fewer_than_two_candidates_stops_early() -> None:
    assert play("sure", [("", "Oslo\nOslo")])[0].answer == "Oslo"
    assert play("sure", [("", " \n")])[0].answer == ""


def test_sure_compares_each_pair_of_candidates() -> None:
    script = (
        [("3 different", "a\nb\nc")] + [("", "s")] * 3 + [("", "no")] * 3 + [("", "1"), ("", "2"), ("", "2")]
    )
    # pairs (a, b), (a, c), (b, c): a beats b, c beats a, c beats b
    assert play("sure", script, candidates=3)[0].answer == "c"


def test_parse_list_removes_only_bullets_and_numbers() -> None:
    assert parse_list("1. x\n2) y\n- z\n* x\n\n3 May 1990\n(4) w") == ["x", "y", "z", "3 May 1990", "w"]
    assert merge_passages([FILM], [PERSON, FILM]) == [FILM, PERSON]
    assert merge_passages([FILM], None) == [FILM]


def test_unknown_methods_and_options_are_refused() -> None:
    assert len(METHODS) == 13 and all(method.source for method in METHODS.values())
    assert make_prompted_method("ircot", {"steps": 3}).option_values == {"steps": 3}
    for name, options, words in (
        ("rag", {}, r"method='rag' is unknown; choose one of direct, cot"),
        ("ircot", {"rounds": 3}, r"ircot.rounds is not an option of the method; its options are steps"),
        ("direct", {"steps": 3}, r"its options are none"),
        ("ircot", {"steps": 0}, r"ircot.steps=0 must be a whole number above 0"),
        ("ircot", {"steps": 1.5}, r"must be a whole number above 0"),
        ("flare", {"look_below": -1}, r"flare.look_below=-1 must be a number above 0"),
    ):
        with pytest.raises(UserError, match=words):
            make_prompted_method(name, options)
    with pytest.raises(UserError, match="tokens=0 must be at least 1"):
        PromptedSettings(tokens=0)


RAMBLINGS = (
    "",
    "\n\n",
    "Search[",
    "Follow up: x Intermediate answer: ",
    "#1 #2\n#2\n#1 #3\n#9",
    "Search[x] A",
    "True 1 2",
)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("text", RAMBLINGS)
def test_every_method_ends_for_any_output_and_failed_searches(name: str, text: str) -> None:
    answer, requests = ramble(name, text)
    assert isinstance(answer, str) and len(requests) < 60


@pytest.mark.parametrize("name", METHODS)
def test_every_prompt_with_the_question_shows_its_choices(name: str) -> None:
    question = dataclasses.replace(QUESTION, choices=("Oslo", "Rome"), answers=("A",))
    shown = f"{QUESTION.text}\n(A) Oslo\n(B) Rome"
    for text in ("first\nsecond", "C"):
        _, requests = ramble(name, text, question=question)
        prompts = [str(request.prompt) for request in requests if isinstance(request, Generate)]
        # Adaptive-RAG's classification asks for another letter than a choice's.
        asking = [
            prompt for prompt in prompts if QUESTION.text in prompt and "Reply with one letter" not in prompt
        ]
        assert asking and all(shown in prompt for prompt in asking)


def test_a_prompt_that_exceeds_the_context_ends_without_an_answer() -> None:
    flow = make_prompted_method("naive_rag").workflow(QUESTION, PromptedSettings())
    assert isinstance(next(flow), Retrieve)
    flow.send([FILM])
    with pytest.raises(StopIteration) as end:
        flow.throw(PromptTooLong("too long"))
    outcome = end.value.value
    assert (outcome.answer, outcome.ended) == ("", "context_limit")
    assert outcome.searches == ((QUESTION.text, (FILM,)),)


def test_non_finite_logits_end_without_an_answer() -> None:
    flow = make_prompted_method("direct").workflow(QUESTION, PromptedSettings())
    next(flow)
    broken = dataclasses.replace(generated("Os"), stop=NOT_FINITE)
    with pytest.raises(StopIteration) as end:
        flow.send(broken)
    outcome = end.value.value
    assert (outcome.answer, outcome.ended, outcome.generations) == ("", NOT_FINITE, (broken,))
