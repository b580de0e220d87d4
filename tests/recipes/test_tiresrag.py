"""TIRESRAG-R1, equation by equation: protocol, rewards, schedule, advantages, ablations, and scripted expert."""

import hashlib
import math
import types

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.miniwiki.experts.tiresrag import early_answer
from rrl.recipes.base import ScoringContext, uses_chat
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.tiresrag import BASE_PROMPT, INSTRUCT_PROMPT, TiresRag, answer_reward, reflect_reward
from rrl.recipes.tiresrag_shaping import consistency_penalty, difficulty_weight
from rrl.rewards.judge_prompts import Sufficiency, Thinking
from rrl.rl.advantages import group_normalize
from rrl.rollout.protocol import EOS, TURN_TOKENS, Append, Episode, Finish, SearchFor
from rrl.text.metrics import token_f1
from rrl.text.spans import tag_contents

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",), gold=("Silver Harbour",))
WRONG, RIGHT = "<answer>Edda Tolvik</answer>", "<answer> It is Marta Velikov </answer>"


def trajectory(*segments, group=0, question=QUESTION, titles=("Silver Harbour",)):
    none = np.zeros(0)
    arrays = (none, none, none, none, none)
    return Trajectory(question, 0, group, *arrays, list(segments), [Search(0, "q", titles)], "answer")


class StubJudge:
    """A judge that returns these scores and records the prompts."""

    def __init__(self, sufficient=0.0, thinking=0.0):
        self.scores, self.asked = {Sufficiency: sufficient, Thinking: thinking}, []

    def grade(self, cases):
        self.asked += cases
        return [self.scores[type(case)] for case in cases]


def scored(*segments, recipe=None, judge=None, step=0, steps=0, **more):
    one = trajectory(*segments, **more)
    (recipe or TiresRag()).score([one], ScoringContext(judge=judge or StubJudge(), step=step, steps=steps))
    return one


# -- protocol (4.1, Figures 9 and 10) ----------------------------------------------------------------------------------


def test_a_turn_ends_at_a_search_or_after_512_tokens_but_not_at_an_answer():
    environment = TiresRag().environment
    assert environment.stops == ("</search>",)
    assert (environment.turn_tokens, environment.max_searches) == (512, 8)
    episode = Episode(QUESTION)
    again = "so.</think><answer>x</answer><think>Sure?</think><search> Silver Harbour </search>"
    assert environment.step(episode, again, "</search>") == SearchFor("Silver Harbour")
    assert environment.step(episode, "<answer>x</answer> and more", EOS) == Finish("answer")
    assert environment.step(episode, "<answer>x</answer> and more", TURN_TOKENS) == Finish("answer")
    assert environment.step(episode, "nothing", EOS) == Finish("no_action")


def test_at_most_eight_searches_and_one_turn_without_search():
    environment, episode = TiresRag().environment, Episode(QUESTION)
    for episode.turn in range(9):
        action = environment.step(episode, "<search>a</search>", "</search>")
        assert action == (SearchFor("a") if episode.turn < 8 else Finish("search_limit"))


def test_documents_stand_between_information_tags():
    message = TiresRag().environment.observe(Episode(QUESTION), generate("train", 0, 50).passages[:5])
    assert message.prefix == "\n<information>\n" and message.suffix == "\n</information>\n"
    assert message.body.count("(Title:") == 5


def test_every_prompt_opens_the_thought():
    instruct, base, bare = (TiresRag(opening=o).prompt(QUESTION) for o in ("instruct", "base", "bare"))
    assert instruct.prefill == base.prefill == bare.prefill == "<think>"
    assert (instruct.system, instruct.user_message) == (INSTRUCT_PROMPT, QUESTION.text)
    assert base.user_message.startswith(BASE_PROMPT) and base.user_message.endswith(
        f"Question:{QUESTION.text}\n\n"
    )
    assert not base.system and not bare.system and bare.user_message == QUESTION.text
    assert [uses_chat(TiresRag(opening=o)) for o in ("instruct", "base", "bare")] == [True, False, True]


