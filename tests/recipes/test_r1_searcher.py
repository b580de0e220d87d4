"""R1-Searcher: protocol, both stages' rewards by hand, what counts as its form, and its expert (SPEC.md 6, baselines)."""

import dataclasses

import numpy as np
import pytest

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.recipes.base import uses_chat
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.r1_searcher import INSTRUCTION, R1Searcher
from rrl.rollout.protocol import EOS, Episode, Finish, SearchFor
from tests.recipes.made import QUESTION, scored, spoken, trajectory, turns

RECIPE, FIRST = R1Searcher(), R1Searcher(stage=1)
ENV = RECIPE.environment
OPEN, CLOSE = "<|begin_of_query|>", "<|end_of_query|>"
ASK = f" hm {OPEN} Silver Harbour {CLOSE}"
RIGHT, WRONG = "<answer> Marta Velikov </answer>", "<answer> Edda Tolvik </answer>"
DONE = " so </think>\n"


def both(*texts, searches=None):
    """What is earned in stage 1 and in stage 2."""
    searches = max(0, len(texts) - 1) if searches is None else searches
    return [
        scored(recipe, *turns(ENV, *texts), searches=searches).rewards["total"] for recipe in (FIRST, RECIPE)
    ]


# -- protocol (SPEC.md 6: begin/end_of_query and begin/end_of_documents markers, at most 8 searches) ------------------------


def test_searches_are_asked_for_and_answered_between_the_published_markers():
    assert ENV.stops == (CLOSE,)
    assert ENV.react(Episode(QUESTION), ASK, CLOSE) == SearchFor("Silver Harbour")
    message = ENV.observe(Episode(QUESTION), None)
    assert (message.prefix, message.suffix) == ("\n<|begin_of_documents|>\n", "\n<|end_of_documents|>\n")


def test_at_most_eight_searches():
    episode = Episode(QUESTION)
    for episode.turn in range(9):
        action = ENV.react(episode, ASK, CLOSE)
        assert action == (SearchFor("Silver Harbour") if episode.turn < 8 else Finish("search_limit"))
        assert ENV.react(episode, DONE + RIGHT, EOS) == Finish("answer")


@pytest.mark.parametrize(("text", "stop"), [("hm", EOS), (f"x {CLOSE}", CLOSE), (f"{OPEN} {CLOSE}", CLOSE)])
def test_what_neither_searches_nor_answers_ends_the_episode(text, stop):
    assert ENV.react(Episode(QUESTION), text, stop) == Finish("no_action")


def test_the_thought_is_opened_in_every_prompt():
    base, instruct, bare = (R1Searcher(opening=o).prompt(QUESTION) for o in ("base", "instruct", "bare"))
    assert base.prefill == instruct.prefill == bare.prefill == "<think>"
    assert base.user_message == f"{INSTRUCTION}\n\nUser: {QUESTION.text}\nAssistant: " and not base.chat
    assert (instruct.system, instruct.user_message, bare.user_message) == (
        INSTRUCTION,
        QUESTION.text,
        QUESTION.text,
    )
    assert not bare.system and not uses_chat(RECIPE) and uses_chat(R1Searcher(opening="bare"))
    for part in (OPEN, CLOSE, "<|begin_of_documents|>", "<|end_of_documents|>", "<think>", "<answer>"):
        assert part in INSTRUCTION


# -- rewards (SPEC.md 6: stage 1 retrieval + format; stage 2 F1 with -2 on malformed output) --------------------------------


@pytest.mark.parametrize(
    ("texts", "first", "second"),
    [
        ([ASK, DONE + RIGHT], 0.5 + 0.5, 1.0),
        ([ASK, ASK, DONE + WRONG], 1.0, 0.0),
        ([DONE + RIGHT], 0.5, 1.0),  # nothing was searched
        ([ASK, DONE + "<answer> Marta Danes </answer>"], 1.0, 0.5),  # F1 2·1/(2+2)
        ([ASK, RIGHT], 0.5, 1.0 - 2.0),  # the thought stays open
        ([ASK, DONE + "Edda"], 0.5, -2.0),
        ([ASK, DONE + WRONG + " Done."], 0.5, -2.0),
        (["I give up."], 0.0, -2.0),
        ([], 0.0, -2.0),
    ],
)
def test_both_stages_pay_as_published(texts, first, second):
    assert both(*texts) == pytest.approx([first, second])


def test_the_parts_of_the_reward_are_told():
    segments = turns(ENV, ASK, DONE + RIGHT + RIGHT)
    one = scored(FIRST, *segments, searches=1)
    assert one.rewards == {"retrieval": 0.5, "format": 0, "total": 0.5}
    one = scored(RECIPE, *segments, searches=1)
    assert one.rewards == {"answer": 1, "format": -2, "total": -1}
    assert one.metrics == {"em": 1, "f1": 1, "cem": 1, "searches": 1, "well_formed": 0}


def test_the_published_numbers_are_fields():
    mild = R1Searcher(malformed_penalty=0.0)
    assert scored(mild, *turns(ENV, ASK, RIGHT)).rewards["total"] == 1
    first = R1Searcher(stage=1, retrieval_reward=0.2, format_reward=0.3)
    assert scored(first, *turns(ENV, ASK, DONE + RIGHT), searches=1).rewards["total"] == 0.5


