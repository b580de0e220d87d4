"""Generate questions about the built-in world, of the types of 2WikiMultiHopQA, each with a plan that answers it.

Read `generate_questions` first.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.miniwiki.passages import MENTION, RELATION, RELATIONS
from rrl.miniwiki.world import World

T = TypeVar("T")

RelationKey = tuple[str, str]
"""Subject type and relation."""

Chain = tuple[RelationKey, ...]
"""A path of relations: each starts at the value of the one before."""

KINDS = ("one_hop", "two_hop", "three_hop", "comparison", "bridge_comparison")
"""Kinds of questions. A comparison is about facts of two entities. In a bridge comparison, each fact needs two hops."""

YES_NO = 0.4
"""Share of comparisons that are yes/no questions; the answer to half of these is yes."""


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
    def facts(self) -> str:
        """The required facts as text: "author of X, spouse", or "founding year of A; founding year of B; earlier"."""
        hops, length = self.hops, len(self.hops) // (2 if self.conclusion else 1)
        parts = [
            ", ".join([hops[at].query, *(hop.relation for hop in hops[at + 1 : at + length])])
            for at in range(0, len(hops), length)
        ]
        if self.conclusion:
            parts.append(
                next((word for word in ("earlier", "later") if f" {word}" in self.conclusion), "same")
            )
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class MiniQuestion:
    """A question of the built-in world with the plan that answers it."""

    question: Question
    plan: Plan
    world: int
    """Sub-world of its entities."""


@dataclasses.dataclass(frozen=True, slots=True)
class YearComparison:
    """Questions that compare two entities of a type by a year."""

    kind: str
    """Entity type."""
    relation: str
    """Relation whose values are the years."""
    questions: tuple[tuple[str, str], ...]
    """(question, "earlier" or "later"): the wording, and which of the two years it asks for."""
    verb: str
    """Verb of the conclusion: "{0} was born in {1}"."""


def _which(noun: str, verb: str, ask_older: bool = True) -> tuple[tuple[str, str], ...]:
    """Return wordings of a comparison of years; a quarter or a third of them ask for the later year."""
    older = ((f"Which {noun} is older, {{0}} or {{1}}?", "earlier"),) if ask_older else ()
    return (
        (f"Which {noun} was {verb} first, {{0}} or {{1}}?", "earlier"),
        (f"Which {noun} was {verb} earlier, {{0}} or {{1}}?", "earlier"),
        (f"Which {noun} was {verb} later, {{0}} or {{1}}?", "later"),
        *older,
    )


BIRTH_QUESTIONS = (
    ("Who was born first, {0} or {1}?", "earlier"),
    ("Who was born earlier, {0} or {1}?", "earlier"),
    ("Who was born later, {0} or {1}?", "later"),
    ("Who is older, {0} or {1}?", "earlier"),
)

YEAR_COMPARISONS = (
    YearComparison("person", "birth year", BIRTH_QUESTIONS, "born"),
    YearComparison("film", "release year", _which("film", "released", ask_older=False), "released"),
    YearComparison("book", "publication year", _which("book", "published", ask_older=False), "published"),
    YearComparison("company", "founding year", _which("company", "founded"), "founded"),
    YearComparison("city", "founding year", _which("city", "founded"), "founded"),
)

EQUALITY_COMPARISONS = {
    ("person", "birthplace"): (
        "born in",
        "Were {} born in the same city?",
        "Do {} have the same birthplace?",
    ),
    ("person", "employer"): (
        "employed by",
        "Do {} work for the same company?",
        "Do {} have the same employer?",
    ),
    ("company", "headquarters"): (
        "based in",
        "Are {} based in the same city?",
        "Do {} share one headquarters city?",
    ),
    ("city", "country"): ("located in", "Are {} in the same country?", "Do {} lie in the same country?"),
}
"""By (type, relation): the words between name and value in the conclusion, and the wordings of the yes/no question whether two
entities have the same value."""

BRIDGES = (("film", "director"), ("book", "author"), ("company", "founder"))
"""First hops of bridge comparisons: (type, relation), where the value is the person who is compared."""
BRIDGE_QUESTIONS = (
    ("Which {kind} has the {role} who was born earlier, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} born first, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} who was born later, {0} or {1}?", "later"),
)
"""Wordings of bridge comparisons, as `YearComparison.questions`."""


def chains(hops: int) -> tuple[Chain, ...]:
    """Return all chains of `hops` different relations."""
    paths: list[Chain] = [((r.subject, r.name),) for r in RELATIONS]
    for _ in range(hops - 1):
        paths = [
            (*path, (r.subject, r.name))
            for path in paths
            for r in RELATIONS
            if r.subject == RELATION[path[-1]].value and (r.subject, r.name) not in path
        ]
    return tuple(paths)


def follow(world: World, chain: Chain) -> Int[np.ndarray, "steps n"]:
    """Return the entities along a chain for every start entity n.

    Row h has the entity before hop h, the last row the value of the last hop; -1 from the first missing fact on.
    """
    start = np.arange(len(world.names[chain[0][0]]))
    steps = [start]
    for key in chain:
        last = steps[-1]
        steps.append(np.where(last < 0, -1, world.facts[key][last]))
    return np.stack(steps)


def generate_questions(world: World, kind: str, n: int, seed: int) -> list[MiniQuestion]:
    """Generate `n` different questions of one kind, uniform over relations and entities.

    The same arguments give the same questions.

    Raises:
      UserError: the kind is unknown, `n` or `seed` is negative, or the world has fewer than `n` such questions.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind!r}: allowed are {', '.join(KINDS)}")
    if n < 0 or seed < 0:
        raise UserError(f"n={n}, seed={seed}: both must be 0 or more")
    rng = np.random.default_rng((seed, KINDS.index(kind), world.seed))
    if "comparison" in kind:
        generated = _comparisons(world, rng, n, bridge=kind == "bridge_comparison")
    else:
        generated = _paths(world, rng, n, chains(KINDS.index(kind) + 1))
    questions = []
    for i, (text, answers, plan, where) in enumerate(itertools.islice(generated, n)):
        gold = tuple(dict.fromkeys(hop.title for hop in plan.hops))
        name = f"miniwiki-{world.split}-{world.seed}.{seed}-{kind}-{i}"
        questions.append(MiniQuestion(Question(name, text, answers, kind, gold), plan, where))
    if len(questions) < n:
        raise UserError(
            f"n={n}: this world has only {len(questions)} different questions of kind {kind!r}; "
            "give a smaller number or generate more passages"
        )
    return questions