def test_prompts_are_figures_9_and_10():
    for phrase in (
        "You must reason **clearly and completely** inside <think> and </think> before providing any final answer.",
        "you may use <search>your query</search>, and the top search results will be returned between <information> and "
        "</information>.",
        "When reasoning, you must ensure your reasoning path aligns strictly with the evidence.",
        "you have one chance to reflect on the answer. If you choose not to reflect, nothing further needs to be done.",
    ):
        assert phrase in INSTRUCT_PROMPT and phrase in BASE_PROMPT
    assert INSTRUCT_PROMPT.startswith("You are a helpful assistant. Answer the given question.")
    assert (
        "give the final answer inside <answer> and </answer>. For example, <answer>Beijing</answer>."
        in INSTRUCT_PROMPT
    )
    assert BASE_PROMPT.startswith("Answer the given question.")
    assert (
        "give the final answer inside <answer> </answer>. For example, <answer> Beijing </answer>."
        in BASE_PROMPT
    )
    # all words: sha256 of the figures with single spaces
    words = [" ".join(text.split()).encode() for text in (INSTRUCT_PROMPT, BASE_PROMPT)]
    assert [hashlib.sha256(text).hexdigest()[:16] for text in words] == [
        "15eef720dd1c8d04",
        "0c6b4febeba1b822",
    ]


# -- answer (Eq. 1; yes and no, punctuation) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("Marta Danes", "Marta Velikov", 0.5),
        ("yes", "yes", 1.0),
        ("Yes.", "yes", 1.0),
        ("yes it is", "yes", 0.0),  # 2/3 under SQuAD's rule
        ("no", "no one", 0.0),
        ("noanswer", "noanswer given", 0.0),
        ("Jean-Luc", "Jean Luc", 1.0),  # 0 if punctuation is deleted
        ("the U.S.", "US", 0.0),  # 1 if it is deleted
        ("", "Marta", 0.0),
    ],
)
def test_answer_f1_matches_yes_and_no_as_a_whole_and_splits_at_punctuation(answer, gold, reward):
    assert answer_reward(answer, (gold,)) == pytest.approx(reward)


def test_answer_f1_is_the_maximum_over_gold_answers():
    assert answer_reward("no", ("yes", "no")) == 1.0
    assert token_f1("yes it is", ("yes",)) > 0  # the default metric has no such rule


def test_the_last_answer_counts():
    one = scored((POLICY, f"{WRONG}<think>no</think>{RIGHT}"))
    assert one.answer == "It is Marta Velikov"
    assert one.rewards["answer"] == pytest.approx(2 * 2 / (4 + 2))
    assert one.metrics["cem"] == 1 and one.metrics["reflected"] == 1


def test_only_policy_text_is_scored():
    one = scored((PROMPT, RIGHT), (POLICY, "<answer>x</answer>"), (ENVIRONMENT, RIGHT), (POLICY, "</think>"))
    assert one.answer == "x" and one.rewards["answer"] == 0 and one.metrics["reflected"] == 0


# -- reflection (Eq. 4; the released table is a field) -----------------------------------------------------------------

GOOD, BETTER, BAD = "Marta Velikov of Oslo", "Marta Velikov", "Edda Tolvik"


@pytest.mark.parametrize(
    ("answers", "paper", "released"),
    [
        ([], 0, 0),
        ([BETTER], 0, 0),
        ([BAD], 0, -1),
        ([BAD, BETTER], 1, 0),
        ([BETTER, BAD], -1, -1),
        ([BAD, BAD], 0, -1),
        ([GOOD, BETTER], 0, 0),
        ([BETTER, GOOD], 0, -1),
        ([BAD, BETTER, BAD], 0, -1),  # compares the first and the last
        ([BAD, BAD, BETTER], 1, 0),
    ],
)
def test_reflection_reward_of_equation_4_and_of_the_released_table(answers, paper, released):
    assert reflect_reward(answers, QUESTION.answers) == paper
    assert reflect_reward(answers, QUESTION.answers, "released") == released
    text = "".join(f"<answer>{answer}</answer>" for answer in answers)
    for table, reward in (("paper", paper), ("released", released)):
        recipe = TiresRag(reflect_table=table)
        assert scored((POLICY, text), recipe=recipe).rewards["reflect"] == reward


# -- judged rewards (Eqs. 2 and 3) and the sum (Eq. 5) -----------------------------------------------------------------


