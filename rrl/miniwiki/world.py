"""Generate a world with random facts: entities, their facts, and a passage about each. Read `build_world` first."""

import dataclasses

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.miniwiki.names import COUNTRY, SPLITS, draw_names
from rrl.miniwiki.relations import (
    RELATION_BY_KEY,
    RELATIONS,
    SENTENCE_SLOTS,
    SLOT_OF,
    TEMPLATES_PER_SLOT,
    TYPES,
)

SHARES = {"person": 0.36, "film": 0.20, "book": 0.16, "company": 0.14, "city": 0.14}
"""Share of each entity type in a sub-world."""

MIN_PASSAGES = 50
"""Minimum number of passages in a sub-world."""
MAX_PASSAGES = 1_000_000
"""Maximum number of passages in all sub-worlds together."""

MARRIED_SHARE = 0.8
"""Probability that two persons who form a pair are married."""
EMPLOYED_SHARE_OF_MARRIED = 0.5
"""Probability that a married person has an employer; unmarried persons always have one."""


@dataclasses.dataclass(frozen=True)
class EntityLayout:
    """Which entities belong to which sub-world, by entity type. W: number of sub-worlds; n: number of entities of the type."""

    starts: dict[str, Int[np.ndarray, "W+1"]]
    """The entities of sub-world w have the indices starts[w] to starts[w + 1] - 1."""
    subworld: dict[str, Int[np.ndarray, "n"]]
    """Index of the sub-world of each entity."""

    def random_values(
        self, rng: np.random.Generator, subject_type: str, value_type: str
    ) -> Int[np.ndarray, "n"]:
        """Return, for each entity of `subject_type`, a random entity of `value_type` in the same sub-world."""
        start, subworld = self.starts[value_type], self.subworld[subject_type]
        size = np.diff(start)[subworld]
        return start[subworld] + (rng.random(len(subworld)) * size).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class World:
    """One or more sub-worlds, which no fact connects. An entity is an index within its type, counted over all sub-worlds."""

    split: str
    seed: int
    layout: EntityLayout
    names: dict[str, list[str]]
    """Names of the entities, by type."""
    facts: dict[tuple[str, str], Int[np.ndarray, "n"]]
    """By (subject type, relation), the value for each entity: a year, or the index of a country or entity; -1 for no fact."""
    wording: dict[str, Int[np.ndarray, "n slots"]]
    """By type, the index of the template of each sentence."""
    first_slot: dict[str, Int[np.ndarray, "n"]]
    """By type, the slot with which each passage starts."""

    def value(self, entity_type: str, relation: str, entity: int) -> str:
        """Return the value of a fact as text; "" if the entity has no such fact."""
        value = int(self.facts[entity_type, relation][entity])
        if value < 0:
            return ""
        target = RELATION_BY_KEY[entity_type, relation].value_type
        if target == "year":
            return str(value)
        return COUNTRY[value] if target == "country" else self.names[target][value]

    def sentence(self, entity_type: str, slot: int, entity: int) -> str:
        """Return the sentence of `slot` in the passage about `entity`; "" if its fact does not exist."""
        sentence_slot = SENTENCE_SLOTS[entity_type][slot]
        values = [self.value(entity_type, relation, entity) for relation in sentence_slot.relations]
        if not values[0]:
            return ""
        return sentence_slot.templates[self.wording[entity_type][entity, slot]].format(
            self.names[entity_type][entity], *values
        )

    def sentence_of(self, entity_type: str, relation: str, entity: int) -> str:
        """Return the sentence about an entity that states a relation."""
        return self.sentence(entity_type, SLOT_OF[entity_type, relation], entity)

    def sentences(self, entity_type: str, entity: int) -> list[str]:
        """Return all sentences of the passage about `entity`, in order."""
        slots = len(SENTENCE_SLOTS[entity_type])
        first = int(self.first_slot[entity_type][entity])
        written = (self.sentence(entity_type, (first + i) % slots, entity) for i in range(slots))
        return [sentence for sentence in written if sentence]