GeneratedQuestion = tuple[str, tuple[str, ...], Plan, int]
"""Text, gold answers, plan and sub-world of a question."""


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def _mention(rng: np.random.Generator, kind: str, name: str) -> str:
    return _pick(rng, MENTION[kind]).format(name)


def hop(world: World, key: RelationKey, entity: int) -> Hop:
    """Return the hop that looks up a fact of an entity, which must have this fact."""
    kind, relation = key
    name = world.names[kind][entity]
    return Hop(
        name,
        relation,
        world.value(kind, relation, entity),
        RELATION[key].query(name),
        world.sentence_of(kind, relation, entity),
        name,
    )


def _paths(
    world: World, rng: np.random.Generator, n: int, options: Sequence[Chain]
) -> Iterator[GeneratedQuestion]:
    """Yield compositional questions: each draws a chain uniformly, then one of its unused start entities."""
    left = []
    for chain in options:
        steps = follow(world, chain)
        valid = (steps >= 0).all(0)
        # Exclude paths that visit an entity twice: their questions would state their own answer.
        types = [key[0] for key in chain] + [RELATION[chain[-1]].value]
        for i, j in itertools.combinations(range(len(types)), 2):
            if types[i] == types[j]:
                valid &= steps[i] != steps[j]
        starts = np.flatnonzero(valid)
        if starts.size:
            left.append((chain, steps, starts[rng.permutation(len(starts))[:n]].tolist()))
    while left:
        i = int(rng.integers(len(left)))
        chain, steps, starts = left[i]
        start = starts.pop()
        if not starts:
            left.pop(i)
        hops = tuple(hop(world, key, int(steps[j, start])) for j, key in enumerate(chain))
        phrase = _mention(rng, chain[0][0], hops[0].subject)
        for key in chain[:-1]:
            phrase = _pick(rng, RELATION[key].phrases).format(phrase)
        text = _pick(rng, RELATION[chain[-1]].questions).format(phrase)
        yield (
            text,
            _answers(chain[-1], hops[-1].value),
            Plan(hops, ""),
            int(world.layout.world[chain[0][0]][start]),
        )


def _answers(key: RelationKey, value: str) -> tuple[str, ...]:
    """Return the gold answers for a value; cities have two forms."""
    return (value, f"the city of {value}") if RELATION[key].value == "city" else (value,)


