"""Look up entities, passages and facts of a built-in world, and sample related entities. Read `WikiLookup` first."""

import collections
import dataclasses

import numpy as np

from rrl.miniwiki import MiniWiki
from rrl.miniwiki.names import COUNTRY
from rrl.miniwiki.passages import RELATION, RELATIONS, TYPES
from rrl.miniwiki.questions import Hop, RelationKey, hop
from rrl.miniwiki.world import World

_KEYS: dict[str, list[RelationKey]] = {
    kind: [(r.subject, r.name) for r in RELATIONS if r.subject == kind] for kind in TYPES
}
"""Keys of the relations of each entity type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entity:
    """An entity of a world."""

    kind: str
    """Its type, one of `rrl.miniwiki.passages.TYPES`."""
    index: int
    """Its number within the type, counted over all sub-worlds."""


@dataclasses.dataclass(frozen=True, slots=True)
class SeenEntities:
    """Entities whose passages occur earlier in an example."""

    entities: list[Entity]
    """All of them, in order."""
    recent: list[Entity]
    """Those of the last block of passages. A sampled fact is about one of them in half of the draws, otherwise about any."""

    def of(self, kind: str) -> list[Entity]:
        """Return the entities of one type."""
        return [entity for entity in self.entities if entity.kind == kind]


def facts_of(world: World, entity: Entity) -> list[RelationKey]:
    """Return the keys of the facts that an entity has."""
    return [key for key in _KEYS[entity.kind] if world.facts[key][entity.index] >= 0]


class WikiLookup:
    """An index of a wiki: passages by entity, entities by name, and entities that share a word of their names."""

    def __init__(self, wiki: MiniWiki) -> None:
        self.world = wiki.world
        self.spans = wiki.spans
        self._text = {
            entity: passage.text for entity, passage in zip(self._in_order(), wiki.passages, strict=True)
        }
        self._by_title = {self.title(entity): entity for entity in self._text}
        self._by_word: dict[tuple[int, str], list[Entity]] = collections.defaultdict(list)
        for entity in self._text:
            for word in self.title(entity).split():
                if word[0].isupper() and word != "The":
                    self._by_word[self.world_of(entity), word].append(entity)

    def _in_order(self) -> list[Entity]:
        """Return all entities in the order of the wiki's passages."""
        starts = self.world.layout.starts
        return [
            Entity(kind, i)
            for w in range(len(self.spans))
            for kind in TYPES
            for i in range(int(starts[kind][w]), int(starts[kind][w + 1]))
        ]

    def title(self, entity: Entity) -> str:
        """Return the name of an entity, which is the title of its passage."""
        return self.world.names[entity.kind][entity.index]

    def has_entity(self, title: str) -> bool:
        """Return whether there is an entity of this name."""
        return title in self._by_title

    def entity_named(self, title: str) -> Entity:
        """Return the entity of a name. Raises KeyError if there is none."""
        return self._by_title[title]

    def text(self, entity: Entity) -> str:
        """Return the text of an entity's passage."""
        return self._text[entity]

    def world_of(self, entity: Entity) -> int:
        """Return the sub-world of an entity."""
        return int(self.world.layout.world[entity.kind][entity.index])

    def follow(self, entity: Entity, key: RelationKey) -> Entity | None:
        """Return the entity that is the value of a fact; None for years, countries and missing facts."""
        kind, number = RELATION[key].value, int(self.world.facts[key][entity.index])
        return Entity(kind, number) if kind in TYPES and number >= 0 else None

    def sample_fact(self, rng: np.random.Generator, seen: SeenEntities) -> Hop:
        """Sample a fact of an entity in `seen`."""
        candidates = seen.recent if rng.random() < 0.5 else seen.entities
        entity = candidates[int(rng.integers(len(candidates)))]
        keys = facts_of(self.world, entity)
        return hop(self.world, keys[int(rng.integers(len(keys)))], entity.index)

    def sample_names(self, rng: np.random.Generator, world: int, kind: str, n: int) -> list[str]:
        """Sample `n` different names of one type (or countries) in a sub-world."""
        if kind == "country":
            return [COUNTRY[i] for i in rng.choice(len(COUNTRY), n, replace=False)]
        low, high = self.world.layout.starts[kind][world : world + 2].tolist()
        return [self.world.names[kind][low + i] for i in rng.choice(high - low, n, replace=False).tolist()]

    def sample_entities(self, rng: np.random.Generator, n: int) -> SeenEntities:
        """Sample `n` different entities of one sub-world, in random order.

        After the first, each is the value of a fact of an earlier one, shares a word of its name, has the same type, or is
        unrelated.
        """
        world = int(rng.integers(len(self.spans)))
        chosen: dict[Entity, None] = {self.sample_entity(rng, world): None}
        while len(chosen) < n:
            known = list(chosen)
            last = known[int(rng.integers(len(known)))]
            draw = rng.random()
            other: Entity | None = None
            if draw < 0.4:
                keys = facts_of(self.world, last)
                other = self.follow(last, keys[int(rng.integers(len(keys)))])
            elif draw < 0.6:
                words = [word for word in self.title(last).split() if (world, word) in self._by_word]
                namesakes = self._by_word[world, words[int(rng.integers(len(words)))]]
                other = namesakes[int(rng.integers(len(namesakes)))]
            elif draw < 0.8:
                low, high = self.world.layout.starts[last.kind][world : world + 2].tolist()
                other = Entity(last.kind, int(rng.integers(low, high)))
            chosen[other or self.sample_entity(rng, world)] = None
        entities = list(chosen)
        order = rng.permutation(n)
        shuffled = [entities[i] for i in order]
        return SeenEntities(shuffled, shuffled)

    def sample_entity(self, rng: np.random.Generator, world: int) -> Entity:
        """Sample any entity of a sub-world."""
        kind = TYPES[int(rng.integers(len(TYPES)))]
        low, high = self.world.layout.starts[kind][world : world + 2].tolist()
        return Entity(kind, int(rng.integers(low, high)))