def test_judge_prompts_show_reasoning_and_documents_but_no_predicted_answer():
    judge = StubJudge()
    scored(
        (PROMPT, "the prompt <think>"),
        (POLICY, f"First.</think>{WRONG}<search>a</search>"),
        (ENVIRONMENT, "\n<information>\nfound\n</information>\n"),
        (POLICY, f"<think>Second.</think>{RIGHT}"),
        judge=judge,
    )
    sufficiency, thinking = judge.asked
    assert sufficiency.prompt.body == (
        "<think>First.</think><search>a</search>\n<information>\nfound\n</information>\n<think>Second.</think>"
    )
    assert "Velikov" in sufficiency.prompt.before and sufficiency.transcript.titles == ("Silver Harbour",)
    assert "Velikov" not in thinking.prompt.user_message and "the prompt" not in thinking.prompt.user_message


def test_total_has_the_papers_weights():
    # Eq. 5 with w_t 0.6, w_s 0.3, w_r 0.3 (C.1): 4/6 + 1·(0.6·0.7 + 0.3·1 + 0.3·1)
    one = scored((POLICY, WRONG + RIGHT), judge=StubJudge(sufficient=1.0, thinking=0.7))
    assert one.rewards == pytest.approx(
        {"answer": 2 / 3, "sufficient": 1, "thinking": 0.7, "reflect": 1, "total": 2 / 3 + 1.02}
    )
    assert one.metrics["sufficient"] == 1 and one.metrics["thinking"] == 0.7


@pytest.mark.parametrize(("step", "weight"), [(0, 0.999877), (50, 0.982014), (90, 0.5), (100, 0.268941)])
def test_auxiliary_rewards_fade_during_the_run(step, weight):
    # a_t of section 4.3 at T = 100
    one = scored((POLICY, BAD), judge=StubJudge(1.0, 0.5), step=step, steps=100)
    assert one.rewards["total"] == pytest.approx(weight * 0.6, abs=1e-6)
    assert one.metrics["auxiliary_weight"] == pytest.approx(weight, abs=1e-6)


def test_unparsed_judge_replies_count_zero_and_are_counted():
    one = scored((POLICY, RIGHT), judge=StubJudge(sufficient=None, thinking=0.5))
    assert one.rewards["sufficient"] == 0 and one.rewards["thinking"] == 0.5
    assert one.metrics["judge_unread"] == 1
    assert scored((POLICY, RIGHT), judge=StubJudge(None, None)).metrics["judge_unread"] == 2
    assert scored((POLICY, RIGHT)).metrics["judge_unread"] == 0


def test_all_trajectories_are_judged_in_one_call():
    calls = []
    judge = types.SimpleNamespace(grade=lambda cases: calls.append(len(cases)) or [1.0] * len(cases))
    TiresRag().score([trajectory((POLICY, RIGHT)) for _ in range(5)], ScoringContext(judge=judge))
    assert calls == [10]


def test_without_a_judge_only_answer_and_reflection_pay():
    one = trajectory((POLICY, WRONG + RIGHT))
    TiresRag().score([one], ScoringContext())
    assert one.rewards["total"] == pytest.approx(2 / 3 + 0.3) and "judge_unread" not in one.metrics


# -- advantages (4.4, Algorithm 1) -------------------------------------------------------------------------------------

ANSWERS = [[1.0, 0.0, 0.5, 0.2], [1.0, 1.0, 0.95, 0.9], [0.0, 0.0, 0.1, 0.0], [0.0, 1.0, 1.0, 1.0]]
THINKING = [[0.2, 0.9, 0.5, 0.1], [0.5, 0.5, 0.4, 0.2], [0.1, 0.2, 0.3, 0.4], [0.9, 0.3, 0.2, 0.6]]
SUFFICIENT = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
GROUPS = np.repeat([3, 1, 7, 4], 4)


def batch():
    many = []
    for place, group in enumerate(GROUPS.tolist()):
        one = trajectory(group=group)
        answer, thinking, sufficient = (np.ravel(x)[place] for x in (ANSWERS, THINKING, SUFFICIENT))
        one.rewards = {"answer": answer, "thinking": thinking, "sufficient": sufficient, "reflect": 0.0}
        one.rewards["total"] = answer + 0.6 * thinking + 0.3 * sufficient
        many.append(one)
    return many


def by_hand(row, *, penalty=0.1, difficulty=True):
    """Algorithm 1, lines 15 to 17, for one group."""
    answer, thinking, sufficient = (np.array(x[row]) for x in (ANSWERS, THINKING, SUFFICIENT))
    total = answer + 0.6 * thinking + 0.3 * sufficient

    def normal(x):
        return (x - x.mean()) / math.sqrt(((x - x.mean()) ** 2).mean()) if x.std() else x * 0

    product = normal(sufficient) * normal(thinking) * normal(answer)
    found = normal(total) - np.where(product < 0, -penalty * product, 0)
    weight = 0.4 + 1.1 / (1 + math.exp(10 * (sufficient.mean() - 0.75)))
    return found * (weight if difficulty else 1)


