"""Generate pretraining text: reading, copying and comparing, without any protocol. Read `reading_examples` first.

There are three kinds of examples:
- passages in the format of observations, `(Title: T) text` one per line, followed by short tasks such as
  " director of Silver Harbour :" with their answers;
- drills: tasks without passages;
- questions, each followed by the facts that it requires, so that the model understands questions. Answers to them, searches
  and tags do not occur.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.miniwiki import KINDS, MiniWiki
from rrl.miniwiki.lookup import Entity, SeenEntities, WikiLookup, facts_of
from rrl.miniwiki.passages import RELATION_BY_KEY, RELATIONS
from rrl.miniwiki.questions import (
    BRIDGES,
    EQUALITY_COMPARISONS,
    YEAR_COMPARISONS,
    Hop,
    Plan,
    RelationKey,
    conclude_equality,
    conclude_years,
    make_hop,
)

Segment = tuple[str, bool]
"""(text, whether it is a target)."""

Rng = np.random.Generator


class ExampleWriter:
    """Tokenises segments into examples, with a cache, because passages recur."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._cached_ids: dict[str, list[int]] = {}

    def example(self, segments: list[Segment], limit: int, all_targets: bool = False) -> Example:
        """Return the example of these segments, truncated to `limit` tokens.

        Each segment is tokenised separately. The tokens are those of the whole text only if segments begin with a space or end
        with a line break.

        Args:
          segments: texts, and whether they are targets.
          limit: maximum number of tokens.
          all_targets: make every token except the first a target.
        """
        uncached = [text for text, _ in segments if text not in self._cached_ids]
        if uncached:
            if len(self._cached_ids) > 200_000:
                self._cached_ids.clear()
                uncached = [text for text, _ in segments]
            ids = self._tokenizer(uncached, add_special_tokens=False)["input_ids"]
            self._cached_ids.update(zip(uncached, ids, strict=True))
        tokens: list[int] = []
        is_target: list[bool] = []
        for text, target in segments:
            part = self._cached_ids[text]
            tokens += part
            is_target += [target or all_targets] * len(part)
        is_target[0] = False
        return Example(np.array(tokens[:limit], np.int32), np.array(is_target[:limit], bool))


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
    """Yield reading examples without end; the same arguments give the same stream.

    Targets are the answers to the tasks, and the mentions of a passage's subject after its title, which are an easy exercise in
    copying.

    Args:
      wiki: the source of passages; each example stays in one sub-world.
      tokenizer: the tokenizer; it must not merge a space with the text before it.
      seed: seed of all random choices.
      plain: share of examples in which every token is a target, as in plain language modelling, in [0, 1].
      drills: share of examples without passages, each with many short tasks of comparing and copying.
      questions: share of examples with questions, each followed by the facts it requires.
      most_passages: maximum number of passages in an example; the minimum is 1.
      limit: maximum length of an example in tokens; longer examples are truncated.
    """
    rng = np.random.default_rng((seed, 1))
    lookup, writer = WikiLookup(wiki), ExampleWriter(tokenizer)
    segments_of_questions = _question_segments(wiki, seed) if questions else []
    while True:
        draw = rng.random()
        if draw < drills:
            segments = drill_segments(lookup, rng)
        elif draw < drills + questions:
            chosen = rng.integers(len(segments_of_questions), size=int(rng.integers(6, 13))).tolist()
            segments = [segment for i in chosen for segment in segments_of_questions[i]]
        else:
            segments = passage_segments(lookup, rng, int(rng.integers(1, most_passages + 1)))
        yield writer.example(segments, limit, all_targets=bool(rng.random() < plain))


