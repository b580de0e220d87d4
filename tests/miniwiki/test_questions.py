"""Tests of questions: answers follow from their plans, and plans quote the passages."""

import pytest

from rrl.errors import UserError
from rrl.miniwiki import KINDS, MiniQuestion, MiniWiki, generate

HOPS = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "comparison": 2, "bridge_comparison": 4}


@pytest.fixture(scope="module")
def wiki() -> MiniWiki:
    return generate("train", 0, 1000, worlds=5)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_quote_their_passages_and_stay_in_one_sub_world(wiki: MiniWiki, kind: str) -> None:
    texts = {p.title: p.text for p in wiki.passages}
    place = {wiki.passages[i].title: w for w, span in enumerate(wiki.subworld_ranges) for i in span}
    for item in wiki.questions(kind, 150, seed=0):
        assert len(item.plan.hops) == HOPS[kind]
        for hop in item.plan.hops:
            assert hop.sentence in texts[hop.title]
            assert hop.value in hop.sentence
            assert hop.subject in hop.sentence
            assert hop.query == f"{hop.relation} of {hop.subject}"
            assert place[hop.title] == item.subworld
        assert item.question.gold == tuple(dict.fromkeys(hop.title for hop in item.plan.hops))
        assert item.question.kind == kind


@pytest.mark.parametrize("kind", ["one_hop", "two_hop", "three_hop"])
def test_each_hop_starts_at_the_value_of_the_last_and_never_returns(wiki: MiniWiki, kind: str) -> None:
    for item in wiki.questions(kind, 150, seed=1):
        hops = item.plan.hops
        assert [hop.subject for hop in hops[1:]] == [hop.value for hop in hops[:-1]]
        assert item.question.answers[0] == hops[-1].value
        assert hops[0].subject in item.question.text
        assert not any(hop.subject in item.question.text for hop in hops[1:])
        assert len({hop.subject for hop in hops} | {hops[-1].value}) == len(hops) + 1
        assert item.plan.conclusion == ""


def _expected_answer(item: MiniQuestion) -> str:
    """Compute the answer to a comparison from the values and the words of the question alone."""
    bridged = item.question.kind == "bridge_comparison"
    hops = item.plan.hops
    first, second = (hops[:2], hops[2:]) if bridged else (hops[:1], hops[1:])
    a, b = first[-1].value, second[-1].value
    if item.question.answers[0] in ("yes", "no"):
        return "yes" if a == b else "no"
    assert a != b
    early, late = (first, second) if int(a) < int(b) else (second, first)
    return (late if "later" in item.question.text else early)[0].subject


@pytest.mark.parametrize("kind", ["comparison", "bridge_comparison"])
def test_comparisons_are_decided_by_the_values(wiki: MiniWiki, kind: str) -> None:
    items = wiki.questions(kind, 300, seed=2)
    for item in items:
        answer = item.question.answers[0]
        assert answer == _expected_answer(item)
        assert all(hop.value in item.plan.conclusion for hop in item.plan.hops[-1:])
        if kind == "bridge_comparison":
            assert item.plan.hops[0].value != item.plan.hops[2].value
    yes_no = [item.question.answers[0] for item in items if item.question.answers[0] in ("yes", "no")]
    assert 0.3 < len(yes_no) / len(items) < 0.5
    assert abs(yes_no.count("yes") - yes_no.count("no")) <= 2


def test_the_first_named_entity_is_the_answer_in_half_of_the_comparisons(wiki: MiniWiki) -> None:
    items = wiki.questions("comparison", 300, seed=3)
    named = [item for item in items if item.question.answers[0] not in ("yes", "no")]
    first = sum(item.plan.hops[0].subject == item.question.answers[0] for item in named)
    assert 0.35 < first / len(named) < 0.65


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_reproducible_distinct_and_have_ids(wiki: MiniWiki, kind: str) -> None:
    items = wiki.questions(kind, 100, seed=4)
    assert items == wiki.questions(kind, 100, seed=4)
    assert items != wiki.questions(kind, 100, seed=5)
    assert len({item.question.text for item in items}) == 100
    assert items[7].question.id == f"miniwiki-train-0.4-{kind}-7"


def test_questions_are_spread_over_relations(wiki: MiniWiki) -> None:
    relations = [item.plan.hops[0].relation for item in wiki.questions("one_hop", 600, seed=6)]
    assert len(set(relations)) == 13
    assert max(relations.count(r) for r in set(relations)) < 150


def test_only_cities_have_an_alias(wiki: MiniWiki) -> None:
    for item in wiki.questions("one_hop", 200, seed=7):
        answer, *aliases = item.question.answers
        place = item.plan.hops[0].relation in ("birthplace", "headquarters")
        assert aliases == ([f"the city of {answer}"] if place else [])


@pytest.mark.parametrize("kind", KINDS)
def test_more_questions_than_exist_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match="only"):
        generate("dev", 0, 50).questions(kind, 2500, seed=0)


def test_the_error_of_an_unknown_kind_lists_the_kinds(wiki: MiniWiki) -> None:
    with pytest.raises(UserError, match="one_hop, two_hop"):
        wiki.questions("four_hop", 1, 0)