def test_saturated_groups_are_excluded():
    # Algorithm 1, line 14: a group stays iff max F1 > 0.1 and min F1 < 0.9; both bounds are exclusive
    assert TiresRag().excluded(batch()).tolist() == [False] * 4 + [True] * 8 + [False] * 4
    assert TiresRag().excluded([]).tolist() == []
    assert (TiresRag().filter_low, TiresRag().filter_high) == (0.1, 0.9)


def retained():
    """Return the trajectories of the groups that are not excluded."""
    many = batch()
    return [t for t, out in zip(many, TiresRag().excluded(many), strict=True) if not out]


def test_advantages_are_those_of_algorithm_1():
    found = TiresRag().advantages(retained())
    np.testing.assert_allclose(found, np.concatenate([by_hand(0), by_hand(3)]), rtol=1e-4)
    assert found.dtype == np.float32


def test_reinforce_plus_plus_normalises_over_the_batch_before_the_same_shaping():
    # Table 4 and appendix D: the baseline is the mean of the batch, which has no excluded groups
    totals = np.array([t.rewards["total"] for t in retained()])
    over_batch = (totals - totals.mean()) / totals.std()
    plain = TiresRag(advantage="reinforce_plus_plus", penalty_weight=0.0, use_difficulty=False)
    np.testing.assert_allclose(plain.advantages(retained()), over_batch, rtol=1e-4)
    groups = np.repeat([0, 1], 4)
    rewards = {n: np.array([t.rewards[n] for t in retained()]) for n in ("sufficient", "thinking", "answer")}
    normal = {n: group_normalize(x, groups, unbiased=False) for n, x in rewards.items()}
    shaped = (over_batch - consistency_penalty(**normal)) * np.repeat(
        difficulty_weight(np.array([0.5, 0.75])), 4
    )
    np.testing.assert_allclose(
        TiresRag(advantage="reinforce_plus_plus").advantages(retained()), shaped, rtol=1e-3
    )


def test_coefficients_of_equations_6_and_7_are_fields():
    recipe = TiresRag()
    assert (recipe.difficulty_low, recipe.difficulty_high) == (0.4, 1.5)
    assert (recipe.difficulty_middle, recipe.difficulty_steepness, recipe.penalty_weight) == (0.75, 10.0, 0.1)
    other = TiresRag(
        difficulty_low=1.0, difficulty_high=2.0, difficulty_middle=0.5, difficulty_steepness=1e-9
    )
    plain = TiresRag(use_difficulty=False).advantages(batch())
    np.testing.assert_allclose(other.advantages(batch()), 1.5 * plain, rtol=1e-5)


# -- Table 7 -----------------------------------------------------------------------------------------------------------


def test_without_filter_no_group_is_excluded():
    recipe = TiresRag(use_filter=False)
    assert not recipe.excluded(batch()).any()
    np.testing.assert_allclose(recipe.advantages(batch())[4:8], by_hand(1), rtol=1e-4, atol=1e-6)


def test_difficulty_weight_and_penalty_can_be_switched_off():
    found = TiresRag(use_difficulty=False).advantages(batch())
    np.testing.assert_allclose(found[:4], by_hand(0, difficulty=False), rtol=1e-4)
    found = TiresRag(penalty_weight=0.0).advantages(batch())
    np.testing.assert_allclose(found[:4], by_hand(0, penalty=0.0), rtol=1e-4)
    assert not np.allclose(by_hand(0), by_hand(0, penalty=0.0))


@pytest.mark.parametrize(("name", "worth"), [("thinking", 0.42), ("sufficient", 0.3), ("reflect", 0.3)])
def test_a_zero_weight_removes_the_reward_from_the_total(name, worth):
    judge = StubJudge(sufficient=1.0, thinking=0.7)
    whole = scored((POLICY, WRONG + RIGHT), judge=judge).rewards["total"]
    recipe = TiresRag(**{f"{name}_weight": 0.0})
    assert scored((POLICY, WRONG + RIGHT), judge=judge, recipe=recipe).rewards["total"] == pytest.approx(
        whole - worth
    )


