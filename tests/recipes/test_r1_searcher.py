"""R1-Searcher: protocol, hand-computed rewards of both stages, format, and scripted expert."""

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
from tests.recipes.sample_episodes import QUESTION, as_segments, scored, trajectory, turns

RECIPE, FIRST = R1Searcher(), R1Searcher(stage=1)
ENV = RECIPE.environment
OPEN, CLOSE = "<|begin_of_query|>", "<|end_of_query|>"
ASK = f" hm {OPEN} Silver Harbour {CLOSE}"
RIGHT, WRONG = "<answer> Marta Velikov </answer>", "<answer> Edda Tolvik </answer>"
DONE = " so </think>\n"


def both(*texts, searches=None):
    """Return the total rewards of stage 1 and stage 2."""
    searches = max(0, len(texts) - 1) if searches is None else searches
    return [
        scored(recipe, *turns(ENV, *texts), searches=searches).rewards["total"] for recipe in (FIRST, RECIPE)
    ]


# -- protocol (begin/end_of_query and begin/end_of_documents markers, at most 8 searches) ------------------------------


def test_queries_and_documents_stand_between_the_published_markers():
    assert ENV.stops == (CLOSE,)
    assert ENV.step(Episode(QUESTION), ASK, CLOSE) == SearchFor("Silver Harbour")
    message = ENV.observe(Episode(QUESTION), None)
    assert (message.prefix, message.suffix) == ("\n<|begin_of_documents|>\n", "\n<|end_of_documents|>\n")


def test_at_most_eight_searches_are_made():
    episode = Episode(QUESTION)
    for episode.turn in range(9):
        action = ENV.step(episode, ASK, CLOSE)
        assert action == (SearchFor("Silver Harbour") if episode.turn < 8 else Finish("search_limit"))
        assert ENV.step(episode, DONE + RIGHT, EOS) == Finish("answer")


@pytest.mark.parametrize(("text", "stop"), [("hm", EOS), (f"x {CLOSE}", CLOSE), (f"{OPEN} {CLOSE}", CLOSE)])
def test_a_turn_without_search_and_answer_ends_the_episode(text, stop):
    assert ENV.step(Episode(QUESTION), text, stop) == Finish("no_action")


def test_every_prompt_opens_the_thought():
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


# -- rewards (stage 1 retrieval + format; stage 2 F1 with -2 on malformed output) --------------------------------------


@pytest.mark.parametrize(
    ("texts", "first", "second"),
    [
        ([ASK, DONE + RIGHT], 0.5 + 0.5, 1.0),
        ([ASK, ASK, DONE + WRONG], 1.0, 0.0),
        ([DONE + RIGHT], 0.5, 1.0),  # no search
        ([ASK, DONE + "<answer> Marta Danes </answer>"], 1.0, 0.5),  # F1 2·1/(2+2)
        ([ASK, RIGHT], 0.5, 1.0 - 2.0),  # unclosed thought
        ([ASK, DONE + "Edda"], 0.5, -2.0),
        ([ASK, DONE + WRONG + " Done."], 0.5, -2.0),
        (["I give up."], 0.0, -2.0),
        ([], 0.0, -2.0),
    ],
)
def test_rewards_of_both_stages(texts, first, second):
    assert both(*texts) == pytest.approx([first, second])


def test_reward_components_are_set():
    segments = turns(ENV, ASK, DONE + RIGHT + RIGHT)
    one = scored(FIRST, *segments, searches=1)
    assert one.rewards == {"retrieval": 0.5, "format": 0, "total": 0.5}
    one = scored(RECIPE, *segments, searches=1)
    assert one.rewards == {"answer": 1, "format": -2, "total": -1}
    assert one.metrics == {"em": 1, "f1": 1, "cem": 1, "searches": 1, "well_formed": 0}


def test_published_reward_values_are_fields():
    mild = R1Searcher(malformed_penalty=0.0)
    assert scored(mild, *turns(ENV, ASK, RIGHT)).rewards["total"] == 1
    first = R1Searcher(stage=1, retrieval_reward=0.2, format_reward=0.3)
    assert scored(first, *turns(ENV, ASK, DONE + RIGHT), searches=1).rewards["total"] == 0.5


