r"""ReSearch: protocol, hand-computed rewards, \boxed{}, format, and scripted expert."""

import dataclasses

import pytest

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.recipes.base import uses_chat
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.research import INSTRUCTION, ReSearch, last_boxed
from rrl.rollout.protocol import CONTEXT, EOS, Episode, Finish, SearchFor
from tests.recipes.sample_episodes import QUESTION, as_segments, scored, turns

RECIPE = ReSearch()
ENV = RECIPE.environment
ASK = "<think> hm </think> <search> Silver Harbour </search>"
THINK = "<think> so </think> "
RIGHT = "<answer> It is \\boxed{Marta Velikov} </answer>"


def answered(answer):
    return f"{THINK}<answer> \\boxed{{{answer}}} </answer>"


def earned(*texts, recipe=RECIPE):
    return scored(recipe, *turns(ENV, *texts)).rewards["total"]


# -- protocol (<think> <search> <result> <answer>, one 8,192-token budget) ---------------------------------------------


def test_the_token_budget_is_the_only_limit():
    assert (ENV.turn_tokens, ENV.observation_tokens, ENV.stops) == (8192, 8192, ("</search>",))
    episode = Episode(QUESTION)
    for episode.turn in (0, 9, 500):
        assert ENV.step(episode, ASK, "</search>") == SearchFor("Silver Harbour")
    assert ENV.step(episode, answered("x"), EOS) == Finish("answer")
    assert ENV.step(episode, ASK, CONTEXT) == Finish("context_limit")
    message = ENV.observe(episode, None)
    assert (message.prefix, message.suffix) == ("\n<result>\n", "\n</result>\n")
    assert ENV.overflow(episode, message, 9000) == Finish("context_limit")


def test_a_turn_without_search_and_answer_ends_the_episode():
    assert ENV.step(Episode(QUESTION), "I am not sure.", EOS) == Finish("no_action")
    assert ENV.step(Episode(QUESTION), "x </search>", "</search>") == Finish("no_action")


def test_prompts_for_instruct_base_and_small_models():
    instruct, base, bare = (ReSearch(opening=o).prompt(QUESTION) for o in ("instruct", "base", "bare"))
    assert (instruct.system, instruct.user_message) == (INSTRUCTION, QUESTION.text)
    assert base.user_message == f"{INSTRUCTION}\n\nUser: {QUESTION.text}\nAssistant:" and not base.system
    assert bare.user_message == QUESTION.text and not bare.system and not bare.prefill
    assert [uses_chat(ReSearch(opening=o)) for o in ("instruct", "base", "bare")] == [True, False, True]
    for part in ("<think>", "<search>", "<result>", "<answer>", "\\boxed{}"):
        assert part in INSTRUCTION


# -- reward (malformed 0, F1 = 0 but well-formed 0.1, else F1) ---------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "reward", "parts"),
    [
        ([ASK, THINK + RIGHT], 1.0, (1, 0)),
        ([THINK + RIGHT], 1.0, (1, 0)),
        ([ASK, answered("Marta Danes")], 0.5, (0.5, 0)),  # 2·1/(2+2)
        ([ASK, answered("Marta")], 2 / 3, (2 / 3, 0)),  # 2·1/(1+2)
        ([ASK, answered("Edda Tolvik")], 0.1, (0, 0.1)),
        ([ASK, answered("")], 0.1, (0, 0.1)),
        ([ASK, RIGHT], 1.0, (1, 0)),  # only the first turn has a thought
        ([RIGHT], 0.0, (0, 0)),
        ([], 0.0, (0, 0)),
    ],
)
def test_reward_is_f1_or_a_small_format_reward(texts, reward, parts):
    one = scored(RECIPE, *turns(ENV, *texts))
    assert one.rewards == pytest.approx(dict(zip(("answer", "format", "total"), (*parts, reward))))
    assert one.metrics["well_formed"] == (reward > 0)


