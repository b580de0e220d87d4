"""R3-RAG, equation by equation: rewards, ablations, cold-start pairs, scripted expert."""

import dataclasses

import numpy as np
import pytest

from rrl.data.trajectory import ENVIRONMENT, NOT_FINITE, POLICY, PROMPT
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.base import NO_MODELS
from rrl.recipes.card import make_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment, parse_step
from rrl.rewards.judge_prompts import Correctness, Relevance
from rrl.rewards.oracle import Oracle
from rrl.rollout.protocol import Restart
from tests.recipes.r3rag_episodes import (
    ASK,
    ASK_MORE,
    BOOK,
    BROKEN,
    FILM,
    QUESTION,
    RIGHT,
    WRONG,
    StubJudge,
    after,
    scored,
    trajectory,
)

# -- rewards (Eqs. 2-6, appendix C) ------------------------------------------------------------------------------------


def test_a_right_answer_earns_two_and_scales_relevance_by_1_6():
    # Eq. 5: 1·(0 + 0.8) + 1 - 1 = 0.8, Eq. 6: ·1.6; Figure 2: the last step earns 2
    one = scored(
        trajectory(ASK, ASK_MORE, RIGHT, found=([FILM], [BOOK])), judge=StubJudge(relevance=[0.8, 0.1])
    )
    assert one.turn_rewards == pytest.approx({0: 1.28, 1: 0.16, 2: 2.0})
    assert one.rewards == pytest.approx({"answer": 1, "relevance": 0.9, "format": 0, "total": 3.44})
    assert one.answer == "It was Marta Velikov."
    assert one.metrics["acc"] == 1 and one.metrics["steps"] == 3
    assert one.metrics["relevance"] == pytest.approx(0.45)


def test_equation_6_gives_the_last_step_1_6():
    one = scored(trajectory(ASK, RIGHT, found=([FILM],)), R3Rag(last_step="equation"))
    assert one.turn_rewards == pytest.approx({0: 0.8, 1: 1.6})


def test_a_wrong_answer_earns_zero_and_scales_relevance_by_0_8():
    one = scored(trajectory(ASK, WRONG, found=([FILM],)))
    assert one.turn_rewards == pytest.approx({0: 0.5 * 0.8, 1: 0.0})
    assert one.rewards == pytest.approx({"answer": 0, "relevance": 0.5, "format": 0, "total": 0.4})


@pytest.mark.parametrize("ended", ["turn_limit", "context_limit"])
def test_no_answer_within_the_limit_scales_relevance_by_0_9(ended):
    one = scored(trajectory(ASK, ASK_MORE, found=([FILM], [BOOK]), ended=ended))
    assert one.turn_rewards == pytest.approx({0: 0.45, 1: 0.45})
    assert one.answer == "" and one.rewards["answer"] == 0 and one.metrics["em"] == 0


def test_a_step_truncated_by_the_context_is_not_malformed():
    # appendix C: no answer within the limit scales by 0.9; the truncated step earns 0
    one = scored(trajectory(ASK, BROKEN, found=([FILM],), ended="context_limit"))
    assert one.turn_rewards == pytest.approx({0: 0.45, 1: 0.0}) and one.rewards["format"] == 0
    assert (one.answer, one.metrics["malformed"], one.metrics["steps"]) == ("", 0, 2)
    assert R3Rag().rejection_reason(one) == "unanswered"


@pytest.mark.parametrize("last", [[], [BROKEN], [RIGHT]])
def test_a_step_with_non_finite_logits_earns_zero_and_is_not_malformed(last):
    """Also if the step is empty, or has a final answer before the text breaks off."""
    one = scored(trajectory(ASK, *last, found=([FILM],), ended=NOT_FINITE))
    assert one.turn_rewards == pytest.approx({0: 0.45, **dict.fromkeys(range(1, 1 + len(last)), 0.0)})
    assert (one.answer, one.rewards["answer"], one.rewards["format"]) == ("", 0, 0)


@pytest.mark.parametrize("ended", ["malformed", "length"])
@pytest.mark.parametrize("value", [-1.0, -0.9])
def test_a_malformed_step_earns_minus_one_and_earlier_steps_keep_their_rewards(ended, value):
    # Eq. 5: 0·(…) + 0 - 1, Eq. 6: lambda 1; released: -0.9
    one = scored(trajectory(ASK, BROKEN, found=([FILM],), ended=ended), R3Rag(malformed_reward=value))
    assert one.turn_rewards == pytest.approx({0: 0.5, 1: value})
    assert one.rewards == pytest.approx(
        {"answer": 0, "relevance": 0.5, "format": value, "total": 0.5 + value}
    )
    assert one.metrics["malformed"] == 1


def test_a_truncated_answer_is_no_answer():
    assert scored(trajectory(RIGHT, ended="length")).answer == ""


