"""Cases of the built-in world with the oracle's verdicts: what a small judge is trained on, and held against.

An attempt at a question, right or faulty, is acted out by a recipe's scripted expert over a real retriever. It gives one case
of each kind that recipes ask a judge about: is it sufficient, how good is its thinking (TIRESRAG-R1), how relevant is what one
of its steps found (R3-RAG), and is its answer right.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, Search, Trajectory
from rrl.errors import UserError, at_least
from rrl.miniwiki import KINDS as QUESTIONS
from rrl.miniwiki import MiniQuestion, MiniWiki, mixed_questions
from rrl.miniwiki.attempts import Attempt, make_attempt, wrong_answer
from rrl.miniwiki.lookup import WikiLookup
from rrl.recipes.r3rag_steps import R3RagEnvironment
from rrl.recipes.tiresrag import TiresRag
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.index import make_retriever
from rrl.rewards.judge_card import JudgeCard
from rrl.rewards.judge_prompts import (
    Correctness,
    JudgePrompt,
    Relevance,
    Sufficiency,
    Thinking,
    Transcript,
    gold_text,
    transcript_of,
)
from rrl.rewards.oracle import Oracle, chain_coverage, claims, groundedness
from rrl.rollout.protocol import Append
from rrl.text.chat import fitting_ids
from rrl.text.encoding import plain_ids

PROMPT_KINDS: tuple[type, ...] = (Relevance, Sufficiency, Thinking, Correctness)
"""What the judge of the built-in world is asked."""
MAX_LISTED_WORDS = 6
"""Most words that an answer lists."""


@dataclasses.dataclass(frozen=True)
class JudgeExamplesConfig:
    """How cases are made."""

    faulty: float = 0.6
    """Share of attempts in which something goes wrong."""
    partial: float = 0.2
    """Share of attempts that are broken off after some of their searches."""
    top_k: int = 2
    """Passages a search returns, as in the runs of the built-in world."""
    context: int = 1280
    """Most tokens of a prompt and its answer."""
    answer_tokens: int = 160

    def __post_init__(self) -> None:
        for name in ("faulty", "partial"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"data.options.{name}={getattr(self, name)} must lie in 0..1, a share")
        at_least(1, self, "top_k", "answer_tokens", where="data.options.")
        if self.context < self.answer_tokens + 3:
            raise UserError(
                f"data.options.context={self.context} must hold answer_tokens={self.answer_tokens} and a prompt"
            )

    @property
    def card(self) -> JudgeCard:
        """What a judge trained on these cases says of itself."""
        return JudgeCard(
            False, self.context, self.answer_tokens, tuple(kind.__name__ for kind in PROMPT_KINDS)
        )


@dataclasses.dataclass(frozen=True)
class JudgeExample:
    """A case, what the oracle says of it, and why."""

    prompt: JudgePrompt
    score: float
    answer: str
    """What the judge shall write: its reasons, and the score in the form that `JudgePrompt.parse` reads."""


def make_judge_examples(
    wiki: MiniWiki, seed: int, per_kind: int, config: JudgeExamplesConfig, recipe: TiresRag | None = None
) -> Iterator[JudgeExample]:
    """One verdict of each of `PROMPT_KINDS` about each of `per_kind` questions of each kind, in random order; the same
    arguments give the same ones.

    `recipe`: in whose form attempts are acted out; None: that of the built-in world.
    """
    recipe = recipe or TiresRag(opening="bare")
    rng = np.random.default_rng((seed, 4))
    lookup = WikiLookup(wiki)
    items = mixed_questions(wiki, per_kind, QUESTIONS, seed)
    tried = [make_attempt(item, lookup, rng, config.faulty) for item in items]
    retriever = make_retriever(wiki.passages, "bm25", None, Bm25Config(title_weight=3))
    queries = [*(hop.query for one in tried for hop in one.hops), *(item.question.text for item in items)]
    wanted = list(dict.fromkeys(queries))
    hits = retriever.search(wanted, config.top_k + 1)
    found = {
        query: [hit.passage for hit in some] for query, some in zip(wanted, hits, strict=True)
    }  # one more than is shown, for those whose search shall miss
    for item, one in zip(items, tried, strict=True):
        episode = act_out(item, one, found, config.top_k, recipe)
        for case in _cases(item, one, episode, found, lookup, rng, config, recipe):
            (score,) = Oracle().grade([case])
            assert score is not None
            yield JudgeExample(case, score, f" {_answer(case, item, score)}")


def act_out(
    item: MiniQuestion, one: Attempt, found: Mapping[str, Sequence[Passage]], top_k: int, recipe: TiresRag
) -> Trajectory:
    """What the recipe's expert does when it follows an attempt; no tokens, and nothing is scored."""
    searches: list[Search] = []

    def retrieve(query: str) -> list[Passage]:
        place = len(searches)
        passages = list(found[query])
        if place in one.failed_hops:
            passages = [p for p in passages if p.title != one.hops[place].title]
        passages = passages[:top_k]
        searches.append(Search.of(place, query, passages))
        return passages

    acted = dataclasses.replace(
        item, question=dataclasses.replace(item.question, answers=(one.answer,)), plan=one
    )
    segments: list[tuple[int, str]] = []
    for part in recipe.demonstrate(acted, retrieve):
        if isinstance(part, str):
            segments.append((POLICY, part))
        elif isinstance(part, Append):
            # What has no body is an early answer, which the expert shall see and not learn to write.
            text = f"{part.prefix}{part.body}{part.suffix}"
            segments.append((ENVIRONMENT if part.body else POLICY, text))
    none = np.zeros(0)
    return Trajectory(
        item.question, 0, 0, none, none, none, none, none, segments, searches, "answer", answer=one.answer
    )


