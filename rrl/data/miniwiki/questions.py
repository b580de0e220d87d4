"""Questions about the built-in world, in the types of 2WikiMultiHopQA, each with the plan that answers it."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from rrl.data.miniwiki.passages import MENTION, RELATION, RELATIONS
from rrl.data.miniwiki.world import World
from rrl.data.questions import Question
from rrl.errors import UserError

KINDS = ("one_hop", "two_hop", "three_hop", "comparison", "bridge_comparison")

YES_NO = 0.4
"""Share of comparisons that ask yes or no; half of these are yes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One fact that a plan looks up."""

    subject: str
    relation: str
    value: str
    query: str
    """A search query for the fact: "director of Silver Harbour"."""
    sentence: str
    """The sentence of the passage that states it."""
    title: str
    """Title of that passage (the subject)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How to answer: facts to look up in order, and what follows from comparing them ("" without a comparison)."""

    hops: tuple[Hop, ...]
    conclusion: str


@dataclasses.dataclass(frozen=True, slots=True)
class MiniQuestion:
    """A question with the plan that answers it."""

    question: Question
    plan: Plan
    world: int
    """Sub-world it is about."""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A comparison of years: who or which came first."""

    kind: str
    relation: str
    asks: tuple[tuple[str, str], ...]
    """(question, word of the conclusion); "earlier" or "later" in the word decides."""
    verb: str
    """How the conclusion states a year, "{0} was born in {1}"."""


ORDERS = (
    Order("person", "birth year", (("Who was born earlier, {0} or {1}?", "earlier"), ("Who was born first, {0} or {1}?", "earlier"),
                                   ("Who was born later, {0} or {1}?", "later"), ("Who is older, {0} or {1}?", "earlier")), "born"),
    Order("film", "release year", (("Which film came out first, {0} or {1}?", "earlier"), ("Which film was released earlier, {0} or {1}?", "earlier"),
                                   ("Which film was released later, {0} or {1}?", "later")), "released"),
    Order("book", "publication year", (("Which book was published first, {0} or {1}?", "earlier"), ("Which book was published earlier, {0} or {1}?", "earlier"),
                                       ("Which book was published later, {0} or {1}?", "later")), "published"),
    Order("company", "founding year", (("Which company was founded first, {0} or {1}?", "earlier"), ("Which company is older, {0} or {1}?", "earlier"),
                                       ("Which company was founded later, {0} or {1}?", "later")), "founded"),
    Order("city", "founding year", (("Which city was founded first, {0} or {1}?", "earlier"), ("Which city is older, {0} or {1}?", "earlier"),
                                    ("Which city was founded later, {0} or {1}?", "later")), "founded"),
)  # fmt: skip

SAME = {
    ("person", "birthplace"): (("Were {0} and {1} born in the same city?", "Do {0} and {1} have the same birthplace?"), "born in"),
    ("person", "employer"): (("Do {0} and {1} work for the same company?", "Do {0} and {1} have the same employer?"), "employed by"),
    ("company", "headquarters"): (("Are {0} and {1} based in the same city?", "Do {0} and {1} have headquarters in the same city?"), "based in"),
    ("city", "country"): (("Are {0} and {1} in the same country?", "Do {0} and {1} lie in the same country?"), "located in"),
}  # fmt: skip
"""Yes/no questions by (type, relation), and the words that join name and value in the conclusion."""

BRIDGES = (("film", "director"), ("book", "author"), ("company", "founder"))
BRIDGE_ORDER = (
    ("Which {kind} has the {role} who was born earlier, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} born first, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} who was born later, {0} or {1}?", "later"),
)
BRIDGE_SAME = {
    "birthplace": ("Were the {role}s of {0} and {1} born in the same city?", "Do the {role}s of {0} and {1} have the same birthplace?"),
    "employer": ("Do the {role}s of {0} and {1} work for the same company?", "Do the {role}s of {0} and {1} have the same employer?"),
}  # fmt: skip


def chains(hops: int) -> tuple[tuple[tuple[str, str], ...], ...]:
    """All paths of `hops` relations, as ((subject type, relation), ...); a spouse's spouse leads nowhere and is left out."""
    found = [((r.subject, r.name),) for r in RELATIONS]
    for _ in range(hops - 1):
        found = [
            (*path, (r.subject, r.name))
            for path in found
            for r in RELATIONS
            if r.subject == RELATION[path[-1]].value and (r.subject, r.name) not in path
        ]
    return tuple(found)


def follow(world: World, chain: tuple[tuple[str, str], ...]) -> Int[np.ndarray, "H n"]:
    """Entity before each hop and the value after the last, for every possible start; -1 from where the path ends."""
    start = np.arange(len(world.names[chain[0][0]]))
    steps = [start]
    for key in chain:
        last = steps[-1]
        steps.append(np.where(last < 0, -1, world.facts[key][last]))
    return np.stack(steps)