@pytest.mark.parametrize(
    "texts",
    [
        [ASK, f"{DONE}{RIGHT}{RIGHT}"],  # two answers
        [ASK, f" {RIGHT}{DONE}{RIGHT}"],
        [ASK, f" {RIGHT}{DONE}"],  # answer inside the thought
        [ASK, f"{DONE}{DONE}{RIGHT}"],  # two closing tags
        [f" so </think>{ASK}", DONE + RIGHT],
        [f" so </think>{ASK}", RIGHT],  # search after the thought
        [ASK, f"<think>{DONE}{RIGHT}"],
        [ASK, f" {OPEN} x {DONE}{RIGHT}"],  # unclosed query
        [ASK, f"{DONE}<answer> {OPEN} Marta Velikov </answer>"],
        [f"{OPEN}{ASK}", DONE + RIGHT],
        [
            ASK,
            f" <|begin_of_documents|> Marta <|end_of_documents|>{DONE}{RIGHT}",
        ],  # documents written by the policy
        [ASK, f"{DONE}Therefore {RIGHT}"],
        [ASK, f"{DONE}<answer> {'Marta ' * 11}</answer>"],  # more than ten words
    ],
)
def test_a_wrong_format_costs_two_points(texts):
    one = scored(RECIPE, *turns(ENV, *texts))
    assert one.rewards["format"] == -2 and one.rewards["total"] == one.metrics["f1"] - 2
    assert scored(FIRST, *turns(ENV, *texts)).rewards["format"] == 0


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        ([ASK, DONE + RIGHT], 0),
        ([ASK, f"{DONE}Therefore {RIGHT} Done."], 0),  # tags are counted, their position is ignored
        ([ASK, f"{DONE}{RIGHT}\nassistant: x"], -2),
        ([" The Assistant asks" + ASK, DONE + RIGHT], -2),
        ([ASK, f" 好{DONE}{RIGHT}"], -2),
        ([ASK, f"{DONE}{RIGHT}{RIGHT}"], -2),
        ([ASK, f"{DONE}<answer> {'Marta ' * 11}</answer>"], -2),
    ],
)
def test_released_format_counts_tags_and_rejects_foreign_dialogue(texts, form):
    released = R1Searcher(released_form=True)
    assert scored(released, *turns(ENV, *texts)).rewards["format"] == form
    documents = (ENVIRONMENT, "\n<|begin_of_documents|>\nAssistant 好\n<|end_of_documents|>\n")
    assert scored(released, (POLICY, ASK), documents, (POLICY, DONE + RIGHT)).rewards["format"] == 0


def test_released_f1_matches_yes_and_no_as_a_whole():
    question = dataclasses.replace(QUESTION, answers=("yes",))
    segments = turns(ENV, f"{DONE}<answer> yes he is </answer>")
    for rule, paid in (("rrl", 0.5), ("tiresrag-r1", 0.0)):
        one = scored(R1Searcher(answer_rule=rule), *segments, question=question)
        assert one.rewards["answer"] == paid and one.metrics["f1"] == 0.5


def test_an_answer_of_ten_words_is_short_enough():
    assert scored(RECIPE, *turns(ENV, f"{DONE}<answer> {'Marta ' * 10}</answer>")).rewards["format"] == 0


def test_tags_in_prompt_and_documents_are_not_scored():
    found = f"\n<|begin_of_documents|>\n{OPEN} x {CLOSE}{DONE}{RIGHT}\n<|end_of_documents|>\n"
    segments = ((PROMPT, f"<think>{RIGHT}"), (POLICY, ASK), (ENVIRONMENT, found))
    one = scored(RECIPE, *segments, (POLICY, DONE + WRONG), searches=1)
    assert one.rewards == {"answer": 0, "format": 0, "total": 0} and one.answer == "Edda Tolvik"


def test_reinforce_plus_plus_advantage_is_the_reward():
    # The objective subtracts the KL of each token and whitens.
    many = [trajectory(group=g) for g in (0, 0, 1)]
    for one, total in zip(many, (1.0, -2.0, 0.5), strict=True):
        one.rewards["total"] = total
    np.testing.assert_array_equal(RECIPE.advantages(many), np.float32([1.0, -2.0, 0.5]))


# -- expert, card, wrong fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_expert_earns_the_full_reward_in_both_stages(kind):
    wiki = generate("train", 0, 200)
    for item in wiki.questions(kind, 10, 0):
        shown = as_segments(RECIPE.demonstrate(item, lambda query: wiki.passages[:2]))
        hops = len(item.plan.hops)
        found = [
            scored(recipe, *shown, question=item.question, searches=hops).rewards["total"]
            for recipe in (FIRST, RECIPE)
        ]
        assert found == [1, 1] and len(shown) == 2 * hops + 1


def test_recipe_and_markers_are_restored_from_the_card(tmp_path):
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
