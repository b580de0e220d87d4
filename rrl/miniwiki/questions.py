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
from rrl.miniwiki.passages import MENTION, RELATION_BY_KEY, RELATIONS
from rrl.miniwiki.world import World

T = TypeVar("T")

RelationKey = tuple[str, str]
"""Subject type and relation."""

Chain = tuple[RelationKey, ...]
"""Relations in order: the subject of each is the value of the one before."""

KINDS = ("one_hop", "two_hop", "three_hop", "comparison", "bridge_comparison")
"""Kinds of questions. A comparison is about facts of two entities. In a bridge comparison, each fact needs two hops."""

YES_NO_SHARE = 0.4
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


@dataclasses.dataclass(frozen=True, slots=True)
class MiniQuestion:
    """A question of the built-in world with the plan that answers it."""

    question: Question
    plan: Plan
    subworld: int
    """Index of the sub-world of its entities."""


@dataclasses.dataclass(frozen=True, slots=True)
class YearComparison:
    """Questions that compare two entities of a type by a year."""

    entity_type: str
    relation: str
    """Relation whose values are the years."""
    questions: tuple[tuple[str, str], ...]
    """(question, "earlier" or "later"): the wording, and which of the two years it asks for."""
    verb: str
    """Verb of the conclusion: "{0} was born in {1}"."""


def _year_questions(noun: str, verb: str, ask_older: bool = True) -> tuple[tuple[str, str], ...]:
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
    YearComparison("film", "release year", _year_questions("film", "released", ask_older=False), "released"),
    YearComparison(
        "book", "publication year", _year_questions("book", "published", ask_older=False), "published"
    ),
    YearComparison("company", "founding year", _year_questions("company", "founded"), "founded"),
    YearComparison("city", "founding year", _year_questions("city", "founded"), "founded"),
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
"""By (type, relation): the words between name and value in the conclusion, then the wordings of the yes/no question whether two
entities have the same value."""

BRIDGES = (("film", "director"), ("book", "author"), ("company", "founder"))
"""First relations of bridge comparisons. The value is a person, and a fact of that person is compared."""
BRIDGE_QUESTIONS = (
    ("Which {kind} has the {role} who was born earlier, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} born first, {0} or {1}?", "earlier"),
    ("Which {kind} has the {role} who was born later, {0} or {1}?", "later"),
)
"""Wordings of bridge comparisons, as `YearComparison.questions`."""


def chains(hops: int) -> tuple[Chain, ...]:
    """Return all chains of `hops` different relations."""
    found: list[Chain] = [((r.subject_type, r.name),) for r in RELATIONS]
    for _ in range(hops - 1):
        found = [
            (*chain, (r.subject_type, r.name))
            for chain in found
            for r in RELATIONS
            if r.subject_type == RELATION_BY_KEY[chain[-1]].value_type
            and (r.subject_type, r.name) not in chain
        ]
    return tuple(found)


