"""Drills: short tasks of comparing and copying, without passages. Read `drill_segments` first."""

import itertools
from collections.abc import Iterable

import numpy as np

from rrl.miniwiki.comparisons import (
    BRIDGES,
    EQUALITY_COMPARISONS,
    YEAR_COMPARISONS,
    conclude_equality,
    conclude_years,
)
from rrl.miniwiki.lookup import WikiLookup
from rrl.miniwiki.plans import Hop, RelationKey
from rrl.miniwiki.reading_tasks import Rng, Segment, earlier_or_later, state_facts
from rrl.miniwiki.relations import RELATION_BY_KEY, RELATIONS

YEAR_RANGES = tuple(relation.years for relation in RELATIONS if relation.value_type == "year")
"""First and last year of each relation whose values are years."""


def drill_segments(lookup: WikiLookup, rng: Rng) -> list[Segment]:
    """Return 8 to 19 short tasks without passages."""
    subworld = int(rng.integers(lookup.subworlds))
    segments: list[Segment] = []
    for _ in range(int(rng.integers(8, 20))):
        drill = (_choose_year, _conclude_years, _conclude_equality, _copy_names)[
            int(rng.choice(4, p=[0.3, 0.45, 0.2, 0.05]))
        ]
        segments += drill(lookup, rng, subworld)
    return segments


def _choose_year(lookup: WikiLookup, rng: Rng, subworld: int) -> list[Segment]:
    """Drill: choose the earlier or later of two years."""
    low, high = YEAR_RANGES[int(rng.integers(len(YEAR_RANGES)))]
    a, b = rng.choice(np.arange(low, high + 1), 2, replace=False).tolist()
    word = earlier_or_later(rng)
    return [(f" {word}, {a} or {b} :", False), (f" {min(a, b) if word == 'earlier' else max(a, b)}\n", True)]


def _conclude_years(lookup: WikiLookup, rng: Rng, subworld: int) -> list[Segment]:
    """Drill: conclude from stated years which of two entities is earlier or later.

    In a bridge comparison the years are those of the directors, authors or founders of the entities.
    """
    bridge = rng.random() < 0.4
    comparison = YEAR_COMPARISONS[0 if bridge else int(rng.integers(len(YEAR_COMPARISONS)))]
    key = (comparison.entity_type, comparison.relation)
    low, high = RELATION_BY_KEY[key].years
    years = rng.choice(np.arange(low, high + 1), 2, replace=False)
    branches, bridge_phrase = _branches(lookup, rng, subworld, key, map(str, years), bridge)
    word = earlier_or_later(rng)
    _, conclusion = conclude_years(branches, word, comparison.verb, bridge_phrase)
    return [(f" {word} :{state_facts(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


def _conclude_equality(lookup: WikiLookup, rng: Rng, subworld: int) -> list[Segment]:
    """Drill: conclude from stated cities, companies or countries of two entities whether they are the same."""
    key, (verb, *_) = list(EQUALITY_COMPARISONS.items())[int(rng.integers(len(EQUALITY_COMPARISONS)))]
    x, y = lookup.sample_names(rng, subworld, RELATION_BY_KEY[key].value_type, 2)
    values = (x, x if rng.random() < 0.5 else y)
    branches, _ = _branches(
        lookup, rng, subworld, key, values, key[0] == "person" and bool(rng.random() < 0.5)
    )
    _, conclusion = conclude_equality(branches, verb)
    return [(f" same :{state_facts(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


def _branches(
    lookup: WikiLookup, rng: Rng, subworld: int, key: RelationKey, values: Iterable[str], bridge: bool
) -> tuple[tuple[tuple[Hop, ...], ...], str]:
    """Return two branches of invented facts whose last values are `values`, and the phrase for `conclude_years`.

    With `bridge`, each branch has two facts: the director, author or founder, and the value of that person. The phrase is then,
    for example, "the director of", otherwise "".
    """

    def fact(key: RelationKey, subject: str, value: str) -> Hop:
        return Hop(subject, key[1], value, RELATION_BY_KEY[key].query(subject), "", subject)

    names = lookup.sample_names(rng, subworld, key[0], 2)
    ends = [fact(key, name, value) for name, value in zip(names, values, strict=True)]
    if not bridge:
        return tuple((end,) for end in ends), ""
    bridge_key = BRIDGES[int(rng.integers(len(BRIDGES)))]
    works = lookup.sample_names(rng, subworld, bridge_key[0], 2)
    return tuple(
        (fact(bridge_key, work, end.subject), end) for work, end in zip(works, ends, strict=True)
    ), f"the {bridge_key[1]} of"


def _copy_names(lookup: WikiLookup, rng: Rng, subworld: int) -> list[Segment]:
    """Drill: copy a list of names."""
    entity_type = str(rng.choice(["person", "film", "book", "company", "city"]))
    names = " ".join(
        f"{name}." for name in lookup.sample_names(rng, subworld, entity_type, int(rng.integers(1, 5)))
    )
    return [(f" copy : {names} :", False), (f" {names}\n", True)]