def test_judge_is_asked_only_for_rewards_in_use():
    def asked(**fields):
        judge = StubJudge()
        recipe = TiresRag(**fields)
        scored((POLICY, RIGHT), recipe=recipe, judge=judge)
        assert recipe.needs_judge == bool(judge.asked)
        return {type(case) for case in judge.asked}

    assert asked() == {Sufficiency, Thinking}
    assert asked(thinking_weight=0.0) == {Sufficiency, Thinking}  # the penalty needs thinking
    assert asked(thinking_weight=0.0, penalty_weight=0.0) == {Sufficiency}
    assert asked(sufficient_weight=0.0, penalty_weight=0.0) == {
        Sufficiency,
        Thinking,
    }  # the difficulty weight needs sufficiency
    assert asked(sufficient_weight=0.0, penalty_weight=0.0, use_difficulty=False) == {Thinking}
    naive = {"thinking_weight": 0.0, "sufficient_weight": 0.0, "penalty_weight": 0.0, "use_difficulty": False}
    assert asked(**naive) == set()


# -- expert, card, wrong fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_expert_answers_right_and_its_early_answer_is_not_a_target(kind, share):
    wiki = generate("train", 0, 200)
    recipe = TiresRag(shown_reflections=share)
    for item in wiki.questions(kind, 10, 0):
        parts = demonstrate(recipe, item, lambda query: wiki.passages[:2])
        own = "".join(part for part in parts if isinstance(part, str))
        answers = tag_contents(own, "answer")
        assert [answer.strip() for answer in answers] == [item.question.answers[0]]
        assert own.count("<search>") == len(item.plan.hops)
        assert own.count("</think>") == own.count("<think>") + 1  # the prompt opens the first
        given = [part for part in parts if isinstance(part, Append)]
        mistakes = [tag_contents(part.prefix, "answer") for part in given if "answer" in part.prefix]
        reflects = share == 1.0 and len(item.plan.hops) > 1
        assert len(mistakes) == reflects and len(given) == len(item.plan.hops) + reflects
        for ((mistake,),) in [mistakes] if mistakes else []:
            assert answer_reward(mistake, item.question.answers[:1]) < 1
        text = "<think>" + "".join(
            p if isinstance(p, str) else f"{p.prefix}{p.body}{p.suffix}" for p in parts
        )
        one = scored((POLICY, text))
        assert one.metrics["reflected"] == reflects


def test_the_fraction_of_reflecting_demonstrations_is_deterministic():
    wiki = generate("train", 0, 400)
    items = wiki.questions("two_hop", 200, 0)
    shown = [len(demonstrate(TiresRag(), item, lambda query: [])) > 5 for item in items]
    assert 0.2 < np.mean(shown) < 0.4
    assert shown == [len(demonstrate(TiresRag(), item, lambda query: [])) > 5 for item in items]
    mistakes = {early_answer(item, 1.0)[1] for item in items}
    assert "unknown" in mistakes and len(mistakes) > 50


def test_recipe_is_restored_from_its_card(tmp_path):
    changed = {"turn_tokens": 128, "max_searches": 4}
    recipe = make_recipe("tiresrag", {"opening": "bare", "penalty_weight": 0.5}, changed)
    write_card(tmp_path, make_card(recipe, 1024, 2))
    assert read_card(tmp_path).make() == recipe
    assert read_card(tmp_path).environment == changed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opening": "chat"}, r"recipe\.opening='chat' is unknown; choose one of instruct, base, bare"),
        ({"schedule": "slow"}, r"recipe\.schedule='slow' .*paper, fixed, linear, fast"),
        ({"reflect_table": "x"}, r"recipe\.reflect_table='x' .*paper, released"),
        ({"advantage": "batch"}, r"recipe\.advantage='batch' .*grpo_population.*reinforce_plus_plus"),
        ({"thinking_weight": -1.0}, r"recipe\.thinking_weight=-1\.0 must be at least 0"),
        ({"difficulty_steepness": float("nan")}, r"recipe\.difficulty_steepness=nan must be at least 0"),
        ({"filter_high": 90.0}, r"recipe\.filter_high=90\.0 must lie in 0\.\.1"),
        ({"shown_reflections": 1.5}, r"recipe\.shown_reflections=1\.5 must lie in 0\.\.1"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("tiresrag", fields)