def ask(world: World, kind: str, n: int, seed: int) -> list[MiniQuestion]:
    """`n` different questions of one kind, uniform over relations and entities. Same arguments, same questions.

    Raises:
      UserError: unknown kind, or the world has fewer than `n` such questions.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind!r}: allowed are {', '.join(KINDS)}")
    if n < 0 or seed < 0:
        raise UserError(f"n={n}, seed={seed}: both must be 0 or more")
    rng = np.random.default_rng((seed, KINDS.index(kind), world.seed))
    if "comparison" in kind:
        made = _comparisons(world, rng, n, bridge=kind == "bridge_comparison")
    else:
        made = _paths(world, rng, n, chains(KINDS.index(kind) + 1))
    questions = []
    for i, (text, answers, plan, where) in enumerate(itertools.islice(made, n)):
        gold = tuple(dict.fromkeys(hop.title for hop in plan.hops))
        name = f"miniwiki-{world.split}-{world.seed}.{seed}-{kind}-{i}"
        questions.append(MiniQuestion(Question(name, text, answers, kind, gold), plan, where))
    if len(questions) < n:
        raise UserError(
            f"n={n}: this world has only {len(questions)} different questions of kind {kind!r}; "
            "ask for fewer or generate more passages"
        )
    return questions


Made = tuple[str, tuple[str, ...], Plan, int]
"""Text, answers, plan and sub-world of a question."""


def _pick(rng: np.random.Generator, options: tuple) -> object:
    return options[int(rng.integers(len(options)))]


def _mention(rng: np.random.Generator, kind: str, name: str) -> str:
    return str(_pick(rng, MENTION[kind])).format(name)


def _hop(world: World, key: tuple[str, str], entity: int) -> Hop:
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


def _paths(world: World, rng: np.random.Generator, n: int, options: tuple) -> Iterator[Made]:
    """Compositional questions: a chain uniformly, then one of the starts it has left."""
    left = []
    for chain in options:
        steps = follow(world, chain)
        valid = (steps >= 0).all(0)
        # No path through an entity twice: it would ask for what the question already says.
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
        hops = tuple(_hop(world, key, int(steps[j, start])) for j, key in enumerate(chain))
        phrase = _mention(rng, chain[0][0], hops[0].subject)
        for key in chain[:-1]:
            phrase = str(_pick(rng, RELATION[key].phrases)).format(phrase)
        text = str(_pick(rng, RELATION[chain[-1]].asks)).format(phrase)
        yield (
            text,
            _answers(chain[-1], hops[-1].value),
            Plan(hops, ""),
            int(world.layout.world[chain[0][0]][start]),
        )


def _answers(key: tuple[str, str], value: str) -> tuple[str, ...]:
    return (value, f"the city of {value}") if RELATION[key].value == "city" else (value,)


def _comparisons(world: World, rng: np.random.Generator, n: int, bridge: bool) -> Iterator[Made]:
    """Pairs of entities of one type and sub-world, compared by year or asked to be the same."""
    seen: set[tuple] = set()
    yes = True
    for _ in range(20 * n + 2000):
        same = rng.random() < YES_NO
        head = BRIDGES[int(rng.integers(len(BRIDGES)))] if bridge else None
        if same:
            options = tuple((("person", r) for r in BRIDGE_SAME) if head else SAME)
            key = options[int(rng.integers(len(options)))]
        else:
            order = ORDERS[0] if head else ORDERS[int(rng.integers(len(ORDERS)))]
            key = (order.kind, order.relation)
        path = (head, key) if head else (key,)
        pair = _pair(world, rng, path, same, yes)
        if pair is None or (path, frozenset(pair)) in seen:
            continue
        seen.add((path, frozenset(pair)))
        subject = path[0][0]
        hops = tuple(_hop_along(world, path, entity) for entity in pair)
        names = [branch[0].subject for branch in hops]
        mentions = [_mention(rng, subject, name) if same else name for name in names]
        if same:
            templates = BRIDGE_SAME[key[1]] if head else SAME[key][0]
            text = str(_pick(rng, templates)).format(*mentions, role=path[0][1])
            answer, conclusion = _conclude_same(hops, SAME[key][1])
            yes = not yes
        else:
            template, word = _pick(rng, BRIDGE_ORDER if head else order.asks)  # type: ignore[misc]
            text = template.format(*names, kind=subject, role=path[0][1])
            answer, conclusion = _conclude_order(
                hops, word, order.verb, f"the {path[0][1]} of" if head else ""
            )
        plan = Plan(tuple(itertools.chain.from_iterable(hops)), conclusion)
        yield text, (answer,), plan, int(world.layout.world[subject][pair[0]])


def _pair(
    world: World, rng: np.random.Generator, path: tuple, same: bool, yes: bool
) -> tuple[int, int] | None:
    """Two entities of one sub-world whose values along `path` are as wanted; None when this try finds none."""
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


def _hop_along(world: World, path: tuple, entity: int) -> tuple[Hop, ...]:
    hops = []
    for key in path:
        hops.append(_hop(world, key, entity))
        entity = int(world.facts[key][entity])
    return tuple(hops)


def _conclude_same(hops: tuple[tuple[Hop, ...], ...], verb: str) -> tuple[str, str]:
    a, b = (branch[-1] for branch in hops)
    answer = "yes" if a.value == b.value else "no"
    word = "the same" if answer == "yes" else "not the same"
    return answer, f"{a.subject} is {verb} {a.value} and {b.subject} is {verb} {b.value}, {word}."


def _conclude_order(hops: tuple[tuple[Hop, ...], ...], word: str, verb: str, role: str) -> tuple[str, str]:
    a, b = (branch[-1] for branch in hops)
    first = (int(a.value) < int(b.value)) == (word == "earlier")
    winner = hops[0] if first else hops[1]
    answer = winner[0].subject
    end = f", {role} {answer}" if role else ""
    return answer, (
        f"{a.subject} was {verb} in {a.value} and {b.subject} in {b.value}, "
        f"so {winner[-1].subject} was {verb} {word}{end}."
    )