def tokenize_judge_examples(
    verdicts: Iterator[JudgeExample], tokenizer: PreTrainedTokenizerBase, card: JudgeCard
) -> Iterator[Example]:
    """Verdicts as training examples: the prompt as the judge will be asked it, and the answer, which alone is a target."""
    room = card.context - card.answer_tokens - 2
    for verdict in verdicts:
        asked = fitting_ids(tokenizer, card.prompt_for(verdict.prompt), room)
        said = [*plain_ids(tokenizer, verdict.answer), tokenizer.eos_token_id]
        yield Example(np.array([*asked, *said], np.int32), np.arange(len(asked) + len(said)) >= len(asked))


# -- one attempt ---------------------------------------------------------------------------------------------------------


def _cases(
    item: MiniQuestion,
    one: Attempt,
    episode: Trajectory,
    found: Mapping[str, Sequence[Passage]],
    lookup: WikiLookup,
    rng: np.random.Generator,
    config: JudgeExamplesConfig,
    recipe: TiresRag,
) -> list[JudgePrompt]:
    searches = len(episode.searches)
    if rng.random() < config.partial:
        searches = int(rng.integers(searches))
    told = transcript_of(episode, recipe.environment.answer, "<think>", searches)
    shown = R3RagEnvironment().documents(episode.searches)
    shown = [passages for passages in shown if passages]
    documents = shown[int(rng.integers(len(shown)))]
    if rng.random() < 0.1:
        documents = tuple(found[item.question.text][: config.top_k])
    return [
        Relevance(item.question, documents),
        Sufficiency(item.question, told),
        Thinking(item.question, told),
        Correctness(item.question, _predicted(item, one, lookup, rng)),
    ]


def _predicted(item: MiniQuestion, one: Attempt, lookup: WikiLookup, rng: np.random.Generator) -> str:
    """The attempt's answer, or another one, at times in a sentence."""
    draw = rng.random()
    said = one.answer
    if draw < 0.3:
        said = item.question.answers[int(rng.integers(len(item.question.answers)))]
    elif draw < 0.7:
        said = wrong_answer(item, lookup, rng)
    forms = (
        "{}",
        "{}",
        "{}",
        "{}",
        "It is {}.",
        "The answer is {}.",
        f"The {one.hops[-1].query} is {{}}.",
    )
    return forms[int(rng.integers(len(forms)))].format(said)


# -- why -------------------------------------------------------------------------------------------------------------------


def _answer(case: JudgePrompt, item: MiniQuestion, score: float) -> str:
    match case:
        case Sufficiency(_, told):
            said = f'{{"Sufficient Context": {score:.0f}}}'
            return _thought(_chain(item, told), said)
        case Thinking(question, told):
            return _thought(_quality(question, told), f"{score:.1f}")
        case Relevance(question, passages):
            titles = {passage.title for passage in passages}
            found = [title for title in question.gold if title in titles]
            return _thought(f"{item.plan.facts} : {' ; '.join(found) or 'nothing'}", f"{score:.1f}")
        case Correctness(question, predicted):  # side by side they are easier to compare
            return _thought(f"{gold_text(question)} : {predicted}", str(score > 0))
    raise TypeError(f"no reasons are known for {type(case).__name__}")


def _thought(reasons: str, said: str) -> str:
    return f"<think> {reasons} </think> {said}"


def _chain(item: MiniQuestion, told: Transcript) -> str:
    """The facts that the question needs, up to the first whose passage was not found."""
    facts = []
    for hop in item.plan.hops:
        known = hop.title in told.titles
        facts.append(f"The {hop.query} is {hop.value if known else 'unknown'}.")
        if not known:
            break
    return " ".join(facts)


def _quality(question: Question, told: Transcript) -> str:
    """Which of the needed passages are named, and what is said that had not been found; the share of each."""
    named = [
        title if chain_coverage(dataclasses.replace(question, gold=(title,)), told) else "unknown"
        for title in question.gold
    ]
    new = list(dict.fromkeys(word for word, stood in claims(question, told) if not stood))[:MAX_LISTED_WORDS]
    shares = f"{chain_coverage(question, told):.1f}", f"{groundedness(question, told):.1f}"
    return f"{' ; '.join(named)} : {shares[0]}. Not found : {', '.join(new) or 'nothing'} : {shares[1]}."
