"""Attempts at questions of the built-in world, right ones and such as go wrong in a weak search agent's ways.

For those who must learn to tell good work from bad: each attempt is a plan that a scripted expert can act out.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rrl.miniwiki.lookup import Entity, WikiLookup, facts_of
from rrl.miniwiki.passages import RELATION
from rrl.miniwiki.questions import Hop, MiniQuestion, Plan, hop

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt(Plan):
    """What was looked up, and what was taken for each fact, right or wrong."""

    stated_facts: str
    """What it says beforehand that it will look up."""
    answer: str
    failed_hops: frozenset[int] = frozenset()
    """Hops whose search finds other passages than the one that is needed."""

    @property
    def facts(self) -> str:
        """What it says, which is not always what it does."""
        return self.stated_facts


def make_attempt(item: MiniQuestion, lookup: WikiLookup, rng: Rng, faulty: float) -> Attempt:
    """One attempt at a question; the same arguments (and state of `rng`) give the same one.

    Args:
      item: the question and its right plan.
      lookup: the passages of its world.
      rng: chooses what goes wrong.
      faulty: chance that something does, in 0..1.
    """
    right = Attempt(item.plan.hops, item.plan.conclusion, item.plan.facts, item.question.answers[0])
    if rng.random() >= faulty:
        return right
    # Names that are miscopied are what most often goes wrong.
    names = [*FAULTS, "misspelt", "misspelt"]
    hops, unfound = FAULTS[names[int(rng.integers(len(names)))]](item, lookup, rng)
    conclusion = item.plan.conclusion
    if hops == item.plan.hops and not unfound:
        return right
    if conclusion and rng.random() < 0.5:
        conclusion = ""
    # Most say what is needed and then do something else; some do what they say.
    stated = item.plan.facts if rng.random() < 0.7 else Plan(hops, "").facts
    return Attempt(hops, conclusion, stated, _answer(item, hops, rng), unfound)


FaultyPlan = tuple[tuple[Hop, ...], frozenset[int]]
"""Hops, and which of them find nothing that is needed."""
NO_HOPS: frozenset[int] = frozenset()


def _early(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Stops before the last facts."""
    hops = item.plan.hops
    return hops[: int(rng.integers(1, max(len(hops), 2)))], NO_HOPS


