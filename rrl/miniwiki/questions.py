"""Generate questions about the built-in world, each with a plan that answers it.

The kinds are the comparisons and bridge comparisons of 2WikiMultiHopQA, and compositional questions of one to three hops (two in
2WikiMultiHopQA).

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
from rrl.miniwiki.comparisons import (
    BRIDGE_QUESTIONS,
    BRIDGES,
    EQUALITY_COMPARISONS,
    YEAR_COMPARISONS,
    YearComparison,
    conclude_equality,
    conclude_years,
)
from rrl.miniwiki.plans import Chain, Hop, Plan, RelationKey, hops_along, make_hop
from rrl.miniwiki.relations import MENTION, RELATION_BY_KEY, RELATIONS
from rrl.miniwiki.world import World

T = TypeVar("T")

KINDS = ("one_hop", "two_hop", "three_hop", "comparison", "bridge_comparison")
"""Kinds of questions. A comparison is about facts of two entities. In a bridge comparison, each fact needs two hops."""

YES_NO_SHARE = 0.4
"""Share of comparisons that are yes/no questions; the answer to half of these is yes."""


@dataclasses.dataclass(frozen=True, slots=True)
class MiniQuestion:
    """A question of the built-in world with the plan that answers it."""

    question: Question
    plan: Plan
    subworld: int
    """Index of the sub-world of its entities."""


def chains(hops: int) -> tuple[Chain, ...]:
    """Return all chains of `hops` different relations."""
    partial: list[Chain] = [((r.subject_type, r.name),) for r in RELATIONS]
    for _ in range(hops - 1):
        partial = [
            (*chain, (r.subject_type, r.name))
            for chain in partial
            for r in RELATIONS
            if r.subject_type == RELATION_BY_KEY[chain[-1]].value_type
            and (r.subject_type, r.name) not in chain
        ]
    return tuple(partial)


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
    """Generate `n` different questions of one kind. The same arguments give the same questions.

    One- to three-hop questions draw a chain of relations uniformly, then a start entity. A share of about `YES_NO_SHARE` of the
    comparisons compares for equality, the others compare years.

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
        branches = tuple(hops_along(world, chain, entity) for entity in pair)
        if ask_equality:
            text, answer, conclusion = _word_equality(rng, chain, branches)
            want_yes = not want_yes
        else:
            text, answer, conclusion = _word_years(rng, chain, branches, comparison)
        plan = Plan(tuple(itertools.chain.from_iterable(branches)), conclusion)
        yield text, (answer,), plan, int(world.layout.subworld[chain[0][0]][pair[0]])


def _word_equality(
    rng: np.random.Generator, chain: Chain, branches: tuple[tuple[Hop, ...], ...]
) -> tuple[str, str, str]:
    """Return question, answer and conclusion of a comparison whether the last values of two branches are the same."""
    subject_type, first_relation = chain[0]
    verb, *wordings = EQUALITY_COMPARISONS[chain[-1]]
    mentions = [_mention(rng, subject_type, branch[0].subject) for branch in branches]
    both = f"the {first_relation}s of {{0}} and {{1}}" if len(chain) == 2 else "{0} and {1}"
    text = _pick(rng, wordings).format(both).format(*mentions)
    return text, *conclude_equality(branches, verb)


def _word_years(
    rng: np.random.Generator,
    chain: Chain,
    branches: tuple[tuple[Hop, ...], ...],
    comparison: YearComparison,
) -> tuple[str, str, str]:
    """Return question, answer and conclusion of a comparison of the years at the ends of two branches."""
    subject_type, first_relation = chain[0]
    is_bridge = len(chain) == 2
    template, word = _pick(rng, BRIDGE_QUESTIONS if is_bridge else comparison.questions)
    text = template.format(
        *(branch[0].subject for branch in branches), kind=subject_type, role=first_relation
    )
    bridge = f"the {first_relation} of" if is_bridge else ""
    return text, *conclude_years(branches, word, comparison.verb, bridge)


def _pair(
    world: World, rng: np.random.Generator, chain: Chain, ask_equality: bool, want_yes: bool
) -> tuple[int, int] | None:
    """Draw two entities of one sub-world whose values at the end of `chain` can be compared.

    The values are equal if `ask_equality` and `want_yes`, otherwise different. In a bridge comparison the two persons differ.
    Returns None if the first entity has no value or no partner.
    """
    subject = chain[0][0]
    is_bridge = len(chain) == 2
    values = first_values = world.facts[chain[0]]
    if is_bridge:
        values = np.where(first_values < 0, -1, world.facts[chain[1]][first_values])
    first = int(rng.integers(len(values)))
    subworld = world.layout.subworld[subject][first]
    low, high = world.layout.starts[subject][subworld : subworld + 2].tolist()
    block = values[low:high]
    if ask_equality and want_yes:
        fits = block == values[first]
    else:
        fits = (block != values[first]) & (block >= 0)
    if is_bridge:
        fits &= first_values[low:high] != first_values[first]
    fits[first - low] = False
    options = np.flatnonzero(fits)
    if values[first] < 0 or not options.size:
        return None
    return first, low + int(rng.choice(options))
