"""Plans that answer questions about the built-in world: the facts to look up, and the conclusion from them."""

import dataclasses

from rrl.miniwiki.relations import RELATION_BY_KEY
from rrl.miniwiki.world import World

RelationKey = tuple[str, str]
"""Subject type and relation."""

Chain = tuple[RelationKey, ...]
"""Relations in order: the subject of each is the value of the one before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """A fact that a plan looks up."""

    subject: str
    relation: str
    value: str
    query: str
    """The search query for the fact, such as "director of Silver Harbour"."""
    sentence: str
    """The sentence of a passage that states the fact."""
    title: str
    """The title of that passage, which is the subject."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How to answer a question: the facts to look up, and the conclusion from them."""

    hops: tuple[Hop, ...]
    """The facts in order."""
    conclusion: str
    """The sentence that compares the facts; "" if the question is not a comparison."""

    @property
    def facts_text(self) -> str:
        """The required facts as text: "author of X, spouse", or "founding year of A; founding year of B; earlier".

        A comparison has two branches of equal length, one for each compared entity; other plans have one branch.
        """
        hops, branch_length = self.hops, len(self.hops) // (2 if self.conclusion else 1)
        parts = [
            ", ".join([hops[at].query, *(hop.relation for hop in hops[at + 1 : at + branch_length])])
            for at in range(0, len(hops), branch_length)
        ]
        if self.conclusion:
            parts.append(
                next((word for word in ("earlier", "later") if f" {word}" in self.conclusion), "same")
            )
        return "; ".join(parts)


def make_hop(world: World, key: RelationKey, entity: int) -> Hop:
    """Return the hop that looks up a fact of an entity, which must have this fact."""
    entity_type, relation = key
    name = world.names[entity_type][entity]
    return Hop(
        name,
        relation,
        world.value(entity_type, relation, entity),
        RELATION_BY_KEY[key].query(name),
        world.sentence_of(entity_type, relation, entity),
        name,
    )


def hops_along(world: World, chain: Chain, entity: int) -> tuple[Hop, ...]:
    """Return the hops of a chain that starts at `entity`."""
    hops = []
    for key in chain:
        hops.append(make_hop(world, key, entity))
        entity = int(world.facts[key][entity])
    return tuple(hops)