def test_an_answer_is_right_by_match_or_by_the_judge():
    # Eq. 2
    judge = StubJudge(correct=1.0)
    one = scored(trajectory(WRONG), judge=judge)
    assert one.rewards["answer"] == 1 and one.turn_rewards == {0: 2.0}
    assert [type(case) for case in judge.asked].count(Correctness) == 1
    matched = StubJudge(correct=0.0)
    assert scored(trajectory(RIGHT), judge=matched).rewards["answer"] == 1
    assert not any(isinstance(case, Correctness) for case in matched.asked)
    assert scored(trajectory(WRONG), R3Rag(judge_answers=False), judge).rewards["answer"] == 0


def test_exact_match_rejects_an_answer_that_names_several():
    both = RIGHT.replace("It was Marta Velikov.", "Marta Velikov or Edda Tolvik")
    assert scored(trajectory(both)).rewards["answer"] == 1
    exact = R3Rag(match="exact")
    assert scored(trajectory(both), exact).rewards["answer"] == 0
    assert scored(trajectory(RIGHT.replace("It was ", "")), exact).rewards["answer"] == 1


def test_relevance_is_judged_on_the_new_documents_of_each_step():
    judge = StubJudge(relevance=1.0)
    long = dataclasses.replace(BOOK, text="x" * 600)
    one = scored(trajectory(ASK, ASK, ASK, WRONG, found=([FILM], [FILM, long], [FILM])), judge=judge)
    asked = [case.passages for case in judge.asked if isinstance(case, Relevance)]
    assert asked == [(FILM,), (dataclasses.replace(BOOK, text="x" * 512),)]
    assert one.turn_rewards == pytest.approx({0: 0.8, 1: 0.8, 2: 0.0, 3: 0.0})


def test_a_failed_search_earns_zero_and_is_not_malformed():
    one = scored(trajectory(ASK, RIGHT, found=(None,)))
    assert one.turn_rewards == {0: 0.0, 1: 2.0} and one.metrics["searches"] == 0


def test_unparsed_judge_replies_count_zero_and_are_counted():
    one = scored(
        trajectory(ASK, WRONG, found=([FILM],)), judge=StubJudge(relevance=None, correct=None, short=None)
    )
    assert one.metrics["judge_unread"] == 4  # short forms: EM and F1
    assert one.rewards["total"] == 0
    plain = scored(trajectory(ASK, WRONG, found=([FILM],)), R3Rag(short_answers=False))
    assert one.metrics["f1"] == plain.metrics["f1"]


def test_em_and_f1_use_the_short_answer():
    # 4.1
    judge = StubJudge(short=1.0)
    one = scored(trajectory(RIGHT), judge=judge)
    assert one.metrics["em"] == one.metrics["f1"] == 1
    assert [case.metric for case in judge.asked] == ["em", "f1"]
    assert scored(trajectory(RIGHT), R3Rag(short_answers=False), judge).metrics["em"] == 0
    exact = scored(trajectory(RIGHT.replace("It was ", "")), judge=StubJudge(short=0.0))
    assert exact.metrics["em"] == 1  # needs no extraction


def test_oracle_scores_by_gold_passages():
    one = scored(trajectory(ASK, RIGHT, found=([FILM, BOOK],)), judge=Oracle())
    assert one.turn_rewards == pytest.approx({0: 1.6, 1: 2.0})


def test_without_a_judge_only_matches_count():
    one = trajectory(ASK, RIGHT, found=([FILM],))
    R3Rag().score([one], NO_MODELS)
    assert one.turn_rewards == {0: 0.0, 1: 2.0}


def test_only_policy_text_is_scored():
    one = trajectory(WRONG)
    one.segments[:0] = [(PROMPT, RIGHT), (ENVIRONMENT, RIGHT)]
    assert scored(one).rewards["answer"] == 0


def test_each_step_is_paid_at_its_last_policy_token():
    one = trajectory(ASK, RIGHT, found=([FILM],))
    one.tokens = np.arange(8)
    one.roles = np.array([PROMPT, POLICY, POLICY, PROMPT, PROMPT, POLICY, POLICY, POLICY])
    one.turns = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    assert scored(one).token_rewards == pytest.approx([0, 0, 0.8, 0, 0, 0, 0, 2.0])


# -- Table 2 -----------------------------------------------------------------------------------------------------------


def test_without_process_reward_only_answer_and_format_pay():
    judge = StubJudge()
    recipe = R3Rag(use_process=False)
    assert scored(trajectory(ASK, RIGHT, found=([FILM],)), recipe, judge).turn_rewards == {0: 0.0, 1: 2.0}
    assert not any(isinstance(case, Relevance) for case in judge.asked)
    broken = scored(trajectory(ASK, BROKEN, found=([FILM],), ended="malformed"), recipe)
    assert broken.turn_rewards == {0: 0.0, 1: -1.0}


def test_without_outcome_reward_right_and_wrong_answers_earn_the_same():
    recipe = R3Rag(use_outcome=False)
    right = scored(trajectory(ASK, RIGHT, found=([FILM],)), recipe)
    wrong = scored(trajectory(ASK, WRONG, found=([FILM],)), recipe)
    assert right.turn_rewards == wrong.turn_rewards == {0: 0.5, 1: 0.0}
    assert right.metrics["acc"] == 1


