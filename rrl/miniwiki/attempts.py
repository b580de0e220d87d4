"""Generate attempts at questions of the built-in world: correct ones, and ones with the typical faults of a weak search agent.

They are training data for judges. Each attempt is a plan that the scripted expert (`rrl.miniwiki.experts`) can carry out. Read
`make_attempt` first.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rrl.miniwiki.lookup import Entity, WikiLookup, fact_keys
from rrl.miniwiki.plans import Hop, Plan, make_hop
from rrl.miniwiki.questions import MiniQuestion
from rrl.miniwiki.relations import RELATION_BY_KEY

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt(Plan):
    """What an agent, possibly a faulty one, does to answer a question. The hops hold the facts as the agent read them."""

    stated_facts: str
    """The facts that the agent says it will look up, in the format of `Plan.facts_text`; they may differ from `hops`."""
    answer: str
    """The agent's answer."""
    failed_hops: frozenset[int] = frozenset()
    """Indices of hops whose search does not return the required passage."""

    @property
    def facts_text(self) -> str:
        """`stated_facts`, in place of the text that `Plan.facts_text` derives from `hops`."""
        return self.stated_facts


def make_attempt(item: MiniQuestion, lookup: WikiLookup, rng: Rng, faulty: float) -> Attempt:
    """Return an attempt at a question. The same arguments (and state of `rng`) give the same attempt.

    Args:
      item: the question with its correct plan.
      lookup: an index of its wiki.
      rng: source of all random choices.
      faulty: probability that a fault is drawn, in [0, 1]. If it does not apply to the question, the attempt is correct.
    """
    correct = Attempt(item.plan.hops, item.plan.conclusion, item.plan.facts_text, item.question.answers[0])
    if rng.random() >= faulty:
        return correct
    # Miscopied names are the most frequent fault of weak agents.
    fault_names = [*FAULTS, "miscopied", "miscopied"]
    hops, failed = FAULTS[fault_names[int(rng.integers(len(fault_names)))]](item, lookup, rng)
    conclusion = item.plan.conclusion
    if hops == item.plan.hops and not failed:
        return correct
    # Half of the faulty comparisons answer without comparing the facts in a conclusion.
    if conclusion and rng.random() < 0.5:
        conclusion = ""
    # Most faulty attempts announce the required facts and then look up others; some announce what they look up.
    stated = item.plan.facts_text if rng.random() < 0.7 else Plan(hops, "").facts_text
    return Attempt(hops, conclusion, stated, _answer(item, hops, rng), failed)


FaultyPlan = tuple[tuple[Hop, ...], frozenset[int]]
"""The hops of a plan with a fault, and the indices of hops whose search fails."""
NO_FAILED_SEARCH: frozenset[int] = frozenset()
"""The second part of `FaultyPlan` if no search fails."""