def follow_chain(world: World, chain: Chain) -> Int[np.ndarray, "steps n"]:
    """Return the indices of the entities along a chain, for every start entity n.

    Row h has the subject of hop h. The last row has the value of the last hop. After a missing fact, all later rows are -1.
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
        generated = _chain_questions(world, rng, n, chains(KINDS.index(kind) + 1))
    questions = []
    for i, (text, answers, plan, subworld) in enumerate(itertools.islice(generated, n)):
        gold = tuple(dict.fromkeys(hop.title for hop in plan.hops))
        question_id = f"miniwiki-{world.split}-{world.seed}.{seed}-{kind}-{i}"
        questions.append(MiniQuestion(Question(question_id, text, answers, kind, gold), plan, subworld))
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


def _mention(rng: np.random.Generator, entity_type: str, name: str) -> str:
    return _pick(rng, MENTION[entity_type]).format(name)


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


def _chain_questions(
    world: World, rng: np.random.Generator, n: int, options: Sequence[Chain]
) -> Iterator[GeneratedQuestion]:
    """Yield compositional questions: each draws a chain uniformly, then one of its unused start entities."""
    remaining = []
    for chain in options:
        steps = follow_chain(world, chain)
        valid = (steps >= 0).all(0)
        # Exclude chains that visit an entity twice: their questions would state their own answer.
        types = [key[0] for key in chain] + [RELATION_BY_KEY[chain[-1]].value_type]
        for i, j in itertools.combinations(range(len(types)), 2):
            if types[i] == types[j]:
                valid &= steps[i] != steps[j]
        starts = np.flatnonzero(valid)
        if starts.size:
            remaining.append((chain, steps, starts[rng.permutation(len(starts))[:n]].tolist()))
    while remaining:
        i = int(rng.integers(len(remaining)))
        chain, steps, starts = remaining[i]
        start = starts.pop()
        if not starts:
            remaining.pop(i)
        hops = tuple(make_hop(world, key, int(steps[j, start])) for j, key in enumerate(chain))
        phrase = _mention(rng, chain[0][0], hops[0].subject)
        for key in chain[:-1]:
            phrase = _pick(rng, RELATION_BY_KEY[key].phrases).format(phrase)
        text = _pick(rng, RELATION_BY_KEY[chain[-1]].questions).format(phrase)
        yield (
            text,
            _answers(chain[-1], hops[-1].value),
            Plan(hops, ""),
            int(world.layout.subworld[chain[0][0]][start]),
        )


def _answers(key: RelationKey, value: str) -> tuple[str, ...]:
    """Return the gold answers for a value; cities have two forms."""
    return (value, f"the city of {value}") if RELATION_BY_KEY[key].value_type == "city" else (value,)


def _comparisons(world: World, rng: np.random.Generator, n: int, bridge: bool) -> Iterator[GeneratedQuestion]:
    """Yield questions about two entities of one type and sub-world.

    They ask which entity has the earlier or later year, or whether both have the same value. With `bridge`, the entities are
    works or companies, and the compared facts are those of their directors, authors or founders.
    """
    used: set[tuple[Chain, frozenset[int]]] = set()
    want_yes, failed = True, 0
    # Give up after this many tries: a small world has few pairs.
    for _ in range(20 * n + 2000):
        # Keep the choice between yes/no and year questions for 20 failed tries. Pairs with equal values are rare, so a new
        # choice at every try would make yes/no questions rarer than YES_NO_SHARE.
        if failed % 20 == 0:
            ask_equality = rng.random() < YES_NO_SHARE
        bridge_key = BRIDGES[int(rng.integers(len(BRIDGES)))] if bridge else None
        if ask_equality:
            options = [k for k in EQUALITY_COMPARISONS if not bridge_key or k[0] == "person"]
            key = options[int(rng.integers(len(options)))]
        else:
            comparison = YEAR_COMPARISONS[0 if bridge_key else int(rng.integers(len(YEAR_COMPARISONS)))]
            key = (comparison.entity_type, comparison.relation)
        chain: Chain = (bridge_key, key) if bridge_key else (key,)
        pair = _pair(world, rng, chain, ask_equality, want_yes)
        if pair is None or (chain, frozenset(pair)) in used:
            failed += 1
            continue
        failed = 0
        used.add((chain, frozenset(pair)))
        subject = chain[0][0]
        branches = tuple(_hops_along(world, chain, entity) for entity in pair)
        names = [branch[0].subject for branch in branches]
        mentions = [_mention(rng, subject, name) if ask_equality else name for name in names]
        if ask_equality:
            both = f"the {chain[0][1]}s of {{0}} and {{1}}" if bridge_key else "{0} and {1}"
            text = _pick(rng, EQUALITY_COMPARISONS[key][1:]).format(both).format(*mentions)
            answer, conclusion = conclude_equality(branches, EQUALITY_COMPARISONS[key][0])
            want_yes = not want_yes
        else:
            template, word = _pick(rng, BRIDGE_QUESTIONS if bridge_key else comparison.questions)
            text = template.format(*names, kind=subject, role=chain[0][1])
            answer, conclusion = conclude_years(
                branches, word, comparison.verb, f"the {chain[0][1]} of" if bridge_key else ""
            )
        plan = Plan(tuple(itertools.chain.from_iterable(branches)), conclusion)
        yield text, (answer,), plan, int(world.layout.subworld[subject][pair[0]])


def _pair(
    world: World, rng: np.random.Generator, chain: Chain, ask_equality: bool, want_yes: bool
) -> tuple[int, int] | None:
    """Draw two entities of one sub-world whose values at the end of `chain` can be compared.

    The values are equal if `ask_equality` and `want_yes`, otherwise different. In a bridge comparison the two persons differ.
    Returns None if the first entity has no value or no partner.
    """
    subject = chain[0][0]
    values = first_values = world.facts[chain[0]]
    if len(chain) == 2:
        values = np.where(first_values < 0, -1, world.facts[chain[1]][first_values])
    first = int(rng.integers(len(values)))
    subworld = world.layout.subworld[subject][first]
    low, high = world.layout.starts[subject][subworld : subworld + 2].tolist()
    block = values[low:high]
    if ask_equality and want_yes:
        fits = block == values[first]
    else:
        fits = (block != values[first]) & (block >= 0)
    if len(chain) == 2:
        fits &= first_values[low:high] != first_values[first]
    fits[first - low] = False
    options = np.flatnonzero(fits)
    if values[first] < 0 or not options.size:
        return None
    return first, low + int(rng.choice(options))


def _hops_along(world: World, chain: Chain, entity: int) -> tuple[Hop, ...]:
    """Return the hops of a chain that starts at `entity`."""
    hops = []
    for key in chain:
        hops.append(make_hop(world, key, entity))
        entity = int(world.facts[key][entity])
    return tuple(hops)


def conclude_equality(branches: tuple[tuple[Hop, ...], ...], verb: str) -> tuple[str, str]:
    """Return answer and conclusion for two branches whose last values may be the same."""
    a, b = (branch[-1] for branch in branches)
    answer = "yes" if a.value == b.value else "no"
    word = "the same" if answer == "yes" else "not the same"
    return answer, f"{a.subject} is {verb} {a.value} and {b.subject} is {verb} {b.value}, {word}."


def conclude_years(
    branches: tuple[tuple[Hop, ...], ...], word: str, verb: str, bridge: str
) -> tuple[str, str]:
    """Return answer and conclusion for two branches that end in different years.

    `word` is "earlier" or "later". `bridge` names the first relation of a bridge comparison, such as "the director of"; otherwise
    it is "".
    """
    a, b = (branch[-1] for branch in branches)
    first_wins = (int(a.value) < int(b.value)) == (word == "earlier")
    winner = branches[0] if first_wins else branches[1]
    answer = winner[0].subject
    end = f", {bridge} {answer}" if bridge else ""
    return answer, (
        f"{a.subject} was {verb} in {a.value} and {b.subject} in {b.value}, "
        f"so {winner[-1].subject} was {verb} {word}{end}."
    )
