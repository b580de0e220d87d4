"""Properties of all recipes: an opened `<think>` belongs to the policy's text, and no tag may be a special token."""

import dataclasses

import pytest

from rrl.data.trajectory import PROMPT
from rrl.errors import UserError
from rrl.models.tokenizer import load_tokenizer
from rrl.recipes.base import check_tags
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.r1_searcher import R1Searcher
from rrl.recipes.r2ag import R2AG, R2AGEnvironment
from rrl.recipes.research import ReSearch
from rrl.recipes.search_r1 import SearchR1
from rrl.rewards.transcript import transcript_of
from tests.recipes.sample_episodes import scored, trajectory, turns

OPENED = (PROMPT, "system\nuser\nWho directed Silver Harbour?\nassistant\n<think>\n")
PLAIN = (PROMPT, "system\nuser\nWho directed Silver Harbour?\nassistant\n")
THOUGHT = "I need its director. </think>"
BOXED = "<answer> \\boxed{Marta Velikov} </answer>"
PLAINLY = "<answer> Marta Velikov </answer>"
QUERY = "<search> Silver Harbour </search>"


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [
        (SearchR1(), (f"{THOUGHT} {QUERY}", f"<think> It is her. </think> {PLAINLY}")),
        (ReSearch(), (f"{THOUGHT} {QUERY}", f"<think> It is her. </think> {BOXED}")),
    ],
)
def test_think_tag_from_the_chat_template_is_part_of_the_format(recipe, texts):
    segments = turns(recipe.environment, *texts)
    assert scored(recipe, OPENED, *segments, searches=1).metrics["well_formed"] == 1
    assert scored(recipe, PLAIN, *segments, searches=1).metrics["well_formed"] == 0
    whole = [(role, f"<think>\n{text}" if text == texts[0] else text) for role, text in segments]
    assert scored(recipe, PLAIN, *whole, searches=1).metrics["well_formed"] == 1
    assert scored(recipe, OPENED, *whole, searches=1).metrics["well_formed"] == 0, "two opening tags"


def test_think_tag_from_prefill_or_template_is_counted_once():
    recipe = R1Searcher()
    begin, end = recipe.environment.search
    segments = turns(recipe.environment, f"I search. {begin} it {end}", f"So. </think>\n{PLAINLY}")
    for prompt in (OPENED, (PROMPT, "Assistant: <think>")):
        assert scored(recipe, prompt, *segments, searches=1).metrics["well_formed"] == 1


def test_transcript_has_the_opened_think_tag_in_every_context():
    one = trajectory(OPENED, *turns(ReSearch().environment, "first", "more"), OPENED, (1, "second"))
    assert [text for role, text in transcript_of(one, "answer").segments if role == 1] == [
        "<think>\nfirst",
        "more",
        "<think>\nsecond",
    ]
    assert one.response == ["<think>\nfirst", "more", "<think>\nsecond"]
    assert one.sampled_texts == ["first", "more", "second"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_tag_that_is_a_special_token_is_refused(name):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    recipe = make_recipe(name)
    check_tags(recipe, tokenizer)
    for tag in [*recipe.tags, *recipe.environment.tags]:
        marker = tag[0] if isinstance(tag, tuple) else f"</{tag}>"
        other = load_tokenizer("assets/miniwiki-tokenizer")
        other.add_special_tokens({"additional_special_tokens": [marker]})
        with pytest.raises(UserError, match=r"is a special token of the tokenizer .*choose another tag"):
            check_tags(recipe, other)


def test_a_declared_tag_of_a_users_environment_is_checked():
    @dataclasses.dataclass(frozen=True)
    class Calculator(R2AGEnvironment):  # not a `Stream`
        tags = ("result",)

    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    recipe = R2AG(environment=Calculator())
    check_tags(recipe, tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<result>"]})
    check_tags(R2AG(), tokenizer)
    with pytest.raises(UserError, match="the tag '<result>' of the recipe would never be recognised"):
        check_tags(recipe, tokenizer)


@pytest.mark.parametrize("name", ["search_r1", "r1_searcher", "tiresrag"])
def test_a_think_tag_that_is_a_special_token_is_refused(name):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    with pytest.raises(UserError, match="'</think>' of the recipe would never be recognised"):
        check_tags(make_recipe(name), tokenizer)