def test_released_f1_matches_yes_and_no_as_a_whole():
    question = dataclasses.replace(QUESTION, answers=("no",))
    for rule, paid in (("rrl", 0.5), ("hotpotqa", 0.0)):
        one = scored(ReSearch(answer_rule=rule), *turns(ENV, answered("no he isnt")), question=question)
        assert one.rewards["answer"] == paid and one.metrics["f1"] == 0.5


MALFORMED = [
    [ASK, f"<think> so {RIGHT}"],  # unclosed thought
    [ASK, f"</think>{RIGHT}<think>"],  # tags in the wrong order
    [ASK, THINK + RIGHT + RIGHT],  # two answers
    [ASK, f"{THINK}{RIGHT}<answer>"],
    [
        ASK,
        f"{THINK}<answer> Marta Velikov </answer> \\boxed{{Marta Velikov}}",
    ],  # \\boxed{} outside the answer
    [ASK, f"{THINK}<answer> \\boxed{{Marta Velikov </answer>"],  # unclosed brace
    [ASK, f"{THINK}<search> x {RIGHT}"],  # unclosed search
    [ASK, f"{THINK}<result> x </result>{RIGHT}"],  # result written by the policy
    [f"{THINK}<search> a <search> b </search>", THINK + RIGHT],
    [THINK + RIGHT + ASK, "done"],  # answer not in the last turn
    [ASK, ASK],
]


@pytest.mark.parametrize("texts", MALFORMED)
def test_a_wrong_format_earns_zero(texts):
    assert earned(*texts) == 0


@pytest.mark.parametrize("texts", MALFORMED)
def test_equation_2_as_printed_pays_f1_in_any_format(texts):
    assert earned(*texts, recipe=ReSearch(pay_malformed=True)) == pytest.approx(
        float("\\boxed{Marta Velikov}" in texts[-1].partition("</answer>")[0] or RIGHT in "".join(texts))
    )


def test_tags_in_prompt_and_results_are_not_scored():
    found = f"\n<result>\n{THINK}{RIGHT}</result>\n</result>\n"
    segments = ((PROMPT, THINK + RIGHT), (POLICY, ASK), (ENVIRONMENT, found), (POLICY, "I give up."))
    one = scored(RECIPE, *segments, searches=1)
    assert one.rewards["total"] == 0 and one.answer == ""
    one = scored(RECIPE, *segments[:-1], (POLICY, answered("Edda")), searches=1)
    assert one.rewards["total"] == 0.1 and one.metrics["searches"] == 1


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("\\boxed{a}", "a"),
        ("so \\boxed{ a } or \\boxed{b}.", "b"),
        ("\\boxed{\\text{a {b}} c} d}", "\\text{a {b}} c"),
        ("\\boxed{}", ""),
        ("\\boxed{a", None),
        ("\\boxed a", None),
        ("boxed{a}", None),
        ("", None),
    ],
)
def test_last_boxed_matches_braces(text, inner):
    assert last_boxed(text) == inner


# -- expert, card, wrong fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_expert_earns_the_full_reward(kind):
    wiki = generate("train", 0, 200)
    for item in wiki.questions(kind, 10, 0):
        shown = as_segments(RECIPE.demonstrate(item, lambda query: wiki.passages[:2]))
        one = scored(RECIPE, *shown, question=item.question)
        assert one.rewards == {"answer": 1, "format": 0, "total": 1} and one.metrics["em"] == 1
        assert len(shown) == 2 * len(item.plan.hops) + 1


def test_recipe_is_restored_from_its_card(tmp_path):
    recipe = make_recipe("research", {"opening": "bare"}, {"max_searches": 4, "turn_tokens": 128})
    write_card(tmp_path, make_card(recipe, 1024, 2))
    assert read_card(tmp_path).make() == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opening": "chat"}, r"recipe\.opening='chat' is unknown; choose one of instruct, base, bare"),
        ({"format_reward": -1.0}, r"recipe\.format_reward=-1\.0 must be at least 0"),
        ({"advantage": "x"}, r"recipe\.advantage='x' is unknown"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("research", fields)
