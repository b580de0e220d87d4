"""R-Search: rewards, equation by equation, and scripted expert."""

import dataclasses

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.miniwiki import generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.base import ScoringContext
from rrl.recipes.rsearch import NO_EVIDENCE_TEMPLATE, READER_TEMPLATE, SYSTEM_TEMPLATE, RSearch
from rrl.rollout.protocol import Append
from rrl.text.spans import tag_contents

QUESTION = Question("q", "Who directed Silver Harbour?", ("Marta Velikov",))
EVIDENCE = "<original_evidence>Silver Harbour was directed by Marta Velikov.</original_evidence>"


def trajectory(*segments, searches=1, group=0):
    none = np.zeros(0)
    return Trajectory(
        QUESTION,
        0,
        group,
        none,
        none,
        none,
        none,
        none,
        list(segments),
        [Search(0, "q")] * searches,
        "answer",
    )


def scored(*segments, searches=1, recipe=None, reader=lambda prompts: ["Marta Velikov"] * len(prompts)):
    one = trajectory(*segments, searches=searches)
    (recipe or RSearch()).score([one], ScoringContext(reader))
    return one


def test_answer_reward_is_token_f1():
    one = scored((POLICY, "<answer>Marta Danes</answer>"))
    assert one.rewards["answer"] == pytest.approx(0.5)
    assert one.metrics["em"] == 0


@pytest.mark.parametrize(
    ("text", "searches", "reward"),
    [
        (EVIDENCE + "<answer>x</answer>", 1, 0.4),
        ("<answer>x</answer>", 1, 0.2),
        (EVIDENCE, 1, 0.2),
        ("nothing", 1, 0.0),
        (EVIDENCE + EVIDENCE + "<answer>x</answer>", 1, 0.2),
        (EVIDENCE + "<answer>x</answer><answer>y</answer>", 1, 0.2),
        (EVIDENCE + "<answer>x</answer><answer>", 1, 0.2),
        ("<answer>x</answer>", 0, 0.4),
        ("nothing", 0, 0.2),
    ],
)
def test_format_reward_follows_equation_5(text, searches, reward):
    assert scored((POLICY, text), searches=searches).rewards["format"] == pytest.approx(reward)


def test_evidence_without_search_is_paid_as_printed_but_not_as_released():
    text = EVIDENCE + "<answer>x</answer>"
    assert scored((POLICY, text), searches=0).rewards["format"] == pytest.approx(0.4)
    released = RSearch(pay_evidence_without_search=False)
    assert scored((POLICY, text), searches=0, recipe=released).rewards["format"] == pytest.approx(0.2)


def test_a_failed_search_is_not_counted():
    one = trajectory((POLICY, "nothing"))
    one.searches = [Search(0, "q"), Search(1, "q", failed=True)]
    RSearch().score([one], ScoringContext())
    assert one.metrics["searches"] == 1


def test_two_answers_earn_no_format_reward_and_the_last_is_scored():
    one = scored((POLICY, EVIDENCE + "<answer>x</answer> no, <answer>Marta Velikov</answer>"))
    assert one.answer == "Marta Velikov"
    assert one.rewards == pytest.approx({"answer": 1, "evidence": 1, "format": 0.2, "total": 2.2})


def test_reader_weight_scales_the_evidence_reward():
    words = ((POLICY, EVIDENCE + "<answer>Marta Velikov</answer>"),)
    assert scored(*words).rewards["total"] == pytest.approx(2.4)
    one = scored(*words, recipe=RSearch(reader_weight=0.3))
    assert one.rewards == pytest.approx({"answer": 1, "evidence": 0.3, "format": 0.4, "total": 1.7})
    assert one.metrics["reader_f1"] == 1


def test_reader_prompt_has_only_question_and_evidence():
    seen = []
    one = scored((POLICY, EVIDENCE + "<answer>x</answer>"), reader=lambda p: seen.extend(p) or ["Velikov"])
    evidence = "Silver Harbour was directed by Marta Velikov."
    assert seen == [READER_TEMPLATE.format(evidence=evidence, query=QUESTION.text)]
    assert one.rewards["evidence"] == pytest.approx(2 / 3)
    assert one.reader_answer == "Velikov"


def test_reader_prompt_shows_the_choices():
    seen, one = [], trajectory((POLICY, EVIDENCE + "<answer>B</answer>"))
    one.question = dataclasses.replace(QUESTION, answers=("B",), choices=("Ada Berg", "Marta Velikov"))
    RSearch().score([one], ScoringContext(lambda prompts: seen.extend(prompts) or ["B"]))
    choices = "(A) Ada Berg\n(B) Marta Velikov\nAnswer with the letter of the right choice."
    assert f"Question: {QUESTION.text}\n{choices}\n\nAnswer:" in seen[0]
    assert one.metrics["reader_f1"] == 1


def test_prompt_and_environment_are_never_scored():
    one = scored(
        (PROMPT, SYSTEM_TEMPLATE + "<answer>Marta Velikov</answer>"),
        (POLICY, "<search>q</search>"),
        (ENVIRONMENT, EVIDENCE + "<answer>Marta Velikov</answer>"),
        (POLICY, "I give up"),
    )
    assert one.rewards["total"] == 0


def test_a_tag_does_not_span_environment_text():
    one = scored((POLICY, "<answer>Marta"), (ENVIRONMENT, " hm "), (POLICY, "Velikov</answer>"))
    assert one.answer == ""
    assert one.rewards["format"] == 0


def test_without_evidence_both_evidence_rewards_are_zero():
    recipe = RSearch(use_evidence=False)
    one = scored((POLICY, EVIDENCE + "<answer>Marta Velikov</answer>"), recipe=recipe)
    assert one.rewards == pytest.approx({"answer": 1, "format": 0.2, "total": 1.2})
    assert "original_evidence" not in NO_EVIDENCE_TEMPLATE
    assert recipe.prompt(QUESTION).startswith(NO_EVIDENCE_TEMPLATE)


def test_advantages_are_normalised_within_the_group():
    many = [trajectory(group=g) for g in (0, 0, 1, 1)]
    for one, total in zip(many, (0.0, 1.0, 5.0, 5.0), strict=True):
        one.rewards["total"] = total
    np.testing.assert_allclose(RSearch().advantages(many), [-(0.5**0.5), 0.5**0.5, 0, 0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["one_hop", "two_hop", "three_hop", "comparison", "bridge_comparison"])
def test_expert_earns_every_format_reward_and_answers_right(kind):
    wiki = generate("train", 0, 200)
    recipe = RSearch()
    for item in wiki.questions(kind, 10, 0):
        segments = demonstrate(recipe, item, lambda query: wiki.passages[:3])
        own = [s for s in segments if isinstance(s, str)]
        assert recipe.format_reward(own, True) == pytest.approx(0.4)
        assert tag_contents(own[-1], "answer")[0].strip() == item.question.answers[0]
        assert sum(isinstance(s, Append) for s in segments) == len(item.plan.hops)