def _stop_early(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Stop before the last facts."""
    hops = item.plan.hops
    return hops[: int(rng.integers(1, max(len(hops), 2)))], NO_FAILED_SEARCH


def _read_wrong_value(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Read a wrong value of a fact, and continue from that value."""
    before, chosen, relations, after = _split_at_hop(item, rng)
    other = _other_values(item, lookup, rng, chosen, 1)[0]
    return _continue_from(
        lookup, before, dataclasses.replace(chosen, value=other), relations, after
    ), NO_FAILED_SEARCH


def _miscopy_name(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Search for a miscopied name. The name may already be wrong in the hop before, and the value read may be wrong too."""
    before, chosen, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(chosen.subject)
    name = _miscopy(chosen.subject, lookup.sample_names(rng, item.subworld, subject.type, 1)[0], rng)
    if before and before[-1].value == chosen.subject and rng.random() < 0.5:
        before = (*before[:-1], dataclasses.replace(before[-1], value=name))
    value, draw = chosen.value, rng.random()
    # 30 %: another value; 30 %: a miscopied value; 40 %: the correct value.
    if draw < 0.6:
        other = _other_values(item, lookup, rng, chosen, 1)[0]
        value = other if draw < 0.3 else _miscopy(value, other, rng)
    query = RELATION_BY_KEY[subject.type, chosen.relation].query(name)
    misread = dataclasses.replace(chosen, subject=name, value=value, query=query, title=name)
    return _continue_from(lookup, before, misread, relations, after), NO_FAILED_SEARCH


def _look_up_other_relation(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Look up another fact of the same entity, and continue from its value."""
    before, chosen, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(chosen.subject)
    keys = [key for key in fact_keys(lookup.world, subject) if key[1] != chosen.relation]
    if not keys:
        return item.plan.hops, NO_FAILED_SEARCH
    other = make_hop(lookup.world, keys[int(rng.integers(len(keys)))], subject.index)
    return _continue_from(lookup, before, other, relations, after), NO_FAILED_SEARCH


def _look_up_other_entity(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Look up the same relation of another entity of the same type, and continue from its value."""
    before, chosen, relations, after = _split_at_hop(item, rng)
    subject = lookup.entity_named(chosen.subject)
    other = lookup.entity_named(lookup.sample_names(rng, item.subworld, subject.type, 1)[0])
    detour = _chain(lookup, other, [chosen.relation, *relations])
    return (*before, *detour, *after) or item.plan.hops, NO_FAILED_SEARCH


def _skip_hop(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Skip a hop, and continue as if its value were known."""
    hops = item.plan.hops
    at = int(rng.integers(len(hops)))
    return (hops[:at] + hops[at + 1 :]) or hops, NO_FAILED_SEARCH


def _repeat_hop(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Search for one fact twice. Half of the plans then lose their last hop; the others are truncated to four hops."""
    hops = item.plan.hops
    at = int(rng.integers(len(hops)))
    twice = hops[: at + 1] + hops[at:]
    return twice[: len(hops)] if rng.random() < 0.5 else twice[:4], NO_FAILED_SEARCH


def _fail_search(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> FaultyPlan:
    """Let one search return other passages; the agent states the fact nevertheless."""
    return item.plan.hops, frozenset({int(rng.integers(len(item.plan.hops)))})


FAULTS: dict[str, Callable[[MiniQuestion, WikiLookup, Rng], FaultyPlan]] = {
    "early": _stop_early,
    "wrong value": _read_wrong_value,
    "miscopied": _miscopy_name,
    "other relation": _look_up_other_relation,
    "other entity": _look_up_other_entity,
    "skipped": _skip_hop,
    "repeated": _repeat_hop,
    "failed search": _fail_search,
}
"""Faults by name. Each function returns a plan with the fault, or the correct plan if the fault does not apply."""


def wrong_answer(item: MiniQuestion, lookup: WikiLookup, rng: Rng) -> str:
    """Return a wrong answer.

    For a comparison it is the other choice, otherwise a miscopied answer (50 %), the value of the first of several hops (15 %),
    or another value of the answer's type.
    """
    answer, last = item.question.answers[0], item.plan.hops[-1]
    if item.plan.conclusion:
        return _other_of_two(item)
    others = _other_values(item, lookup, rng, last, 2)
    other = others[0] if others[0] != answer else others[1]
    draw = rng.random()
    if draw < 0.5:
        mixed = _miscopy(answer, other, rng)
        return mixed if mixed != answer else other
    return item.plan.hops[0].value if draw < 0.65 and len(item.plan.hops) > 1 else other


def _other_of_two(item: MiniQuestion) -> str:
    """Return the wrong one of the two possible answers to a comparison."""
    answer, hops = item.question.answers[0], item.plan.hops
    opposite = {"yes": "no", "no": "yes"}
    if answer in opposite:
        return opposite[answer]
    first, second = hops[0].subject, hops[len(hops) // 2].subject
    return second if answer == first else first


def _answer(item: MiniQuestion, hops: Sequence[Hop], rng: Rng) -> str:
    """Return the answer of an agent that read these hops: for a comparison, one of the two possible answers."""
    if item.plan.conclusion:
        return item.question.answers[0] if rng.random() < 0.5 else _other_of_two(item)
    return hops[-1].value


def _split_at_hop(item: MiniQuestion, rng: Rng) -> tuple[tuple[Hop, ...], Hop, list[str], tuple[Hop, ...]]:
    """Split a plan at a random hop.

    Returns the hops before it, the hop, the relations that follow it in its branch, and the hops of later branches. A comparison
    has two branches of equal length, other plans have one.
    """
    hops = item.plan.hops
    branch_length = len(hops) // (2 if item.plan.conclusion else 1)
    at = int(rng.integers(len(hops)))
    end = (at // branch_length + 1) * branch_length
    return hops[:at], hops[at], [later.relation for later in hops[at + 1 : end]], hops[end:]


def _continue_from(
    lookup: WikiLookup, before: Sequence[Hop], wrong: Hop, relations: Sequence[str], after: Sequence[Hop]
) -> tuple[Hop, ...]:
    """Return the hops of a plan that continues from the value of a wrong hop, as far as the required facts exist."""
    start = lookup.entity_named(wrong.value) if relations and lookup.has_entity(wrong.value) else None
    return (*before, wrong, *(_chain(lookup, start, relations) if start else ()), *after)


def _chain(lookup: WikiLookup, entity: Entity, relations: Sequence[str]) -> list[Hop]:
    """Follow relations from an entity, and return the hops up to the first missing fact."""
    hops: list[Hop] = []
    current: Entity | None = entity
    for relation in relations:
        if current is None or (current.type, relation) not in fact_keys(lookup.world, current):
            break
        key = (current.type, relation)
        hops.append(make_hop(lookup.world, key, current.index))
        current = lookup.follow(current, key)
    return hops


def _other_values(item: MiniQuestion, lookup: WikiLookup, rng: Rng, fact: Hop, n: int) -> list[str]:
    """Sample `n` different values that a fact of this relation could have."""
    relation = RELATION_BY_KEY[lookup.entity_named(fact.title).type, fact.relation]
    if relation.value_type == "year":
        low, high = relation.years
        return [str(low + year) for year in rng.choice(high - low + 1, n, replace=False).tolist()]
    return lookup.sample_names(rng, item.subworld, relation.value_type, n)


def _miscopy(name: str, other: str, rng: Rng) -> str:
    """Miscopy a name as weak policies do: replace one of its words, or the second half of the word, by that of another name.

    In a name of one word, which may be a year, only the second half is replaced.
    """
    words, other_words = name.split(), other.split()
    at = int(rng.integers(len(words)))
    word, replacement = words[at], other_words[min(at, len(other_words) - 1)]
    if len(words) == 1 or rng.random() < 0.6:
        replacement = word[: (len(word) + 1) // 2] + replacement[len(replacement) // 2 :]
    return " ".join([*words[:at], replacement, *words[at + 1 :]])