def passage_segments(lookup: WikiLookup, rng: Rng, passages: int) -> list[Segment]:
    """Return passages in one to three blocks, each followed by tasks about the passages so far."""
    sampled = lookup.sample_entities(rng, passages)
    blocks = min(passages, int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])))
    cuts = (
        sorted(rng.choice(np.arange(1, passages), blocks - 1, replace=False).tolist()) if blocks > 1 else []
    )
    segments: list[Segment] = []
    for low, high in itertools.pairwise([0, *cuts, passages]):
        for entity in sampled.entities[low:high]:
            segments += _passage(lookup, entity)
        seen = SeenEntities(sampled.entities[:high], sampled.entities[low:high])
        # At most 6 tasks in an example.
        for _ in range(int(rng.integers(1, 6 // blocks + 1))):
            segments += _task(lookup, rng, seen)
    return segments


def _passage(lookup: WikiLookup, entity: Entity) -> list[Segment]:
    """Return a passage in which the mentions of the subject after the title are targets."""
    title, text = lookup.title(entity), lookup.text(entity)
    segments: list[Segment] = [(f"(Title: {title})", False)]
    for i, between in enumerate(f" {text}".split(f" {title}")):
        if i:
            segments.append((f" {title}", True))
        if between:
            segments.append((between, False))
    return [*segments, ("\n", False)]


def _task(lookup: WikiLookup, rng: Rng, seen: SeenEntities) -> list[Segment]:
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
        for key in facts_of(lookup.world, entity)
        if lookup.follow(entity, key) in seen.entities
    ]
    if not links:
        return []
    entity, key, value = links[int(rng.integers(len(links)))]
    assert value is not None
    keys = [key for key in facts_of(lookup.world, value) if lookup.follow(value, key) != entity]
    second = keys[int(rng.integers(len(keys)))]
    hops = (make_hop(lookup.world, key, entity.index), make_hop(lookup.world, second, value.index))
    return _derivation(rng, Plan(hops, ""), hops[-1].value)


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
    answer, conclusion = conclude_years(((a,), (b,)), _earlier_or_later(rng), comparison.verb, "")
    return _derivation(rng, Plan((a, b), conclusion), answer)


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
    return _derivation(rng, Plan((a, b), conclusion), answer)


def _derivation(rng: Rng, plan: Plan, outcome: str) -> list[Segment]:
    """Return the task to carry out a plan: state its facts and its conclusion.

    Often the model must then copy the sentences of these facts, or give the outcome alone.
    """
    segments: list[Segment] = [
        (f" {plan.facts} :", False),
        (f"{_statements(plan.hops)}{plan.conclusion and f' {plan.conclusion}'}\n", True),
    ]
    if rng.random() < 0.7:
        sentences = " ".join(dict.fromkeys(item.sentence for item in plan.hops))
        segments += [(" copy :", False), (f" {sentences}\n", True)]
    if rng.random() < 0.5:
        segments += [(" in short :", False), (f" {outcome}\n", True)]
    return segments


def _statements(hops: Iterable[Hop]) -> str:
    """Return statements of facts, "The director of X is Y."."""
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
"""Kinds of tasks after passages. Their function names without "_" are the names of `rrl.miniwiki.probes`."""
_TASK_SHARES = (0.1, 0.14, 0.24, 0.02, 0.22, 0.18, 0.1)
"""Share of each kind in `READING_TASKS`."""


def _question_segments(wiki: MiniWiki, seed: int) -> list[list[Segment]]:
    """Return questions of every kind, each with the facts that it requires."""
    per_kind = max(1, len(wiki.passages) // 20)
    return [
        [(f" {item.question.text} :", False), (f" {item.plan.facts}\n", True)]
        for kind in KINDS
        for item in wiki.questions(kind, per_kind, seed)
    ]


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
    word = _earlier_or_later(rng)
    return [(f" {word}, {a} or {b} :", False), (f" {min(a, b) if word == 'earlier' else max(a, b)}\n", True)]


YEAR_RANGES = tuple(relation.years for relation in RELATIONS if relation.value_type == "year")
"""First and last year of each relation whose values are years."""


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
    word = _earlier_or_later(rng)
    _, conclusion = conclude_years(branches, word, comparison.verb, bridge_phrase)
    return [(f" {word} :{_statements(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


def _conclude_equality(lookup: WikiLookup, rng: Rng, subworld: int) -> list[Segment]:
    """Drill: conclude from stated cities, companies or countries of two entities whether they are the same."""
    key, (verb, *_) = list(EQUALITY_COMPARISONS.items())[int(rng.integers(len(EQUALITY_COMPARISONS)))]
    x, y = lookup.sample_names(rng, subworld, RELATION_BY_KEY[key].value_type, 2)
    values = (x, x if rng.random() < 0.5 else y)
    branches, _ = _branches(
        lookup, rng, subworld, key, values, key[0] == "person" and bool(rng.random() < 0.5)
    )
    _, conclusion = conclude_equality(branches, verb)
    return [(f" same :{_statements(itertools.chain(*branches))}", False), (f" {conclusion}\n", True)]


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