def _comparisons(world: World, rng: np.random.Generator, n: int, bridge: bool) -> Iterator[GeneratedQuestion]:
    """Yield questions about two entities of one type and sub-world.

    They ask which entity has the earlier or later year, or whether both have the same value. With `bridge`, the entities are
    works or companies, and the compared facts are those of their directors, authors or founders.
    """
    seen: set[tuple[Chain, frozenset[int]]] = set()
    yes, failed = True, 0
    for _ in range(20 * n + 2000):
        # Draw the form again only after 20 failed tries, so that yes/no questions keep their share although their pairs are rare.
        if failed % 20 == 0:
            same = rng.random() < YES_NO
        head = BRIDGES[int(rng.integers(len(BRIDGES)))] if bridge else None
        if same:
            options = [k for k in EQUALITY_COMPARISONS if not head or k[0] == "person"]
            key = options[int(rng.integers(len(options)))]
        else:
            comparison = YEAR_COMPARISONS[0 if head else int(rng.integers(len(YEAR_COMPARISONS)))]
            key = (comparison.kind, comparison.relation)
        path: Chain = (head, key) if head else (key,)
        pair = _pair(world, rng, path, same, yes)
        if pair is None or (path, frozenset(pair)) in seen:
            failed += 1
            continue
        failed = 0
        seen.add((path, frozenset(pair)))
        subject = path[0][0]
        hops = tuple(_hop_along(world, path, entity) for entity in pair)
        names = [branch[0].subject for branch in hops]
        mentions = [_mention(rng, subject, name) if same else name for name in names]
        if same:
            both = f"the {path[0][1]}s of {{0}} and {{1}}" if head else "{0} and {1}"
            text = _pick(rng, EQUALITY_COMPARISONS[key][1:]).format(both).format(*mentions)
            answer, conclusion = conclude_equality(hops, EQUALITY_COMPARISONS[key][0])
            yes = not yes
        else:
            template, word = _pick(rng, BRIDGE_QUESTIONS if head else comparison.questions)
            text = template.format(*names, kind=subject, role=path[0][1])
            answer, conclusion = conclude_years(
                hops, word, comparison.verb, f"the {path[0][1]} of" if head else ""
            )
        plan = Plan(tuple(itertools.chain.from_iterable(hops)), conclusion)
        yield text, (answer,), plan, int(world.layout.world[subject][pair[0]])


def _pair(
    world: World, rng: np.random.Generator, path: Chain, same: bool, yes: bool
) -> tuple[int, int] | None:
    """Return two entities of one sub-world whose values along `path` suit the question; None if this try finds none.

    The values are equal if `same` and `yes`, otherwise different.
    """
    subject = path[0][0]
    steps = follow_one = world.facts[path[0]]
    if len(path) == 2:
        steps = np.where(follow_one < 0, -1, world.facts[path[1]][follow_one])
    first = int(rng.integers(len(steps)))
    where = world.layout.world[subject][first]
    low, high = world.layout.starts[subject][where : where + 2].tolist()
    block = steps[low:high]
    if same and yes:
        fits = block == steps[first]
    else:
        fits = (block != steps[first]) & (block >= 0)
    if len(path) == 2:
        fits &= follow_one[low:high] != follow_one[first]
    fits[first - low] = False
    options = np.flatnonzero(fits)
    if steps[first] < 0 or not options.size:
        return None
    return first, low + int(rng.choice(options))


def _hop_along(world: World, path: Chain, entity: int) -> tuple[Hop, ...]:
    """Return the hops of a path that starts at an entity."""
    hops = []
    for key in path:
        hops.append(hop(world, key, entity))
        entity = int(world.facts[key][entity])
    return tuple(hops)


def conclude_equality(hops: tuple[tuple[Hop, ...], ...], verb: str) -> tuple[str, str]:
    """Return answer and conclusion for two branches whose last values may be the same."""
    a, b = (branch[-1] for branch in hops)
    answer = "yes" if a.value == b.value else "no"
    word = "the same" if answer == "yes" else "not the same"
    return answer, f"{a.subject} is {verb} {a.value} and {b.subject} is {verb} {b.value}, {word}."


def conclude_years(hops: tuple[tuple[Hop, ...], ...], word: str, verb: str, role: str) -> tuple[str, str]:
    """Return answer and conclusion for two branches that end in different years.

    `word` is "earlier" or "later". `role` is the bridge, such as "the director of", or "".
    """
    a, b = (branch[-1] for branch in hops)
    first = (int(a.value) < int(b.value)) == (word == "earlier")
    winner = hops[0] if first else hops[1]
    answer = winner[0].subject
    end = f", {role} {answer}" if role else ""
    return answer, (
        f"{a.subject} was {verb} in {a.value} and {b.subject} in {b.value}, "
        f"so {winner[-1].subject} was {verb} {word}{end}."
    )
