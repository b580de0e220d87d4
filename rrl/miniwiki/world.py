"""Draw a closed encyclopedia with random facts: entities, their facts, and a passage about each. Read `build_world` first."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.miniwiki.names import COUNTRY, SPLITS, draw_names
from rrl.miniwiki.passages import RELATION, RELATIONS, SLOT_OF, SLOTS, TEMPLATES_PER_SLOT, TYPES

SHARES = {"person": 0.36, "film": 0.20, "book": 0.16, "company": 0.14, "city": 0.14}
"""Share of each entity type in a sub-world."""

MIN_PASSAGES = 50
"""Minimum number of passages in a sub-world."""
MAX_PASSAGES = 1_000_000
"""Maximum number of passages in all sub-worlds together."""

MARRIED = 0.8
"""Probability that a pair of persons is married."""
EMPLOYED = 0.5
"""Probability that a married person has an employer; unmarried persons always have one."""


@dataclasses.dataclass(frozen=True)
class EntityLayout:
    """The numbers of the entities of each sub-world, by type."""

    starts: dict[str, Int[np.ndarray, "W+1"]]
    """The entities of sub-world w have the numbers starts[w] to starts[w + 1] - 1."""
    world: dict[str, Int[np.ndarray, "n"]]
    """Sub-world of each entity."""

    def random_other(self, rng: np.random.Generator, subject: str, value: str) -> Int[np.ndarray, "n"]:
        """For each entity of type `subject`, draw an entity of type `value` in the same sub-world."""
        start, world = self.starts[value], self.world[subject]
        size = np.diff(start)[world]
        return start[world] + (rng.random(len(world)) * size).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class World:
    """One or more closed sub-worlds. An entity is a number, counted from 0 within its type over all sub-worlds."""

    split: str
    seed: int
    layout: EntityLayout
    names: dict[str, list[str]]
    """Names of the entities, by type."""
    facts: dict[tuple[str, str], Int[np.ndarray, "n"]]
    """By (subject type, relation), the value for each entity: a year, or the number of a country or entity; -1 for no fact."""
    wording: dict[str, Int[np.ndarray, "n slots"]]
    """By type, the index of the template of each sentence."""
    first_slot: dict[str, Int[np.ndarray, "n"]]
    """By type, the slot with which each passage starts."""

    def value(self, kind: str, relation: str, entity: int) -> str:
        """Return the value of a fact as text; "" if the entity has no such fact."""
        number = int(self.facts[kind, relation][entity])
        if number < 0:
            return ""
        target = RELATION[kind, relation].value
        if target == "year":
            return str(number)
        return COUNTRY[number] if target == "country" else self.names[target][number]

    def sentence(self, kind: str, slot: int, entity: int) -> str:
        """Return the sentence of `slot` in the passage about `entity`; "" if its fact does not exist."""
        form = SLOTS[kind][slot]
        values = [self.value(kind, relation, entity) for relation in form.relations]
        if not values[0]:
            return ""
        return form.templates[self.wording[kind][entity, slot]].format(self.names[kind][entity], *values)

    def sentence_of(self, kind: str, relation: str, entity: int) -> str:
        """Return the sentence about an entity that states a relation."""
        return self.sentence(kind, SLOT_OF[kind, relation], entity)

    def sentences(self, kind: str, entity: int) -> list[str]:
        """Return all sentences of the passage about `entity`, in order."""
        slots = len(SLOTS[kind])
        first = int(self.first_slot[kind][entity])
        written = (self.sentence(kind, (first + i) % slots, entity) for i in range(slots))
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
    for kind in TYPES:
        n, slots = len(names[kind]), len(SLOTS[kind])
        wording[kind] = rng.integers(0, TEMPLATES_PER_SLOT, (n, slots), dtype=np.int8)
        # Most passages have the order of the slots; the others start with a random slot.
        first_slot[kind] = np.where(rng.random(n) < 0.7, 0, rng.integers(0, slots, n)).astype(np.int8)
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
    counts = {kind: (sizes * SHARES[kind]).astype(np.int64) for kind in TYPES}
    counts["person"] = sizes - counts["film"] - counts["book"] - counts["company"] - counts["city"]
    starts = {kind: np.concatenate([[0], np.cumsum(counts[kind])]) for kind in TYPES}
    world = {kind: np.repeat(np.arange(worlds), counts[kind]) for kind in TYPES}
    return EntityLayout(starts, world)


def _draw_names(
    rng: np.random.Generator, layout: EntityLayout, split: str, seed: int
) -> dict[str, list[str]]:
    """Draw the names of all entities, by type."""
    names = {}
    for family, kinds in {
        "person": ["person"],
        "work": ["film", "book"],
        "company": ["company"],
        "city": ["city"],
    }.items():
        world = np.concatenate([layout.world[kind] for kind in kinds])
        kind = np.repeat(np.arange(len(kinds)), [len(layout.world[k]) for k in kinds])
        drawn = np.asarray(draw_names(family, len(world), split, seed), object)
        # Namesakes are adjacent in `drawn`. Keep them in one sub-world, where they are confusable, but shuffle order and type.
        named = np.empty(len(world), object)
        named[np.lexsort((rng.random(len(world)), world))] = drawn
        for i, k in enumerate(kinds):
            names[k] = named[kind == i].tolist()
    return names


def _draw_facts(
    rng: np.random.Generator, layout: EntityLayout
) -> dict[tuple[str, str], Int[np.ndarray, "n"]]:
    """Draw the facts of all entities: values are uniform, except for marriages and their effect on employers."""
    facts = {}
    for relation in RELATIONS:
        n = len(layout.world[relation.subject])
        if relation.value == "year":
            drawn = rng.integers(relation.years[0], relation.years[1] + 1, n)
        elif relation.value == "country":
            drawn = rng.integers(0, len(COUNTRY), n)
        else:
            drawn = layout.random_other(rng, relation.subject, relation.value)
        facts[relation.subject, relation.name] = drawn
    spouse = _marry(rng, layout)
    jobless = (spouse >= 0) & (rng.random(len(spouse)) >= EMPLOYED)
    facts["person", "spouse"] = spouse
    facts["person", "employer"] = np.where(jobless, -1, facts["person", "employer"])
    return facts


def _marry(rng: np.random.Generator, layout: EntityLayout) -> Int[np.ndarray, "n"]:
    """Return the spouse of each person: neighbours in a sub-world marry (names are shuffled before); some stay single."""
    world = layout.world["person"]
    n = len(world)
    rank = np.arange(n) - layout.starts["person"][world]
    spouse = np.arange(n) + np.where(rank % 2 == 0, 1, -1)
    alone = (spouse >= n) | (world[np.minimum(spouse, n - 1)] != world)
    single = rng.random(n) >= MARRIED
    # The draw of the first person decides for both of a pair.
    single = np.where(rank % 2 == 0, single, np.roll(single, 1))
    return np.where(alone | single, -1, spouse)


def write_passages(world: World) -> list[Passage]:
    """Return one passage for each entity, ordered by sub-world, then by type in the order of TYPES."""
    texts = {kind: _write(world, kind) for kind in TYPES}
    passages: list[Passage] = []
    prefix = f"{world.split}-{world.seed}-"
    for w in range(len(next(iter(world.layout.starts.values()))) - 1):
        for kind in TYPES:
            low, high = world.layout.starts[kind][w : w + 2].tolist()
            first = len(passages)
            passages.extend(
                Passage(f"{prefix}{first + i}", name, text)
                for i, (name, text) in enumerate(
                    zip(world.names[kind][low:high], texts[kind][low:high], strict=True)
                )
            )
    return passages


def _write(world: World, kind: str) -> list[str]:
    """Return the texts of all passages of a type: the same as from `World.sentences`, but much faster, slot by slot."""
    names = world.names[kind]
    columns = []
    for i, slot in enumerate(SLOTS[kind]):
        templates = [template.format for template in slot.templates]
        values = [_texts(world, kind, relation) for relation in slot.relations]
        rows = zip(world.wording[kind][:, i].tolist(), names, *values, strict=True)
        columns.append([templates[t](name, *rest) if rest[0] else "" for t, name, *rest in rows])
    first_slot = world.first_slot[kind].tolist()
    join: Callable[..., str] = " ".join
    return [
        join([sentence for sentence in row[first:] + row[:first] if sentence])
        for first, row in zip(first_slot, zip(*columns, strict=True), strict=True)
    ]


def _texts(world: World, kind: str, relation: str) -> list[str]:
    """Return the values of a relation as text; "" for missing facts."""
    numbers = world.facts[kind, relation]
    target = RELATION[kind, relation].value
    if target == "year":
        return list(map(str, numbers.tolist()))
    table = [*(COUNTRY if target == "country" else world.names[target]), ""]
    return [table[i] for i in numbers.tolist()]
