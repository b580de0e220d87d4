"""Judge examples from the built-in world: prompts with the oracle's score and reasons, to train and to test a small judge.

The oracle (`rrl.rewards.oracle.Oracle`) scores by gold passages and gold answers.

A recipe's scripted expert carries out an attempt at a question, correct or faulty, with a real retriever. The attempt gives
one prompt of each kind that recipes send to a judge: whether the context is sufficient, how good the thinking is
(TIRESRAG-R1), how relevant the passages of one step are (R3-RAG), and whether the answer is correct.

Read `make_judge_examples` first.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rrl.data.examples import Example
from rrl.data.passages import Passage
from rrl.data.trajectory import ENVIRONMENT, POLICY, Search, Trajectory
from rrl.errors import UserError, at_least
from rrl.miniwiki import KINDS as QUESTION_KINDS
from rrl.miniwiki import MiniQuestion, MiniWiki, mixed_questions
from rrl.miniwiki.attempts import Attempt, make_attempt, wrong_answer
from rrl.miniwiki.experts import demonstrate
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
)
from rrl.rewards.oracle import Oracle
from rrl.rewards.transcript import transcript_of
from rrl.rollout.protocol import Append
from rrl.sft.judge_answers import answer_with_reasons
from rrl.text.chat import fitting_ids
from rrl.text.encoding import plain_ids

PROMPT_KINDS: tuple[type, ...] = (Relevance, Sufficiency, Thinking, Correctness)
"""Kinds of prompts that the judge of the built-in world answers."""
FREE_TOKENS = 2
"""Tokens of the context that the rollout engine reserves after a prompt."""


@dataclasses.dataclass(frozen=True)
class JudgeExamplesConfig:
    """How attempts and prompts are generated."""

    faulty: float = 0.6
    """Share of attempts for which a fault is drawn. If it does not apply to the question, the attempt is correct."""
    partial: float = 0.2
    """Share of attempts whose transcript ends before the passages of one of the searches. Only the prompts about sufficiency and
    thinking contain the transcript."""
    top_k: int = 2
    """Passages per search, as in the runs of the built-in world."""
    context: int = 1280
    """Largest number of tokens of a prompt and its answer."""
    answer_tokens: int = 160
    """Largest number of tokens of an answer."""

    def __post_init__(self) -> None:
        for name in ("faulty", "partial"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"data.options.{name}={getattr(self, name)} must lie in 0..1, a share")
        at_least(1, self, "top_k", "answer_tokens", where="data.options.")
        # At least one token of a prompt, besides `FREE_TOKENS`.
        if self.context < self.answer_tokens + FREE_TOKENS + 1:
            raise UserError(
                f"data.options.context={self.context} must hold answer_tokens={self.answer_tokens} and a prompt"
            )

    @property
    def card(self) -> JudgeCard:
        """Return the card of a judge that is trained on these examples."""
        return JudgeCard(
            instructions=False,
            context=self.context,
            answer_tokens=self.answer_tokens,
            cases=tuple(kind.__name__ for kind in PROMPT_KINDS),
        )


@dataclasses.dataclass(frozen=True)
class JudgeExample:
    """A judge prompt with the oracle's score and the answer that the judge should write."""

    prompt: JudgePrompt
    score: float
    """The oracle's score, in 0..1."""
    answer: str
    """The text that the judge should write: the reasons, then the score in the form that `prompt.read` parses."""


def make_judge_examples(
    wiki: MiniWiki, seed: int, per_kind: int, config: JudgeExamplesConfig, recipe: TiresRag | None = None
) -> Iterator[JudgeExample]:
    """Yield judge examples in random order. The same arguments give the same examples.

    Args:
        wiki: the built-in world.
        seed: seed of questions and attempts.
        per_kind: questions of each kind. Each question gives one example of each of `PROMPT_KINDS`.
        config: shares of faulty and partial attempts, passages per search.
        recipe: its scripted expert carries out the attempts; None: TIRESRAG-R1 whose prompt is the question alone.
    """
    recipe = recipe or TiresRag(opening="bare")
    rng = np.random.default_rng((seed, 4))  # 4 separates these draws from others with the same seed
    lookup = WikiLookup(wiki)
    items = mixed_questions(wiki, per_kind, QUESTION_KINDS, seed)
    attempts = [make_attempt(item, lookup, rng, config.faulty) for item in items]
    retriever = make_retriever(wiki.passages, "bm25", None, Bm25Config(title_weight=3))
    queries = [
        *(hop.query for attempt in attempts for hop in attempt.hops),
        *(item.question.text for item in items),
    ]
    unique = list(dict.fromkeys(queries))
    # One passage more than `top_k`: a search that must fail loses its gold passage and still returns `top_k` passages.
    hits_by_query = zip(unique, retriever.search(unique, config.top_k + 1), strict=True)
    results = {query: [hit.passage for hit in hits] for query, hits in hits_by_query}
    for item, attempt in zip(items, attempts, strict=True):
        trajectory = attempt_trajectory(item, attempt, results, config.top_k, recipe)
        for prompt in _prompts(item, attempt, trajectory, results, lookup, rng, config, recipe):
            (score,) = Oracle().grade([prompt])
            assert score is not None
            yield JudgeExample(prompt, score, f" {answer_with_reasons(prompt, item, score)}")