def build_world(split: str, seed: int, passages: int, worlds: int = 1) -> World:
    """Draw names, facts and wordings. The same arguments give the same world.

    Args:
      split: "train", "dev" or "test"; no name of one split occurs in another.
      seed: seed of names, facts and wordings.
      passages: total number of entities, 50 to 1,000,000.
      worlds: number of sub-worlds, with at least 50 entities each; facts never connect two of them.

    Raises:
      UserError: an argument is out of range.
    """
    _check(split, seed, passages, worlds)
    rng = np.random.default_rng((seed, SPLITS.index(split), passages, worlds))
    layout = _lay_out(passages, worlds)
    names = _draw_names(rng, layout, split, seed)
    facts = _draw_facts(rng, layout)
    wording, first_slot = {}, {}
    for entity_type in TYPES:
        n, slots = len(names[entity_type]), len(SENTENCE_SLOTS[entity_type])
        wording[entity_type] = rng.integers(0, TEMPLATES_PER_SLOT, (n, slots), dtype=np.int8)
        # 70 % of the passages start with slot 0, the others with a random slot.
        first_slot[entity_type] = np.where(rng.random(n) < 0.7, 0, rng.integers(0, slots, n)).astype(np.int8)
    return World(split, seed, layout, names, facts, wording, first_slot)


def _check(split: str, seed: int, passages: int, worlds: int) -> None:
    """Raise UserError if an argument of `build_world` is out of range."""
    if split not in SPLITS:
        raise UserError(f"split={split!r}: allowed are {', '.join(SPLITS)}")
    if seed < 0:
        raise UserError(f"seed={seed}: must be 0 or more")
    if worlds < 1:
        raise UserError(f"worlds={worlds}: must be 1 or more")
    if not MIN_PASSAGES * worlds <= passages <= MAX_PASSAGES:
        raise UserError(
            f"passages={passages}, worlds={worlds}: allowed are {MIN_PASSAGES} passages per world to {MAX_PASSAGES:,} in total; "
            f"give at least {MIN_PASSAGES * worlds} passages or fewer worlds"
        )


def _lay_out(passages: int, worlds: int) -> EntityLayout:
    """Divide the entities into sub-worlds and types."""
    edges = np.arange(worlds + 1, dtype=np.int64) * passages // worlds
    sizes = np.diff(edges)
    counts = {entity_type: (sizes * SHARES[entity_type]).astype(np.int64) for entity_type in TYPES}
    counts["person"] = sizes - counts["film"] - counts["book"] - counts["company"] - counts["city"]
    starts = {entity_type: np.concatenate([[0], np.cumsum(counts[entity_type])]) for entity_type in TYPES}
    subworld = {entity_type: np.repeat(np.arange(worlds), counts[entity_type]) for entity_type in TYPES}
    return EntityLayout(starts, subworld)


def _draw_names(
    rng: np.random.Generator, layout: EntityLayout, split: str, seed: int
) -> dict[str, list[str]]:
    """Draw the names of all entities, by type."""
    names = {}
    for family, types in {
        "person": ["person"],
        "work": ["film", "book"],
        "company": ["company"],
        "city": ["city"],
    }.items():
        subworld = np.concatenate([layout.subworld[entity_type] for entity_type in types])
        which_type = np.repeat(np.arange(len(types)), [len(layout.subworld[t]) for t in types])
        drawn = np.asarray(draw_names(family, len(subworld), split, seed), object)
        # Namesakes (similar names, see `rrl.miniwiki.names`) are adjacent in `drawn`. Nearly all pairs therefore come into one
        # sub-world, where an agent can confuse them. Their order and types are random.
        name_of_entity = np.empty(len(subworld), object)
        name_of_entity[np.lexsort((rng.random(len(subworld)), subworld))] = drawn
        for i, entity_type in enumerate(types):
            names[entity_type] = name_of_entity[which_type == i].tolist()
    return names


