"""Reading, copying and comparing: the endless stream of text before any protocol is learned.

An example is what an observation looks like, `(Title: T) text` one passage a line, followed by short orders such as
" director of Silver Harbour :" and their answers, or a list of exercises without passages. One exercise says which facts a
question asks for, as any language model understands a question; there are no tags, no searches and no answers to it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.miniwiki import KINDS, MiniWiki
from rrl.miniwiki.lookup import Entity, SeenEntities, WikiLookup, facts_of
from rrl.miniwiki.passages import RELATION, RELATIONS
from rrl.miniwiki.questions import (
    BRIDGES,
    EQUALITY_COMPARISONS,
    YEAR_COMPARISONS,
    Hop,
    Plan,
    RelationKey,
    conclude_equality,
    conclude_years,
    hop,
)

Segment = tuple[str, bool]
"""Text, and whether it is a target."""

Rng = np.random.Generator


class ExampleWriter:
    """Turns segments of text into one example; remembers the tokens of segments it has seen (passages come again)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def example(self, segments: list[Segment], limit: int, everything: bool = False) -> Example:
        """Segments begin with a space or end with a line, so that tokens are the same as those of the whole text."""
        unknown = [text for text, _ in segments if text not in self._known]
        if unknown:
            if len(self._known) > 200_000:
                self._known.clear()
                unknown = [text for text, _ in segments]
            ids = self._tokenizer(unknown, add_special_tokens=False)["input_ids"]
            self._known.update(zip(unknown, ids, strict=True))
        tokens: list[int] = []
        loss: list[bool] = []
        for text, target in segments:
            part = self._known[text]
            tokens += part
            loss += [target or everything] * len(part)
        loss[0] = False
        return Example(np.array(tokens[:limit], np.int32), np.array(loss[:limit], bool))


def reading_examples(
    wiki: MiniWiki,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    plain: float = 0.1,
    drills: float = 0.2,
    questions: float = 0.1,
    most_passages: int = 9,
    limit: int = 640,
) -> Iterator[Example]:
    """An endless stream of reading examples; the same arguments give the same stream.

    Targets are the answers to the orders, and every mention of a passage's subject after its title (the cheapest
    lesson in copying).

    Args:
      wiki: where passages come from; each example stays in one sub-world.
      tokenizer: any; it must not join what stands before a space to what follows.
      seed: order and choice.
      plain: share of examples in which every token is a target, passages too.
      drills: share of examples without passages: comparing years and names, and copying, many to an example.
      questions: share of examples that are questions, each followed by the facts it asks for.
      most_passages: 1 to this many passages in an example.
      limit: longest example in tokens; longer ones are cut.
    """
    rng = np.random.default_rng((seed, 1))
    lookup, writer = WikiLookup(wiki), ExampleWriter(tokenizer)
    asked = _questions(wiki, seed) if questions else []
    while True:
        draw = rng.random()
        if draw < drills:
            segments = drill_segments(lookup, rng)
        elif draw < drills + questions:
            chosen = rng.integers(len(asked), size=int(rng.integers(6, 13))).tolist()
            segments = [segment for i in chosen for segment in asked[i]]
        else:
            segments = passage_segments(lookup, rng, int(rng.integers(1, most_passages + 1)))
        yield writer.example(segments, limit, everything=bool(rng.random() < plain))