def attempt_trajectory(
    item: MiniQuestion,
    attempt: Attempt,
    results: Mapping[str, Sequence[Passage]],
    top_k: int,
    recipe: TiresRag,
) -> Trajectory:
    """Let the recipe's expert carry out an attempt; return its trajectory, without tokens and scores.

    Args:
        item: the question.
        attempt: its facts and answer, correct or wrong, and the searches that must fail.
        results: query -> its best passages, at least `top_k` + 1.
        top_k: passages per search.
        recipe: recipe whose scripted expert carries out the attempt.
    """
    searches: list[Search] = []

    def retrieve(query: str) -> list[Passage]:
        hop_index = len(searches)
        passages = list(results[query])
        if hop_index in attempt.failed_hops:
            passages = [p for p in passages if p.title != attempt.hops[hop_index].title]
        passages = passages[:top_k]
        searches.append(Search.of(hop_index, query, passages))
        return passages

    expert_item = dataclasses.replace(
        item, question=dataclasses.replace(item.question, answers=(attempt.answer,)), plan=attempt
    )
    segments: list[tuple[int, str]] = []
    for part in demonstrate(recipe, expert_item, retrieve):
        if isinstance(part, str):
            segments.append((POLICY, part))
        elif isinstance(part, Append):
            # An Append without a body is an early answer of the expert. It is an Append so that SFT does not train on it.
            text = f"{part.prefix}{part.body}{part.suffix}"
            segments.append((ENVIRONMENT if part.body else POLICY, text))
    empty = np.zeros(0)
    return Trajectory(
        item.question,
        request=0,
        group=0,
        tokens=empty,
        roles=empty,
        logps=empty,
        sampled_logps=empty,
        turns=empty,
        segments=segments,
        searches=searches,
        ended="answer",
        answer=attempt.answer,
    )


def tokenize_judge_examples(
    examples: Iterator[JudgeExample], tokenizer: PreTrainedTokenizerBase, card: JudgeCard
) -> Iterator[Example]:
    """Yield training examples: the prompt as the judge receives it, and the answer. The loss is on the answer only."""
    room = card.context - card.answer_tokens - FREE_TOKENS
    for example in examples:
        prompt = fitting_ids(tokenizer, card.prompt_for(example.prompt), room)
        answer = [*plain_ids(tokenizer, example.answer), tokenizer.eos_token_id]
        yield Example(
            np.array([*prompt, *answer], np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt)
        )


def _prompts(
    item: MiniQuestion,
    attempt: Attempt,
    trajectory: Trajectory,
    results: Mapping[str, Sequence[Passage]],
    lookup: WikiLookup,
    rng: np.random.Generator,
    config: JudgeExamplesConfig,
    recipe: TiresRag,
) -> list[JudgePrompt]:
    """Return one prompt of each kind about an attempt that was carried out in `trajectory`."""
    searches = len(trajectory.searches)
    if rng.random() < config.partial:
        searches = int(rng.integers(searches))
    transcript = transcript_of(trajectory, recipe.environment.answer, "<think>", searches)
    shown = R3RagEnvironment().documents(trajectory.searches)
    shown = [passages for passages in shown if passages]
    documents = shown[int(rng.integers(len(shown)))]
    if rng.random() < 0.1:  # sometimes the passages that the whole question retrieves
        documents = tuple(results[item.question.text][: config.top_k])
    return [
        Relevance(item.question, documents),
        Sufficiency(item.question, transcript),
        Thinking(item.question, transcript),
        Correctness(item.question, _predicted(item, attempt, lookup, rng)),
    ]


def _predicted(item: MiniQuestion, attempt: Attempt, lookup: WikiLookup, rng: np.random.Generator) -> str:
    """Return the answer to judge: the attempt's, a gold answer or a wrong one, sometimes within a sentence."""
    draw = rng.random()
    answer = attempt.answer
    if draw < 0.3:
        answer = item.question.answers[int(rng.integers(len(item.question.answers)))]
    elif draw < 0.7:
        answer = wrong_answer(item, lookup, rng)
    forms = (
        "{}",
        "{}",
        "{}",
        "{}",
        "It is {}.",
        "The answer is {}.",
        f"The {attempt.hops[-1].query} is {{}}.",
    )
    return forms[int(rng.integers(len(forms)))].format(answer)
