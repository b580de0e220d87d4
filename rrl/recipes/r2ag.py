"""R2AG (2025): a retrieval steering model grows a tree of queries and documents and is rewarded for gold documents found.

Sections, equations, figures and tables are numbered as in the paper. Read `R2AGEnvironment` first. The forest is in
`rrl.recipes.r2ag_forest`, Eq. 5 in `rrl.recipes.r2ag_rewards`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rrl.data.passages import Passage, render
from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import NOT_FINITE, POLICY, Search, Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.r2ag_forest import STOP, Forest, RetrievalTree
from rrl.recipes.r2ag_rewards import (
    BASE,
    PREDICTED,
    RewardWeights,
    SteeringOutput,
    expansion_rewards,
    parse_output,
)
from rrl.recipes.rsearch import READER_TEMPLATE
from rrl.recipes.scoring import answer_metrics
from rrl.retrieval.gold import gold_hits
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.protocol import (
    CONTEXT,
    TURN_TOKENS,
    Append,
    Environment,
    Episode,
    Finish,
    Restart,
    SearchFor,
    StepResult,
    Stream,
)
from rrl.text.chat import Prompt
from rrl.text.normalize import title_key
from rrl.text.spans import Tag

INSTRUCTION = """\
#Decomposition#
Task: You will be provided with a user question and evidences that may help to answer the question. Decompose the complex \
user question into single-hop retrievable sub-questions following these rules:
Steps:
1. Base Questions (<base-Q>):
- Decompose the current-hop question directly from user question, taking the evidences for reference (if the user question \
is "A → B → C", and evidences cover "A", then decompose into "B". Note do not repeat questions already answered by the \
provided evidences).
- Each must target a single fact (WHO/WHEN/WHERE/etc.)
- If evidences already answer the user question, respond with "stop retrieval" as the base question.

2. Predicted Questions (<predicted-Q>):
- Forecast next-hop questions based on the base questions only if you have knowledge to any base questions
- If you have no knowledge to predict further questions, or evidences already answers the user question, respond with \
"none" as the predicted question.

Keep your thinking process useful and brief.

Wrap reasoning process inside: <think></think>.
Wrap each of the base questions (or "stop retrieval") inside: <base-Q></base-Q>.
Wrap each of the predicted question (or "none") inside: <predicted-Q></predicted-Q>"""
"""Figure A.3. The figure does not print how question and evidences follow; here each has a heading."""

OPENINGS = ("instruct", "bare")
"""Values of `R2AGEnvironment.opening`."""
TRUNCATED = "length"
"""`Trajectory.ended` of an episode whose last output reached its token limit or the end of the context."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expansion:
    """One expansion of a tree: the model's output, and the searches it made."""

    output: SteeringOutput
    base: tuple[Search, ...] = ()
    """Searches of the base queries."""
    predicted: tuple[Search, ...] = ()
    """Searches of the predicted queries."""
    truncated: bool = False
    """Whether the output is incomplete: it reached its token limit or the end of the context, or logits were not finite."""

    @property
    def searches(self) -> tuple[Search, ...]:
        """All searches, base queries first."""
        return (*self.base, *self.predicted)