def passage_segments(lookup: WikiLookup, rng: Rng, passages: int) -> list[Segment]:
    """Passages in one to three blocks, each followed by orders about any passage read so far."""
    context = lookup.sample_entities(rng, passages)
    blocks = min(passages, int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])))
    cuts = (
        sorted(rng.choice(np.arange(1, passages), blocks - 1, replace=False).tolist()) if blocks > 1 else []
    )
    segments: list[Segment] = []
    for low, high in itertools.pairwise([0, *cuts, passages]):
        for entity in context.entities[low:high]:
            segments += _passage(lookup, entity)
        seen = SeenEntities(context.entities[:high], context.entities[low:high])
        for _ in range(int(rng.integers(1, 6 // blocks + 1))):
            segments += _task(lookup, rng, seen)
    return segments


def _passage(lookup: WikiLookup, entity: Entity) -> list[Segment]:
    """A passage in which the subject's mentions after the title are targets."""
    title, text = lookup.title(entity), lookup.text(entity)
    segments: list[Segment] = [(f"(Title: {title})", False)]
    for i, between in enumerate(f" {text}".split(f" {title}")):
        if i:
            segments.append((f" {title}", True))
        if between:
            segments.append((between, False))
    return [*segments, ("\n", False)]


def _task(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """One order that the passages seen can answer; a look-up where the drawn one does not fit."""
    made = READING_TASKS[int(rng.choice(len(READING_TASKS), p=_TASK_SHARES))](lookup, rng, seen)
    return made or _value(lookup, rng, seen)


def _value(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    found = lookup.sample_fact(rng, seen)
    return [(f" {found.query} :", False), (f" {found.value}\n", True)]


def _statement(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    found = lookup.sample_fact(rng, seen)
    return [(f" The {found.query} is", False), (f" {found.value}.\n", True)]


def _quote(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """The sentences that state one to four facts, in the order asked."""
    found = [
        lookup.sample_fact(rng, seen) for _ in range(int(rng.choice([1, 2, 3, 4], p=[0.5, 0.25, 0.15, 0.1])))
    ]
    asked = ",".join(f" {item.query}" for item in found)
    said = " ".join(dict.fromkeys(item.sentence for item in found))
    return [(f" copy{asked} :", False), (f" {said}\n", True)]


def _recite(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """What the passage about X says."""
    entity = seen.entities[int(rng.integers(len(seen.entities)))]
    return [(f" passage of {lookup.title(entity)} :", False), (f" {lookup.text(entity)}\n", True)]


def _chain(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Two statements, the second about the value of the first."""
    links = [
        (entity, key, lookup.follow(entity, key))
        for entity in seen.entities
        for key in facts_of(lookup.world, entity)
        if lookup.follow(entity, key) in seen.entities
    ]
    if not links:
        return []
    entity, key, value = links[int(rng.integers(len(links)))]
    assert value is not None
    keys = [key for key in facts_of(lookup.world, value) if lookup.follow(value, key) != entity]
    second = keys[int(rng.integers(len(keys)))]
    hops = (hop(lookup.world, key, entity.index), hop(lookup.world, second, value.index))
    return _derivation(rng, Plan(hops, ""), hops[-1].value)


def _compare(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Which of two passages' subjects is earlier or later, after stating both years."""
    choices = [
        (order, pair) for order in YEAR_COMPARISONS for pair in itertools.combinations(seen.of(order.kind), 2)
    ]
    if not choices:
        return []
    order, pair = choices[int(rng.integers(len(choices)))]
    a, b = (
        hop(lookup.world, (order.kind, order.relation), entity.index)
        for entity in (pair if rng.random() < 0.5 else pair[::-1])
    )
    if a.value == b.value:
        return []
    answer, conclusion = conclude_years(((a,), (b,)), _earlier_or_later(rng), order.verb, "")
    return _derivation(rng, Plan((a, b), conclusion), answer)


def _same(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
    """Whether two passages' subjects share a city, company or country, after stating both."""
    choices = [
        (key, pair)
        for key in EQUALITY_COMPARISONS
        for pair in itertools.combinations(seen.of(key[0]), 2)
        if all(lookup.world.facts[key][entity.index] >= 0 for entity in pair)
    ]
    if not choices:
        return []
    equal = [c for c in choices if len({int(lookup.world.facts[c[0]][entity.index]) for entity in c[1]}) == 1]
    if equal and rng.random() < 0.5:
        choices = equal
    key, pair = choices[int(rng.integers(len(choices)))]
    a, b = (hop(lookup.world, key, entity.index) for entity in pair)
    answer, conclusion = conclude_equality(((a,), (b,)), EQUALITY_COMPARISONS[key][0])
    return _derivation(rng, Plan((a, b), conclusion), answer)


def _derivation(rng: Rng, plan: Plan, outcome: str) -> list[Segment]:
    """The facts a plan asks for, each stated, and its conclusion; then often the sentences they come from, the outcome."""
    segments: list[Segment] = [
        (f" {plan.facts} :", False),
        (f"{_statements(plan.hops)}{plan.conclusion and f' {plan.conclusion}'}\n", True),
    ]
    if rng.random() < 0.7:
        said = " ".join(dict.fromkeys(item.sentence for item in plan.hops))
        segments += [(" copy :", False), (f" {said}\n", True)]
    if rng.random() < 0.5:
        segments += [(" in short :", False), (f" {outcome}\n", True)]
    return segments


def _statements(hops: Iterable[Hop]) -> str:
    return "".join(f" The {item.query} is {item.value}." for item in hops)


def _earlier_or_later(rng: Rng) -> str:
    return str(rng.choice(["earlier", "later"]))


READING_TASKS: tuple[Callable[[WikiLookup, Rng, SeenEntities], list[Segment]], ...] = (
    _value,
    _statement,
    _quote,
    _recite,
    _chain,
    _compare,
    _same,
)
_TASK_SHARES = (0.1, 0.14, 0.24, 0.02, 0.22, 0.18, 0.1)


def _questions(wiki: MiniWiki, seed: int) -> list[list[Segment]]:
    """Questions of every kind with the facts they ask for."""
    number = max(1, len(wiki.passages) // 20)
    return [
        [(f" {item.question.text} :", False), (f" {item.plan.facts}\n", True)]
        for kind in KINDS
        for item in wiki.questions(kind, number, seed)
    ]


def drill_segments(lookup: WikiLookup, rng: Rng) -> list[Segment]:
    """A dozen or two short lines of one or more exercises, without passages."""
    world = int(rng.integers(len(lookup.spans)))
    segments: list[Segment] = []
    for _ in range(int(rng.integers(8, 20))):
        exercise = (_years, _dated, _equal, _echo)[int(rng.choice(4, p=[0.3, 0.45, 0.2, 0.05]))]
        segments += exercise(lookup, rng, world)
    return segments


def _years(lookup: WikiLookup, rng: Rng, world: int) -> list[Segment]:
    low, high = RELATIONS_WITH_YEARS[int(rng.integers(len(RELATIONS_WITH_YEARS)))]
    a, b = rng.choice(np.arange(low, high + 1), 2, replace=False).tolist()
    word = _earlier_or_later(rng)
    return [(f" {word}, {a} or {b} :", False), (f" {min(a, b) if word == 'earlier' else max(a, b)}\n", True)]


RELATIONS_WITH_YEARS = tuple(relation.years for relation in RELATIONS if relation.value == "year")


def _dated(lookup: WikiLookup, rng: Rng, world: int) -> list[Segment]:
    """Two years as stated, of two names or of those whom two works lead to, and which is earlier or later."""
    bridge = rng.random() < 0.4
    order = YEAR_COMPARISONS[0 if bridge else int(rng.integers(len(YEAR_COMPARISONS)))]
    low, high = RELATION[order.kind, order.relation].years
    years = rng.choice(np.arange(low, high + 1), 2, replace=False)
    branches, role = _branches(lookup, rng, world, (order.kind, order.relation), map(str, years), bridge)
    word = _earlier_or_later(rng)
    _, conclusion = conclude_years(branches, word, order.verb, role)
    return [(f" {word} :{_statements(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


def _equal(lookup: WikiLookup, rng: Rng, world: int) -> list[Segment]:
    """Two cities, companies or countries as stated, and whether they are the same."""
    key, (verb, *_) = list(EQUALITY_COMPARISONS.items())[int(rng.integers(len(EQUALITY_COMPARISONS)))]
    x, y = lookup.sample_names(rng, world, RELATION[key].value, 2)
    values = (x, x if rng.random() < 0.5 else y)
    branches, _ = _branches(lookup, rng, world, key, values, key[0] == "person" and bool(rng.random() < 0.5))
    _, conclusion = conclude_equality(branches, verb)
    return [(f" same :{_statements(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


def _branches(
    lookup: WikiLookup, rng: Rng, world: int, key: RelationKey, values: Iterable[str], bridge: bool
) -> tuple[tuple[tuple[Hop, ...], ...], str]:
    """Two made-up lines of facts that end in `values`, through a work where `bridge` says so, and the bridge's role."""

    def fact(key: RelationKey, subject: str, value: str) -> Hop:
        return Hop(subject, key[1], value, RELATION[key].query(subject), "", subject)

    names = lookup.sample_names(rng, world, key[0], 2)
    ends = [fact(key, name, value) for name, value in zip(names, values, strict=True)]
    if not bridge:
        return tuple((end,) for end in ends), ""
    head = BRIDGES[int(rng.integers(len(BRIDGES)))]
    works = lookup.sample_names(rng, world, head[0], 2)
    return tuple(
        (fact(head, work, end.subject), end) for work, end in zip(works, ends, strict=True)
    ), f"the {head[1]} of"


def _echo(lookup: WikiLookup, rng: Rng, world: int) -> list[Segment]:
    """A list of names, said again in the same order."""
    kind = str(rng.choice(["person", "film", "book", "company", "city"]))
    said = " ".join(f"{name}." for name in lookup.sample_names(rng, world, kind, int(rng.integers(1, 5))))
    return [(f" copy : {said} :", False), (f" {said}\n", True)]
