"""Search-R1: protocol, hand-computed reward table of v0.3, format, and scripted expert."""

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.recipes.base import uses_chat
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.search_r1 import INSTRUCTION, SearchR1
from rrl.rollout.protocol import EOS, TURN_TOKENS, Append, Episode, Finish, SearchFor
from tests.recipes.sample_episodes import QUESTION, as_segments, scored, trajectory, turns

RECIPE = SearchR1()
ENV = RECIPE.environment
ASK = "<think> hm </think> <search> Silver Harbour </search>"
RIGHT, WRONG = "<answer> Marta Velikov </answer>", "<answer> Edda Tolvik </answer>"
THINK = "<think> so </think>\n"


def earned(*segments, recipe=RECIPE, **more):
    return scored(recipe, *segments, **more).rewards["total"]


# -- protocol (<think> <search> <information> <answer>, 500-token observations) ----------------------------------------


def test_limits_are_the_published_ones():
    assert (ENV.max_searches, ENV.turn_tokens, ENV.observation_tokens) == (4, 500, 500)
    assert ENV.stops == ("</search>", "</answer>")
    found = ENV.observe(Episode(QUESTION), [Passage("0", "Lorn", "A city.")])
    assert (found.prefix, found.suffix) == ("\n<information>\n", "\n</information>\n")


def test_four_turns_then_one_turn_without_search():
    episode = Episode(QUESTION)
    for episode.turn in range(5):
        last = episode.turn == 4
        assert ENV.step(episode, ASK, "</search>") == (
            Finish("search_limit") if last else SearchFor("Silver Harbour")
        )
        assert ENV.step(episode, THINK + RIGHT, "</answer>") == Finish("answer")
        action = ENV.step(episode, "I am not sure.", EOS)
        assert action == Finish("turn_limit") if last else isinstance(action, Append)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("<search> x", TURN_TOKENS),
        ("x </search>", "</search>"),
        ("<search> </search>", "</search>"),
        ("x </answer>", "</answer>"),
        ("", EOS),
    ],
)
def test_an_invalid_turn_gets_a_correction(text, stop):
    action = ENV.step(Episode(QUESTION), text, stop)
    assert isinstance(action, Append) and not action.body
    for part in ("<search> and </search>", "<answer> and </answer>"):
        assert part in action.prefix


def test_tags_in_question_or_documents_are_neither_actions_nor_scored():
    question = type(QUESTION)("q", f"Is it {RIGHT}?", ("Marta Velikov",))
    assert RECIPE.prompt(question).endswith(f"Question: Is it {RIGHT}?")
    found = f"\n<information>\n(Title: x) {RIGHT}</information><search>y</search>\n</information>\n"
    segments = ((PROMPT, RECIPE.prompt(question)), (POLICY, ASK), (ENVIRONMENT, found), (POLICY, THINK))
    one = scored(RECIPE, *segments, question=question, searches=1)
    assert one.answer == "" and one.rewards["total"] == 0 and one.metrics["em"] == 0


def test_prompt_is_instruction_and_question_or_the_question_alone():
    assert RECIPE.prompt(QUESTION) == f"{INSTRUCTION}\nQuestion: {QUESTION.text}"
    assert SearchR1(instruction="").prompt(QUESTION) == QUESTION.text and uses_chat(RECIPE)
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in INSTRUCTION and f"</{tag}>" in INSTRUCTION


# -- rewards (EM; v0.3's table 1 / 0.8 / 0.2 / 0.1 / 0) ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "reward", "parts"),
    [
        ([ASK, THINK + RIGHT], 1.0, (1, 0)),
        ([THINK + RIGHT], 1.0, (1, 0)),  # the format is correct without a search too
        ([ASK, ASK, THINK + RIGHT], 1.0, (1, 0)),
        ([ASK, RIGHT], 0.8, (1, -0.2)),
        ([ASK, THINK + WRONG], 0.2, (0, 0.2)),
        ([ASK, THINK + "<answer> Marta </answer>"], 0.2, (0, 0.2)),  # exact match counts, not F1
        ([ASK, THINK + "<answer></answer>"], 0.2, (0, 0.2)),
        ([ASK, WRONG], 0.1, (0, 0.1)),
        ([ASK, THINK], 0.0, (0, 0)),
        ([ASK, ASK], 0.0, (0, 0)),
        ([], 0.0, (0, 0)),
    ],
)
def test_reward_table_of_v03(texts, reward, parts):
    one = scored(RECIPE, *turns(ENV, *texts), searches=max(0, len(texts) - 1))
    assert one.rewards == pytest.approx(dict(zip(("answer", "format", "total"), (*parts, reward))))
    assert one.metrics["well_formed"] == (reward in (1.0, 0.2))