@dataclasses.dataclass(frozen=True)
class R2AGEnvironment(Environment):
    """Tree expansion (Definition 2.1, B.1): an output proposes queries, all are searched in parallel, and a new prompt shows the
    question with all documents found so far.

    In training, an episode is one expansion of a tree of the forest: its question is a
    `rrl.recipes.r2ag_forest.RetrievalTree`, and all proposed queries are searched. In inference, an episode expands the tree of
    a question until the policy stops or a limit below is reached.
    """

    opening: str = "instruct"
    """The prompt: "instruct" (Figure A.3), or "bare": question and documents alone, for a policy that is too small to follow
    instructions and was cold-started without any."""
    expansions: int = 5
    """Maximum number of expansions of a tree, in training and inference (L_MAX-I, B.2)."""
    base_queries: int = 4
    """In inference, the number of base queries of an output that are searched: the first t (C.2). The paper sets t to M or M/2,
    where M is the largest number of hops in the dataset."""
    predicted_queries: int = 2
    """The same for predicted queries; 0 searches base queries only (R2AG_base)."""
    turn_tokens: int = 4096
    """Maximum number of tokens of an output (B.2). An output that reaches the limit earns 0, and its queries are not searched."""

    def __post_init__(self) -> None:
        one_of(OPENINGS, self, "opening", where="environment.")
        at_least(1, self, "expansions", "base_queries", "turn_tokens", where="environment.")
        at_least(0, self, "predicted_queries", where="environment.")

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    @property
    def observation_tokens(self) -> int:
        """0: there are no observations; the next prompt shows the documents."""
        return 0

    def prompt(self, question: Question, documents: Sequence[Passage], failed: bool = False) -> Prompt:
        """Return the prompt of an expansion.

        Args:
          question: the question.
          documents: the documents of the tree so far.
          failed: whether a search of the previous expansion failed; the prompt then says so.
        """
        evidence, after = render(documents), f"\n{Stream.failure}" if failed else ""
        if self.opening == "bare":
            return Prompt(question.text, body=f"\n{evidence}" if evidence else "", after=after)
        head = f"{INSTRUCTION}\n\nUser question: {question.text}\n\nEvidences:\n"
        return Prompt(head, body=evidence or "(none)", after=after)

    def searched_queries(
        self, question: Question, output: SteeringOutput
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the base and the predicted queries of an output that are searched."""
        if isinstance(question, RetrievalTree):
            return output.base, output.predicted
        return output.base[: self.base_queries], output.predicted[: self.predicted_queries]

    def step(self, episode: Episode, text: str, stop: str) -> StepResult:
        if stop in (TURN_TOKENS, CONTEXT):
            return Finish(TRUNCATED)
        output = parse_output(text)
        base, predicted = self.searched_queries(episode.question, output)
        if queries := base + predicted:
            return SearchFor(queries[0], queries[1:])
        return Finish(STOP if output.stop else "no_action")

    def observe(self, episode: Episode, *passages: Sequence[Passage] | None) -> StepResult:
        if parse_output(episode.policy_texts[-1]).stop:
            return Finish(STOP)
        if isinstance(episode.question, RetrievalTree):
            return Finish("expanded")
        if episode.turn + 1 >= self.expansions:
            return Finish("turn_limit")
        return Restart(self.prompt(episode.question, documents_of(episode.searches), None in passages))

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> StepResult:
        return Finish("context_limit")


@register("r2ag")
@dataclasses.dataclass(frozen=True)
class R2AG(Recipe):
    """Expansions of Definition 2.1 (Figure A.3), rewards of Eq. 5, and the forest of Algorithm 1.

    An episode is one expansion in training and a whole tree in inference. In inference a generator then answers from the
    documents of the tree.
    """

    multi_hit_weight: float = 0.2
    """alpha of Eq. 5 (B.2)."""
    joint_hit_weight: float = 0.3
    """beta of Eq. 5 (B.2)."""
    precision_weight: float = 0.2
    """gamma of Eq. 5 (B.2)."""
    predicted_factor: float = 1.25
    """l of Eq. 5: weight in R_MH of a gold document found by a predicted query; one found by a base query counts 1."""
    format_reward: float = 0.01
    """omega·R_f of Eq. 5. It is earned once for base-Q and once for predicted-Q, if that tag occurs after a think segment."""
    top_base: int = 4
    """t of R_AP for base queries (B.2)."""
    top_predicted: int = 2
    """t of R_AP for predicted queries (B.2)."""
    pay_known: bool = True
    """Whether R_AP also counts gold documents that earlier expansions found (Eq. 5 as printed). False: only new ones count."""
    trees: int = 0
    """Number of trees (questions) that the forest grows at the same time; 0: all, as in Algorithm 1. When all of them are
    finished or have reached the maximum number of expansions, the next questions start."""
    shown_misses: float = 0.3
    """Only for cold starts on the built-in data (`rrl.miniwiki`): fraction of the scripted demonstrations that show a retrieval
    miss: one of several documents is not found at the first search, or an irrelevant document is found too."""
    environment: R2AGEnvironment = dataclasses.field(default_factory=R2AGEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "multi_hit_weight", "joint_hit_weight", "precision_weight", "predicted_factor")
        at_least(0, self, "format_reward", "trees")
        at_least(1, self, "top_base", "top_predicted")
        if not 0 <= self.shown_misses <= 1:
            raise UserError(f"shown_misses={self.shown_misses} must lie in 0..1, a fraction")

    curves: ClassVar[Curves] = Curves(
        {
            "multi_hit": "multi-hit (R_MH, Eq. 5)",
            "joint_hit": "joint hit (R_JH, Eq. 5)",
            "precision": "average precision (R_AP, Eq. 5)",
            "written": "format (R_f, Eq. 5)",
        },
        {"full_recall": "all gold documents found", "recall": "gold documents found"},
    )

    @property
    def tags(self) -> dict[Tag, str]:
        return {BASE: "search", PREDICTED: "search"}

    @property
    def answers_with_reader(self) -> bool:
        return True

    @property
    def reward_range(self) -> tuple[float, float]:
        """The upper end depends on the number of gold documents."""
        return 0.0, math.inf

    @property
    def weights(self) -> RewardWeights:
        """The coefficients of Eq. 5."""
        return RewardWeights(
            multi_hit=self.multi_hit_weight,
            joint_hit=self.joint_hit_weight,
            precision=self.precision_weight,
            predicted=self.predicted_factor,
            format=self.format_reward,
            top_base=self.top_base,
            top_predicted=self.top_predicted,
            pay_known=self.pay_known,
        )

    def prompt(self, question: Question) -> Prompt:
        documents = question.documents if isinstance(question, RetrievalTree) else ()
        return self.environment.prompt(question, documents)

    def curriculum(self, questions: Sequence[Question], size: int, seed: int) -> Curriculum:
        """Return the forest of Algorithm 1, which starts with one empty tree per question."""
        return Forest(questions, trees=self.trees, expansions=self.environment.expansions, seed=seed)

    # -- rewards -----------------------------------------------------------------------------------------------------

    def parse_expansions(self, trajectory: Trajectory) -> list[Expansion]:
        """Return the expansions of an episode, in order. The trajectory may come from a file."""
        outputs = [text for role, text in trajectory.segments if role == POLICY]
        expansions = []
        for turn, text in enumerate(outputs):
            output = parse_output(text)
            searches = tuple(search for search in trajectory.searches if search.turn == turn)
            base = len(self.environment.searched_queries(trajectory.question, output)[0])
            # Logits that are not finite can end the episode within an output. That output is truncated and has no searches.
            # If they occur before the first token of an output, `outputs` lacks that output. Its last entry is then complete
            # and has searches.
            interrupted = trajectory.ended == NOT_FINITE and not searches
            truncated = turn == len(outputs) - 1 and (trajectory.ended == TRUNCATED or interrupted)
            expansions.append(Expansion(output, searches[:base], searches[base:], truncated))
        return expansions

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set Eq. 5's rewards, summed over the expansions; 0 if the question names no gold passages.

        A whole tree also gets retrieval metrics, and an answer by the generator (`scoring.reader`); without a generator its
        answer is empty.
        """
        for trajectory in trajectories:
            self._score_expansions(trajectory)
        self._score_trees([t for t in trajectories if not isinstance(t.question, RetrievalTree)], scoring)

    def _score_expansions(self, trajectory: Trajectory) -> None:
        question = trajectory.question
        tree = question if isinstance(question, RetrievalTree) else RetrievalTree.of(question)
        known = [document.title for document in tree.documents]
        gold = {title_key(title) for title in tree.gold}
        names = ("multi_hit", "joint_hit", "precision", "written", "total")
        trajectory.rewards = dict.fromkeys(names, 0.0)
        trajectory.turn_rewards = {}
        expansions = self.parse_expansions(trajectory)
        for turn, expansion in enumerate(expansions if gold else ()):
            top = [_top_titles(expansion.base), _top_titles(expansion.predicted)]
            rewards = expansion_rewards(
                expansion.output,
                *top,
                gold=gold,
                known=known,
                truncated=expansion.truncated,
                weights=self.weights,
            )
            trajectory.rewards = {name: trajectory.rewards[name] + rewards[name] for name in names}
            trajectory.turn_rewards[turn] = rewards["total"]
            # In training the tree keeps only the top document of a query (`pruned`), however many a search returns.
            per_query = 1 if isinstance(question, RetrievalTree) else None
            known += [title for search in expansion.searches for title in search.titles[:per_query]]
        found = gold & {title_key(title) for title in known}
        last = expansions[-1].output if expansions else SteeringOutput()
        trajectory.metrics = {
            "recall": len(found) / max(len(gold), 1),
            "full_recall": float(len(found) == len(gold) > 0),
            "zeroed": float(trajectory.rewards["total"] == 0.0),
            "stopped": float(last.stop),
            "queries": float(sum(len(e.output.base) + len(e.output.predicted) for e in expansions)),
            "searches": float(sum(not search.failed for search in trajectory.searches)),
            "iterations": float(len(expansions)),
            "kept": float(len(tree.documents)),
        }

    def _score_trees(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the retrieval metrics of whole trees (Table 1) and the generator's answers (Table 3)."""
        titles = [[title for search in t.searches for title in search.titles] for t in trajectories]
        hits = gold_hits(titles, [t.question.gold for t in trajectories])
        metrics = {
            "recall": hits.recall(),
            "full_recall": hits.full_recall(),
            "map": hits.average_precision(),
            "hits": hits.hit(),
            "passages": hits.retrieved,
        }
        documents = [documents_of(t.searches) for t in trajectories]
        prompts = [generator_prompt(t.question, d) for t, d in zip(trajectories, documents, strict=True)]
        reader = scoring.reader
        answers = reader(prompts) if reader is not None and prompts else [""] * len(prompts)
        for index, (trajectory, answer) in enumerate(zip(trajectories, answers, strict=True)):
            trajectory.answer = answer
            trajectory.metrics |= answer_metrics(trajectory)
            trajectory.metrics |= {name: float(values[index]) for name, values in metrics.items()}


def documents_of(searches: Iterable[Search]) -> list[Passage]:
    """Return all passages found, in order, each once."""
    return list({(p.title, p.text): p for search in searches for p in search.passages}.values())


def generator_prompt(question: Question, documents: Sequence[Passage]) -> Prompt:
    """Return the generator's prompt: all documents of the tree and the question. The paper does not print its prompt."""
    before, after = READER_TEMPLATE.split("{evidence}")
    evidence = render(documents) or "(none)"
    return Prompt(before, body=evidence, after=after.format(query=with_choices(question)))


def _top_titles(searches: Sequence[Search]) -> list[str]:
    """Return the title of the top document of each search (Hit@Top-1); "" if it found none."""
    return [search.titles[0] if search.titles else "" for search in searches]
