"""Tests of attempts at questions: correct ones are the plan, faulty ones have the fault of their kind."""

import numpy as np
import pytest

from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.attempts import FAULTS, make_attempt, wrong_answer
from rrl.miniwiki.lookup import WikiLookup
from rrl.text.metrics import cover_exact_match

WIKI = generate("train", 3, 200)
LOOKUP = WikiLookup(WIKI)
ITEMS = [item for kind in KINDS for item in WIKI.questions(kind, 12, 0)]


def test_an_attempt_without_faults_is_the_plan():
    rng = np.random.default_rng(0)
    for item in ITEMS:
        one = make_attempt(item, LOOKUP, rng, faulty=0.0)
        assert (one.hops, one.conclusion, one.facts_text) == (
            item.plan.hops,
            item.plan.conclusion,
            item.plan.facts_text,
        )
        assert one.answer == item.question.answers[0] and not one.failed_hops


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_changes_most_plans_and_leaves_at_least_one_hop(name):
    rng = np.random.default_rng(0)
    changed = 0
    for item in ITEMS:
        hops, failed = FAULTS[name](item, LOOKUP, rng)
        assert hops
        assert all(0 <= place < len(hops) for place in failed)
        changed += hops != item.plan.hops or bool(failed)
    assert changed > len(ITEMS) / 2


def test_hops_after_a_wrong_value_start_from_it():
    rng = np.random.default_rng(1)
    followed = 0
    for item in WIKI.questions("three_hop", 30, 1):
        hops, _ = FAULTS["wrong value"](item, LOOKUP, rng)
        wrong = next((place for place, (a, b) in enumerate(zip(hops, item.plan.hops)) if a != b), None)
        if wrong is None or wrong + 1 == len(hops):
            continue
        followed += 1
        assert hops[wrong].value != item.plan.hops[wrong].value
        assert hops[wrong + 1].subject == hops[wrong].value
        assert hops[wrong + 1].sentence in LOOKUP.text(LOOKUP.entity_named(hops[wrong + 1].title))
    assert followed


def test_the_same_random_state_gives_the_same_attempts():
    first, second = (
        [make_attempt(item, LOOKUP, rng, 0.6) for item in ITEMS]
        for rng in (np.random.default_rng(7), np.random.default_rng(7))
    )
    assert first == second
    right = sum(one.hops == item.plan.hops and not one.failed_hops for one, item in zip(first, ITEMS))
    assert len(ITEMS) / 4 < right < 3 * len(ITEMS) / 4


def test_wrong_answers_do_not_match_the_gold_answer():
    rng = np.random.default_rng(0)
    wrong = [
        cover_exact_match(wrong_answer(item, LOOKUP, rng), item.question.answers)
        for item in ITEMS
        for _ in range(5)
    ]
    assert np.mean(wrong) < 0.03  # replacing half of a year may give the correct year