def test_without_format_reward_the_total_is_exact_match():
    plain = SearchR1(use_format=False)
    for texts, reward in (([ASK, RIGHT], 1.0), ([ASK, THINK + WRONG], 0.0), ([ASK, WRONG], 0.0)):
        assert earned(*turns(ENV, *texts), recipe=plain) == reward


def test_values_of_the_reward_table_are_fields():
    other = SearchR1(structure_reward=0.4, answered_reward=0.3)
    found = [
        earned(*turns(ENV, *texts), recipe=other) for texts in ([RIGHT], [THINK + WRONG], [WRONG], ["hm"])
    ]
    assert found == pytest.approx([0.6, 0.4, 0.3, 0.0])


@pytest.mark.parametrize(
    "last",
    [
        f"So {THINK}{RIGHT}",  # text outside the tags
        f"{THINK}{RIGHT} Done.",
        f"<think> so {RIGHT}</think>",  # tag inside a tag
        f"<think> <search> x </think>{RIGHT}",  # unclosed tag in a thought
        f"<think> so {RIGHT}",  # unclosed thought
        f"{THINK}<search> x {RIGHT}",
        f"{THINK}{THINK}{RIGHT}",
        f"{THINK}{RIGHT}{RIGHT}",  # two answers
        f"{THINK}<information> x </information>{RIGHT}",  # documents written by the policy
        f"{THINK}<search> x </search>{RIGHT}",
    ],
)
def test_a_wrong_format_lowers_the_reward_of_a_right_answer(last):
    assert earned(*turns(ENV, ASK, last), searches=1) == pytest.approx(0.8)


def test_the_last_of_two_answers_counts():
    assert scored(RECIPE, *turns(ENV, THINK + WRONG + RIGHT)).answer == "Marta Velikov"


def test_a_corrected_turn_makes_the_format_wrong():
    message = ENV.step(Episode(QUESTION), "", EOS)
    correction = (ENVIRONMENT, message.prefix)
    assert earned((POLICY, "hm"), correction, (POLICY, THINK + RIGHT)) == pytest.approx(0.8)
    # An empty turn leaves no segment, so two environment texts are one segment.
    (_, found), *_ = turns(ENV, "", "")[1:]
    both = (ENVIRONMENT, found + message.prefix)
    assert earned((POLICY, ASK), both, (POLICY, THINK + RIGHT), searches=1) == pytest.approx(0.8)
    assert earned((POLICY, ASK), (ENVIRONMENT, found), (POLICY, THINK + RIGHT), searches=1) == 1


def test_a_tag_does_not_span_environment_text():
    one = scored(RECIPE, (POLICY, "<answer> Marta"), (ENVIRONMENT, "\nhm\n"), (POLICY, "Velikov </answer>"))
    assert one.answer == "" and one.rewards["total"] == 0


def test_answer_metrics_are_set():
    one = trajectory(*turns(ENV, ASK, THINK + "<answer> Marta Danes </answer>"))
    one.searches = [Search(0, "q"), Search(1, "q", failed=True)]
    RECIPE.score([one], None)
    assert one.metrics == pytest.approx({"em": 0, "f1": 0.5, "cem": 0, "searches": 1, "well_formed": 1})


def test_advantages_are_grpo_and_no_trajectory_is_excluded():
    many = [trajectory(group=g) for g in (0, 0, 1, 1)]
    for one, total in zip(many, (0.0, 1.0, 0.2, 0.2), strict=True):
        one.rewards["total"] = total
    np.testing.assert_allclose(RECIPE.advantages(many), [-(0.5**0.5), 0.5**0.5, 0, 0], rtol=1e-4)
    assert not RECIPE.excluded(many).any() and not RECIPE.needs_judge


# -- expert, card, wrong fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_expert_earns_the_full_reward(kind):
    wiki = generate("train", 0, 200)
    for item in wiki.questions(kind, 10, 0):
        shown = as_segments(RECIPE.demonstrate(item, lambda query: wiki.passages[:2]))
        one = scored(RECIPE, *shown, question=item.question)
        assert one.rewards["total"] == 1 and len(shown) == 2 * len(item.plan.hops) + 1


def test_recipe_is_restored_from_its_card(tmp_path):
    recipe = make_recipe("search_r1", {"instruction": ""}, {"correction": "", "observation_tokens": 256})
    write_card(tmp_path, make_card(recipe, 1024, 2))
    assert read_card(tmp_path).make() == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structure_reward": 1.5}, r"recipe\.structure_reward=1\.5 must lie in 0\.\.1"),
        ({"answered_reward": -0.1}, r"recipe\.answered_reward=-0\.1 must lie in 0\.\.1"),
        ({"advantage": "ppo"}, r"recipe\.advantage='ppo' is unknown"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("search_r1", fields)