def test_needs_judge_if_any_reward_uses_it():
    assert R3Rag().needs_judge and R3Rag(use_process=False).needs_judge
    assert not R3Rag(use_process=False, judge_answers=False, short_answers=False).needs_judge


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"last_step": "two"}, "recipe.last_step='two' is unknown"),
        ({"match": "near"}, "recipe.match='near' is unknown"),
        ({"advantage": "best"}, "recipe.advantage='best' is unknown"),
        ({"correct_scale": -1}, "recipe.correct_scale=-1 must be at least 0"),
        ({"malformed_reward": 0.5}, "recipe.malformed_reward=0.5 must be at most 0"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("r3rag", fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opening": "bare"}, "environment.opening='bare' is unknown"),
        ({"cut": "page"}, "environment.cut='page' is unknown"),
        ({"max_steps": 0}, "environment.max_steps=0 must be at least 1"),
        ({"document_characters": -1}, "environment.document_characters=-1 must be at least 0"),
    ],
)
def test_wrong_fields_of_the_environment_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        make_recipe("r3rag", {}, fields)


def test_recipe_is_restored_from_its_card():
    recipe = make_recipe("r3rag", {"last_step": "equation"}, {"max_steps": 7, "cut": "block"})
    assert make_card(recipe, 1024, 2).make() == recipe


def test_no_trajectory_is_excluded_and_advantages_come_from_totals():
    # appendix A
    some = [scored(trajectory(text)) for text in (RIGHT, WRONG)]
    assert not R3Rag().excluded(some).any()
    found = R3Rag().advantages(some)
    assert found[0] > 0 > found[1]


# -- cold start (Algorithms 1 and 2) -----------------------------------------------------------------------------------


def test_a_trajectory_of_t_steps_gives_t_pairs():
    environment = R3RagEnvironment(opening="paper")
    recipe = R3Rag(environment=environment)
    one = scored(trajectory(ASK, f"\n{ASK_MORE} ", RIGHT, found=([FILM], [FILM, BOOK])), recipe)
    first, second, third = recipe.sft_pairs(one)
    plain = R3RagEnvironment()
    assert first == ("The question: Who directed Silver Harbour?", ASK)
    assert second == (after((ASK, [FILM]), environment=plain).prompt, f"Step 2:\n{ASK_MORE}")
    prompt = after((ASK, [FILM]), (ASK_MORE, [FILM, BOOK]), environment=plain).prompt
    assert third == (prompt, RIGHT.replace("Step 2", "Step 3"))


def test_every_pair_shows_the_choices_of_its_question():
    question = dataclasses.replace(QUESTION, choices=("Ada Berg", "Marta Velikov"))
    one = scored(trajectory(ASK, RIGHT, found=([FILM],), question=question))
    shown = "\n(A) Ada Berg\n(B) Marta Velikov\nAnswer with the letter of the right choice."
    first, second = (prompt for prompt, _ in R3Rag().sft_pairs(one))
    assert first == f"The question: {QUESTION.text}{shown}"
    assert second.startswith(f"{first}\n{ASK}\n")


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (trajectory(ASK, RIGHT, found=([FILM],)), ""),
        (trajectory(ASK, WRONG, found=([FILM],)), "incorrect"),
        (trajectory(ASK, BROKEN, found=([FILM],), ended="malformed"), "malformed"),
        (trajectory(ASK, RIGHT, found=([FILM],), ended="length"), "malformed"),
        (trajectory(ASK, found=([FILM],), ended="turn_limit"), "unanswered"),
        (trajectory(ASK, RIGHT, found=(None,)), "search failed"),
    ],
)
def test_rejection_reason_names_the_outcome(one, fault):
    # 3.2.1
    assert R3Rag().rejection_reason(scored(one)) == fault


@pytest.mark.parametrize("kind", KINDS)
def test_expert_answers_right_in_well_formed_steps(kind):
    wiki = generate("train", 0, 200)
    by_title = {p.title: p for p in wiki.passages}
    recipe = R3Rag(environment=R3RagEnvironment(max_steps=2))
    for item in wiki.questions(kind, 5, 0):
        hops = {hop.query: by_title[hop.title] for hop in item.plan.hops}
        shown = demonstrate(recipe, item, lambda query, hops=hops: [hops[query], wiki.passages[0]])
        texts, prompts = shown[::2], shown[1::2]
        assert len(texts) == len(item.plan.hops) + 1 and all(isinstance(p, Restart) for p in prompts)
        steps = [parse_step(text) for text in texts]
        assert [step.query for step in steps[:-1]] == [hop.query for hop in item.plan.hops]
        assert steps[-1].answer == item.question.answers[0]
        assert texts[0] in prompts[0].prompt and texts[-1].startswith(f"Step {len(texts)}:")
        assert all(hop.sentence in prompts[-1].prompt for hop in item.plan.hops)