def _draw_facts(
    rng: np.random.Generator, layout: EntityLayout
) -> dict[tuple[str, str], Int[np.ndarray, "n"]]:
    """Draw the facts of all entities: values are uniform, except for marriages and their effect on employers."""
    facts = {}
    for relation in RELATIONS:
        n = len(layout.subworld[relation.subject_type])
        if relation.value_type == "year":
            drawn = rng.integers(relation.years[0], relation.years[1] + 1, n)
        elif relation.value_type == "country":
            drawn = rng.integers(0, len(COUNTRY), n)
        else:
            drawn = layout.random_values(rng, relation.subject_type, relation.value_type)
        facts[relation.subject_type, relation.name] = drawn
    spouse = _marry(rng, layout)
    jobless = (spouse >= 0) & (rng.random(len(spouse)) >= EMPLOYED_SHARE_OF_MARRIED)
    facts["person", "spouse"] = spouse
    facts["person", "employer"] = np.where(jobless, -1, facts["person", "employer"])
    return facts


def _marry(rng: np.random.Generator, layout: EntityLayout) -> Int[np.ndarray, "n"]:
    """Return the index of each person's spouse, or -1.

    Persons 0 and 1 of a sub-world form a pair, 2 and 3, and so on. This is random, since names have a random order.
    """
    subworld = layout.subworld["person"]
    n = len(subworld)
    rank = np.arange(n) - layout.starts["person"][subworld]
    spouse = np.arange(n) + np.where(rank % 2 == 0, 1, -1)
    unpaired = (spouse >= n) | (subworld[np.minimum(spouse, n - 1)] != subworld)
    unmarried = rng.random(n) >= MARRIED_SHARE
    # The first person's draw decides for both persons of a pair.
    unmarried = np.where(rank % 2 == 0, unmarried, np.roll(unmarried, 1))
    return np.where(unpaired | unmarried, -1, spouse)


def write_passages(world: World) -> list[Passage]:
    """Return one passage for each entity, ordered by sub-world, then by type in the order of TYPES."""
    texts = {entity_type: _write(world, entity_type) for entity_type in TYPES}
    passages: list[Passage] = []
    prefix = f"{world.split}-{world.seed}-"
    for w in range(len(next(iter(world.layout.starts.values()))) - 1):
        for entity_type in TYPES:
            low, high = world.layout.starts[entity_type][w : w + 2].tolist()
            first = len(passages)
            passages.extend(
                Passage(f"{prefix}{first + i}", name, text)
                for i, (name, text) in enumerate(
                    zip(world.names[entity_type][low:high], texts[entity_type][low:high], strict=True)
                )
            )
    return passages


def _write(world: World, entity_type: str) -> list[str]:
    """Return the texts of all passages of a type: the same as from `World.sentences`, but much faster, slot by slot."""
    names = world.names[entity_type]
    columns = []
    for i, slot in enumerate(SENTENCE_SLOTS[entity_type]):
        templates = [template.format for template in slot.templates]
        values = [_texts(world, entity_type, relation) for relation in slot.relations]
        rows = zip(world.wording[entity_type][:, i].tolist(), names, *values, strict=True)
        columns.append([templates[t](name, *rest) if rest[0] else "" for t, name, *rest in rows])
    first_slot = world.first_slot[entity_type].tolist()
    return [
        " ".join([sentence for sentence in row[first:] + row[:first] if sentence])
        for first, row in zip(first_slot, zip(*columns, strict=True), strict=True)
    ]


def _texts(world: World, entity_type: str, relation: str) -> list[str]:
    """Return the values of a relation as text; "" for missing facts."""
    values = world.facts[entity_type, relation]
    target = RELATION_BY_KEY[entity_type, relation].value_type
    if target == "year":
        return list(map(str, values.tolist()))
    # Index -1, for a missing fact, selects the "" at the end.
    table = [*(COUNTRY if target == "country" else world.names[target]), ""]
    return [table[i] for i in values.tolist()]
