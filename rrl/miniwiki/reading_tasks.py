"""Short reading tasks about passages, such as " director of Silver Harbour :", with their answers. Read `READING_TASKS` first."""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from rrl.miniwiki.comparisons import EQUALITY_COMPARISONS, YEAR_COMPARISONS, conclude_equality, conclude_years
from rrl.miniwiki.lookup import SeenEntities, WikiLookup, fact_keys
from rrl.miniwiki.plans import Hop, Plan, make_hop

Segment = tuple[str, bool]
"""(text, whether it is a target)."""

Rng = np.random.Generator


def sample_task(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Return one task that the passages so far can answer; if the drawn kind does not fit them, a `_value` task."""
    segments = READING_TASKS[int(rng.choice(len(READING_TASKS), p=_TASK_SHARES))](lookup, rng, seen)
    return segments or _value(lookup, rng, seen)


def _value(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: give the value of a fact."""
    fact = lookup.sample_fact(rng, seen)
    return [(f" {fact.query} :", False), (f" {fact.value}\n", True)]


def _statement(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: complete the statement of a fact."""
    fact = lookup.sample_fact(rng, seen)
    return [(f" The {fact.query} is", False), (f" {fact.value}.\n", True)]


def _quote(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: copy the sentences that state one to four facts, in the requested order."""
    facts = [
        lookup.sample_fact(rng, seen) for _ in range(int(rng.choice([1, 2, 3, 4], p=[0.5, 0.25, 0.15, 0.1])))
    ]
    queries = ",".join(f" {fact.query}" for fact in facts)
    sentences = " ".join(dict.fromkeys(fact.sentence for fact in facts))
    return [(f" copy{queries} :", False), (f" {sentences}\n", True)]


def _recite(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: copy the passage about an entity."""
    entity = seen.entities[int(rng.integers(len(seen.entities)))]
    return [(f" passage of {lookup.title(entity)} :", False), (f" {lookup.text(entity)}\n", True)]


def _chain(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: state two facts, the second about the value of the first."""
    links = [
        (entity, key, lookup.follow(entity, key))
        for entity in seen.entities
        for key in fact_keys(lookup.world, entity)
        if lookup.follow(entity, key) in seen.entities
    ]
    if not links:
        return []
    entity, key, value = links[int(rng.integers(len(links)))]
    assert value is not None
    keys = [key for key in fact_keys(lookup.world, value) if lookup.follow(value, key) != entity]
    second = keys[int(rng.integers(len(keys)))]
    hops = (make_hop(lookup.world, key, entity.index), make_hop(lookup.world, second, value.index))
    return _carry_out(rng, Plan(hops, ""), hops[-1].value)


def _compare(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: state the years of two subjects, and conclude which one is earlier or later."""
    choices = [
        (comparison, pair)
        for comparison in YEAR_COMPARISONS
        for pair in itertools.combinations(seen.of_type(comparison.entity_type), 2)
    ]
    if not choices:
        return []
    comparison, pair = choices[int(rng.integers(len(choices)))]
    a, b = (
        make_hop(lookup.world, (comparison.entity_type, comparison.relation), entity.index)
        for entity in (pair if rng.random() < 0.5 else pair[::-1])
    )
    if a.value == b.value:
        return []
    answer, conclusion = conclude_years(((a,), (b,)), earlier_or_later(rng), comparison.verb, "")
    return _carry_out(rng, Plan((a, b), conclusion), answer)


def _same(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Task: state a city, company or country of two subjects, and conclude whether it is the same."""
    choices = [
        (key, pair)
        for key in EQUALITY_COMPARISONS
        for pair in itertools.combinations(seen.of_type(key[0]), 2)
        if all(lookup.world.facts[key][entity.index] >= 0 for entity in pair)
    ]
    if not choices:
        return []
    equal = [c for c in choices if len({int(lookup.world.facts[c[0]][entity.index]) for entity in c[1]}) == 1]
    if equal and rng.random() < 0.5:
        choices = equal
    key, pair = choices[int(rng.integers(len(choices)))]
    a, b = (make_hop(lookup.world, key, entity.index) for entity in pair)
    answer, conclusion = conclude_equality(((a,), (b,)), EQUALITY_COMPARISONS[key][0])
    return _carry_out(rng, Plan((a, b), conclusion), answer)


def _carry_out(rng: Rng, plan: Plan, outcome: str) -> list[Segment]:
    """Return the task to carry out a plan: state its facts and its conclusion.

    70 % of the tasks are followed by one to copy the sentences of these facts, and 50 % by one to give the outcome alone.
    """
    segments: list[Segment] = [
        (f" {plan.facts_text} :", False),
        (f"{state_facts(plan.hops)}{plan.conclusion and f' {plan.conclusion}'}\n", True),
    ]
    if rng.random() < 0.7:
        sentences = " ".join(dict.fromkeys(hop.sentence for hop in plan.hops))
        segments += [(" copy :", False), (f" {sentences}\n", True)]
    if rng.random() < 0.5:
        segments += [(" in short :", False), (f" {outcome}\n", True)]
    return segments


READING_TASKS: tuple[Callable[[WikiLookup, Rng, SeenEntities], list[Segment]], ...] = (
    _value,
    _statement,
    _quote,
    _recite,
    _chain,
    _compare,
    _same,
)
"""Kinds of tasks after passages. Their function names without "_" are the keys of `rrl.miniwiki.probes.reading_probes`."""
_TASK_SHARES = (0.1, 0.14, 0.24, 0.02, 0.22, 0.18, 0.1)
"""Share of each kind in `READING_TASKS`."""


def state_facts(hops: Iterable[Hop]) -> str:
    """Return statements of facts, "The director of X is Y."."""
    return "".join(f" The {hop.query} is {hop.value}." for hop in hops)


def earlier_or_later(rng: Rng) -> str:
    return str(rng.choice(["earlier", "later"]))
