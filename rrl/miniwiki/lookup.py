"""Look up entities, passages and facts of a built-in world, and sample related entities. Read `WikiLookup` first."""

import collections
import dataclasses

import numpy as np

from rrl.miniwiki import MiniWiki
from rrl.miniwiki.names import COUNTRY
from rrl.miniwiki.plans import Hop, RelationKey, make_hop
from rrl.miniwiki.relations import RELATION_BY_KEY, RELATIONS, TYPES
from rrl.miniwiki.world import World

_RELATION_KEYS: dict[str, list[RelationKey]] = {
    entity_type: [(r.subject_type, r.name) for r in RELATIONS if r.subject_type == entity_type]
    for entity_type in TYPES
}
"""Keys of the relations of each entity type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entity:
    """An entity of a world."""

    type: str
    """One of `rrl.miniwiki.relations.TYPES`."""
    index: int
    """Its index within the type, counted over all sub-worlds."""


@dataclasses.dataclass(frozen=True, slots=True)
class SeenEntities:
    """Entities whose passages occur earlier in an example."""

    entities: list[Entity]
    """All of them, in the order of their passages."""
    recent: list[Entity]
    """The entities of the latest block of passages (see `rrl.miniwiki.reading`). `sample_fact` draws half of its facts from them,
    the rest from all entities."""

    def of_type(self, entity_type: str) -> list[Entity]:
        """Return the entities of one type."""
        return [entity for entity in self.entities if entity.type == entity_type]


def fact_keys(world: World, entity: Entity) -> list[RelationKey]:
    """Return the keys of the facts that an entity has."""
    return [key for key in _RELATION_KEYS[entity.type] if world.facts[key][entity.index] >= 0]


class WikiLookup:
    """An index of a wiki: passages by entity, entities by name, and entities that share a word of their names."""

    def __init__(self, wiki: MiniWiki) -> None:
        self.world = wiki.world
        self.subworlds = len(wiki.subworld_ranges)
        """Number of sub-worlds."""
        self._text = {
            entity: passage.text for entity, passage in zip(self._in_order(), wiki.passages, strict=True)
        }
        self._by_title = {self.title(entity): entity for entity in self._text}
        self._by_word: dict[tuple[int, str], list[Entity]] = collections.defaultdict(list)
        for entity in self._text:
            for word in self.title(entity).split():
                if word[0].isupper() and word != "The":
                    self._by_word[self.subworld_of(entity), word].append(entity)

    def _in_order(self) -> list[Entity]:
        """Return all entities in the order of the wiki's passages."""
        starts = self.world.layout.starts
        return [
            Entity(entity_type, i)
            for w in range(self.subworlds)
            for entity_type in TYPES
            for i in range(int(starts[entity_type][w]), int(starts[entity_type][w + 1]))
        ]

    def title(self, entity: Entity) -> str:
        """Return the name of an entity, which is the title of its passage."""
        return self.world.names[entity.type][entity.index]

    def has_entity(self, title: str) -> bool:
        """Return whether there is an entity of this name."""
        return title in self._by_title

    def entity_named(self, title: str) -> Entity:
        """Return the entity of a name. Raises KeyError if there is none."""
        return self._by_title[title]

    def text(self, entity: Entity) -> str:
        """Return the text of an entity's passage."""
        return self._text[entity]

    def subworld_of(self, entity: Entity) -> int:
        """Return the index of an entity's sub-world."""
        return int(self.world.layout.subworld[entity.type][entity.index])

    def follow(self, entity: Entity, key: RelationKey) -> Entity | None:
        """Return the entity that is the value of a fact; None for years, countries and missing facts."""
        value_type, value = RELATION_BY_KEY[key].value_type, int(self.world.facts[key][entity.index])
        return Entity(value_type, value) if value_type in TYPES and value >= 0 else None

    def sample_fact(self, rng: np.random.Generator, seen: SeenEntities) -> Hop:
        """Sample a fact of an entity in `seen`."""
        candidates = seen.recent if rng.random() < 0.5 else seen.entities
        entity = candidates[int(rng.integers(len(candidates)))]
        keys = fact_keys(self.world, entity)
        return make_hop(self.world, keys[int(rng.integers(len(keys)))], entity.index)

    def sample_names(self, rng: np.random.Generator, subworld: int, value_type: str, n: int) -> list[str]:
        """Sample `n` different names of entities of a type in a sub-world, or of countries if `value_type` is "country"."""
        if value_type == "country":
            return [COUNTRY[i] for i in rng.choice(len(COUNTRY), n, replace=False)]
        low, high = self.world.layout.starts[value_type][subworld : subworld + 2].tolist()
        return [
            self.world.names[value_type][low + i] for i in rng.choice(high - low, n, replace=False).tolist()
        ]

    def sample_entities(self, rng: np.random.Generator, n: int) -> SeenEntities:
        """Sample `n` different entities of one sub-world.

        Each draw after the first takes the value of a fact of an entity drawn before, one that shares a word of its name, one of
        the same type, or any entity. The result is shuffled.
        """
        subworld = int(rng.integers(self.subworlds))
        chosen: dict[Entity, None] = {self.sample_entity(rng, subworld): None}
        while len(chosen) < n:
            candidates = list(chosen)
            earlier = candidates[int(rng.integers(len(candidates)))]
            draw = rng.random()
            other: Entity | None = None
            if draw < 0.4:
                keys = fact_keys(self.world, earlier)
                other = self.follow(earlier, keys[int(rng.integers(len(keys)))])
            elif draw < 0.6:
                words = [word for word in self.title(earlier).split() if (subworld, word) in self._by_word]
                sharing_word = self._by_word[subworld, words[int(rng.integers(len(words)))]]
                other = sharing_word[int(rng.integers(len(sharing_word)))]
            elif draw < 0.8:
                low, high = self.world.layout.starts[earlier.type][subworld : subworld + 2].tolist()
                other = Entity(earlier.type, int(rng.integers(low, high)))
            chosen[other or self.sample_entity(rng, subworld)] = None
        entities = list(chosen)
        order = rng.permutation(n)
        shuffled = [entities[i] for i in order]
        return SeenEntities(shuffled, shuffled)

    def sample_entity(self, rng: np.random.Generator, subworld: int) -> Entity:
        """Sample any entity of a sub-world."""
        entity_type = TYPES[int(rng.integers(len(TYPES)))]
        low, high = self.world.layout.starts[entity_type][subworld : subworld + 2].tolist()
        return Entity(entity_type, int(rng.integers(low, high)))