def _mistaken(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Takes something else for a fact, and goes on from there."""
    before, wrong, relations, after = _split_at_hop(item, rng)
    other = _other_values(item, lookup, rng, wrong, 1)[0]
    return _continue_from(lookup, before, dataclasses.replace(wrong, value=other), relations, after), NO_HOPS


def _misspelt(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """A name is miscopied and searched so, at times from where it was read on; so may be the value that is read then."""
    before, wrong, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(wrong.subject)
    name = _corrupt(wrong.subject, lookup.sample_names(rng, item.world, subject.kind, 1)[0], rng)
    if before and before[-1].value == wrong.subject and rng.random() < 0.5:
        before = (*before[:-1], dataclasses.replace(before[-1], value=name))
    value, draw = wrong.value, rng.random()
    if draw < 0.6:
        other = _other_values(item, lookup, rng, wrong, 1)[0]
        value = other if draw < 0.3 else _corrupt(value, other, rng)
    query = RELATION[subject.kind, wrong.relation].query(name)
    misread = dataclasses.replace(wrong, subject=name, value=value, query=query, title=name)
    return _continue_from(lookup, before, misread, relations, after), NO_HOPS


def _astray(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Asks for another fact than the one that is needed, and goes on from there."""
    before, wrong, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(wrong.subject)
    keys = [key for key in facts_of(lookup.world, subject) if key[1] != wrong.relation]
    if not keys:
        return item.plan.hops, NO_HOPS
    asked = hop(lookup.world, keys[int(rng.integers(len(keys)))], subject.index)
    return _continue_from(lookup, before, asked, relations, after), NO_HOPS


def _elsewhere(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Looks the right fact up of something else, most often of a namesake or of its like."""
    before, wrong, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(wrong.subject)
    other = lookup.entity_named(lookup.sample_names(rng, item.world, subject.kind, 1)[0])
    found = _chain(lookup, other, [wrong.relation, *relations])
    return (*before, *found, *after) or item.plan.hops, NO_HOPS


def _skipped(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Leaves a search out, and goes on as if it had found what it had to."""
    hops = item.plan.hops
    at = int(rng.integers(len(hops)))
    return (hops[:at] + hops[at + 1 :]) or hops, NO_HOPS


def _again(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Searches one fact twice; at times another is left out for it."""
    hops = item.plan.hops
    at = int(rng.integers(len(hops)))
    twice = hops[: at + 1] + hops[at:]
    return twice[: len(hops)] if rng.random() < 0.5 else twice[:4], NO_HOPS


def _failed_search(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """A search finds other passages, and what it should have found is stated all the same."""
    return item.plan.hops, frozenset({int(rng.integers(len(item.plan.hops)))})


FAULTS: dict[str, Callable[[MiniQuestion, WikiLookup, Rng], FaultyPlan]] = {
    "early": _early,
    "mistaken": _mistaken,
    "misspelt": _misspelt,
    "astray": _astray,
    "elsewhere": _elsewhere,
    "skipped": _skipped,
    "again": _again,
    "unfound": _failed_search,
}
"""What can go wrong."""


def wrong_answer(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> str:
    """An answer of the right type that is not the gold one: another name or year, a misspelt one, the other of two."""
    answer, last = item.question.answers[0], item.plan.hops[-1]
    if item.plan.conclusion:
        return _other_of_two(item)
    others = _other_values(item, lookup, rng, last, 2)
    other = others[0] if others[0] != answer else others[1]
    draw = rng.random()
    if draw < 0.5:
        mixed = _corrupt(answer, other, rng)
        return mixed if mixed != answer else other
    return item.plan.hops[0].value if draw < 0.65 and len(item.plan.hops) > 1 else other


def _other_of_two(item: MiniQuestion) -> str:
    answer, hops = item.question.answers[0], item.plan.hops
    named = {"yes": "no", "no": "yes"}
    if answer in named:
        return named[answer]
    heads = (hops[0].subject, hops[len(hops) // 2].subject)
    return heads[answer == heads[0]]


def _answer(item: MiniQuestion, hops: Sequence[Hop], rng: Rng) -> str:
    if item.plan.conclusion:
        return item.question.answers[0] if rng.random() < 0.5 else _other_of_two(item)
    return hops[-1].value


def _split_at_hop(item: MiniQuestion, rng: Rng) -> tuple[tuple[Hop, ...], Hop, list[str], tuple[Hop, ...]]:
    """A plan at one of its hops: those before, it, the relations that follow it in its branch, the hops of other branches."""
    hops = item.plan.hops
    length = len(hops) // (2 if item.plan.conclusion else 1)
    at = int(rng.integers(len(hops)))
    end = (at // length + 1) * length
    return hops[:at], hops[at], [later.relation for later in hops[at + 1 : end]], hops[end:]


def _continue_from(
    lookup: WikiLookup, before: Sequence[Hop], wrong: Hop, relations: Sequence[str], after: Sequence[Hop]
) -> tuple[Hop, ...]:
    """A plan that goes on from the value of a wrong hop, as far as that has such facts."""
    start = lookup.entity_named(wrong.value) if relations and lookup.has_entity(wrong.value) else None
    return (*before, wrong, *(_chain(lookup, start, relations) if start else ()), *after)


def _chain(lookup: WikiLookup, entity: Entity, relations: Sequence[str]) -> list[Hop]:
    """The facts that lead on from an entity, up to the first that it does not have."""
    found: list[Hop] = []
    following: Entity | None = entity
    for relation in relations:
        if following is None or (following.kind, relation) not in facts_of(lookup.world, following):
            break
        key = (following.kind, relation)
        found.append(hop(lookup.world, key, following.index))
        following = lookup.follow(following, key)
    return found


def _other_values(item: MiniQuestion, lookup: WikiLookup, rng: Rng, fact: Hop, n: int) -> list[str]:
    """`n` different values that a fact might have."""
    relation = RELATION[lookup.entity_named(fact.title).kind, fact.relation]
    if relation.value == "year":
        low, high = relation.years
        return [str(low + year) for year in rng.choice(high - low + 1, n, replace=False).tolist()]
    return lookup.sample_names(rng, item.world, relation.value, n)


def _corrupt(name: str, other: str, rng: Rng) -> str:
    """A name as a weak policy copies it: one of its words gives way to another name's, or ends as that one does. A single
    word, which may be a year, takes the other's second half."""
    mine, theirs = name.split(), other.split()
    at = int(rng.integers(len(mine)))
    word, foreign = mine[at], theirs[min(at, len(theirs) - 1)]
    if len(mine) == 1 or rng.random() < 0.6:
        foreign = word[: (len(word) + 1) // 2] + foreign[len(foreign) // 2 :]
    return " ".join([*mine[:at], foreign, *mine[at + 1 :]])