@pytest.mark.parametrize(
    "texts",
    [
        [ASK, f"{DONE}{RIGHT}{RIGHT}"],  # two answers
        [ASK, f" {RIGHT}{DONE}{RIGHT}"],
        [ASK, f" {RIGHT}{DONE}"],  # the answer inside the thought
        [ASK, f"{DONE}{DONE}{RIGHT}"],  # two ends
        [f" so </think>{ASK}", DONE + RIGHT],
        [f" so </think>{ASK}", RIGHT],  # a search after the thought
        [ASK, f"<think>{DONE}{RIGHT}"],
        [ASK, f" {OPEN} x {DONE}{RIGHT}"],  # a query that was never asked
        [ASK, f"{DONE}<answer> {OPEN} Marta Velikov </answer>"],
        [f"{OPEN}{ASK}", DONE + RIGHT],
        [ASK, f" <|begin_of_documents|> Marta <|end_of_documents|>{DONE}{RIGHT}"],  # documents of its own
        [ASK, f"{DONE}Therefore {RIGHT}"],
        [ASK, f"{DONE}<answer> {'Marta ' * 11}</answer>"],  # more than ten words
    ],
)
def test_the_wrong_form_costs_two_points(texts):
    one = scored(RECIPE, *turns(ENV, *texts))
    assert one.rewards["format"] == -2 and one.rewards["total"] == one.metrics["f1"] - 2
    assert scored(FIRST, *turns(ENV, *texts)).rewards["format"] == 0


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        ([ASK, DONE + RIGHT], 0),
        ([ASK, f"{DONE}Therefore {RIGHT} Done."], 0),  # only counted, wherever it stands
        ([ASK, f"{DONE}{RIGHT}\nassistant: x"], -2),
        ([" The Assistant asks" + ASK, DONE + RIGHT], -2),
        ([ASK, f" 好{DONE}{RIGHT}"], -2),
        ([ASK, f"{DONE}{RIGHT}{RIGHT}"], -2),
        ([ASK, f"{DONE}<answer> {'Marta ' * 11}</answer>"], -2),
    ],
)
def test_the_released_form_is_counted_and_bars_other_dialogues(texts, form):
    released = R1Searcher(released_form=True)
    assert scored(released, *turns(ENV, *texts)).rewards["format"] == form
    documents = (ENVIRONMENT, "\n<|begin_of_documents|>\nAssistant 好\n<|end_of_documents|>\n")
    assert scored(released, (POLICY, ASK), documents, (POLICY, DONE + RIGHT)).rewards["format"] == 0


def test_the_released_f1_takes_yes_and_no_as_a_whole():
    question = dataclasses.replace(QUESTION, answers=("yes",))
    segments = turns(ENV, f"{DONE}<answer> yes he is </answer>")
    for rule, paid in (("rrl", 0.5), ("tiresrag-r1", 0.0)):
        one = scored(R1Searcher(answer_rule=rule), *segments, question=question)
        assert one.rewards["answer"] == paid and one.metrics["f1"] == 0.5


def test_ten_words_are_short_enough():
    assert scored(RECIPE, *turns(ENV, f"{DONE}<answer> {'Marta ' * 10}</answer>")).rewards["format"] == 0


def test_tags_in_prompt_and_documents_are_not_scored():
    found = f"\n<|begin_of_documents|>\n{OPEN} x {CLOSE}{DONE}{RIGHT}\n<|end_of_documents|>\n"
    segments = ((PROMPT, f"<think>{RIGHT}"), (POLICY, ASK), (ENVIRONMENT, found))
    one = scored(RECIPE, *segments, (POLICY, DONE + WRONG), searches=1)
    assert one.rewards == {"answer": 0, "format": 0, "total": 0} and one.answer == "Edda Tolvik"


def test_reinforce_plus_plus_starts_from_the_reward_itself():
    # Token by token: the objective takes the KL of each token from it and whitens it.
    many = [trajectory(group=g) for g in (0, 0, 1)]
    for one, total in zip(many, (1.0, -2.0, 0.5), strict=True):
        one.rewards["total"] = total
    np.testing.assert_array_equal(RECIPE.advantages(many), np.float32([1.0, -2.0, 0.5]))


# -- the expert, the card, wrong settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_earns_everything_in_both_stages(kind):
    wiki = generate("train", 0, 200)
    for item in wiki.questions(kind, 10, 0):
        shown = spoken(RECIPE.demonstrate(item, lambda query: wiki.passages[:2]))
        hops = len(item.plan.hops)
        found = [
            scored(recipe, *shown, question=item.question, searches=hops).rewards["total"]
            for recipe in (FIRST, RECIPE)
        ]
        assert found == [1, 1] and len(shown) == 2 * hops + 1


def test_its_card_brings_it_back_and_markers_with_it(tmp_path):
    changed = {"search": ("<<ask>>", "<</ask>>"), "max_searches": 4}
    with pytest.raises(UserError, match=r"environment\.search"):
        make_recipe("r1_searcher", {}, changed)
    changed["search"] = ("<|ask|>", "<|asked|>")
    recipe = make_recipe("r1_searcher", {"opening": "bare"}, changed)
    write_card(tmp_path, make_card(recipe, 1024, 2))
    assert read_card(tmp_path).make() == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opening": "chat"}, r"recipe\.opening='chat' is unknown; choose one of base, instruct, bare"),
        ({"stage": 3}, r"recipe\.stage=3 must be 1 .* or 2"),
        ({"malformed_penalty": -2.0}, r"recipe\.malformed_penalty=-2\.0 must be at least 0"),
        ({"longest_answer": 0}, r"recipe\.longest_answer=0 must be at least 1"),
        ({"answer_rule": "x"}, r"recipe\.answer_rule='x' is unknown"),
        ({"advantage": "x"}, r"recipe\.advantage='x' is unknown"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("r1_searcher", fields)
