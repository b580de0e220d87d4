"""R2AG (2025): a retrieval steering model grows a tree of queries and documents, rewarded by the gold documents that it hits.

Numbers of sections, equations, figures and tables are the paper's.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rrl.data.passages import Passage, render
from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import NOT_FINITE, POLICY, Search, Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki.questions import Hop, MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics
from rrl.recipes.r2ag_forest import STOP, Forest, RetrievalTree
from rrl.recipes.r2ag_rewards import (
    BASE,
    NONE,
    PREDICTED,
    STOP_RETRIEVAL,
    THINK,
    RewardWeights,
    SteeringOutput,
    expansion_rewards,
    parse_output,
)
from rrl.recipes.rsearch import READER_TEMPLATE
from rrl.retrieval.gold import gold_hits
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.protocol import (
    CONTEXT,
    TURN_TOKENS,
    Action,
    Append,
    Episode,
    Finish,
    Restart,
    SearchFor,
    Stream,
)
from rrl.text.chat import Prompt
from rrl.text.normalize import title_key
from rrl.text.spans import boxed

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
"""Figure A.3. The figure does not print how question and evidences follow; here each is named."""

OPENINGS = ("instruct", "bare")
TRUNCATED = "length"
"""Why an episode ended whose output was cut at its limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expansion:
    """One expansion of a tree: what was written, and each query that was searched with what it found."""

    output: SteeringOutput
    base: tuple[Search, ...] = ()
    predicted: tuple[Search, ...] = ()
    truncated: bool = False

    @property
    def searches(self) -> tuple[Search, ...]:
        """All of them, base queries first."""
        return (*self.base, *self.predicted)


@dataclasses.dataclass(frozen=True)
class R2AGEnvironment:
    """Definition 2.1 and B.1: an output proposes queries, all are searched side by side, and a fresh prompt shows the question
    with all documents found so far.

    A tree of the forest (`rrl.recipes.r2ag_forest.RetrievalTree`) is expanded once, with all queries: that is training. Any
    other question is asked to its end: that is inference, with the limits below.
    """

    opening: str = "instruct"
    """The prompt: "instruct" (Figure A.3), or "bare", question and documents alone, for a policy too small to follow
    instructions, which is cold-started without one."""
    expansions: int = 5
    """Most expansions of a tree, in training and inference (L_MAX-I, B.2)."""
    base_queries: int = 4
    """t: the first so many base queries of an output are searched in inference (C.2: M, the dataset's most hops, or M/2)."""
    predicted_queries: int = 2
    """The same of predicted queries; 0 is inference with base queries only (R2AG_base)."""
    turn_tokens: int = 4096
    """Most tokens of an output (B.2); one that reaches them is cut, earns 0 and is not searched."""

    def __post_init__(self) -> None:
        one_of(OPENINGS, self, "opening", where="environment.")
        at_least(1, self, "expansions", "base_queries", "turn_tokens", where="environment.")
        at_least(0, self, "predicted_queries", where="environment.")

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    @property
    def observation_tokens(self) -> int:
        """There are no observations: documents stand in the next prompt."""
        return 0

    def prompt(self, question: Question, documents: Sequence[Passage], failed: bool = False) -> Prompt:
        """The question with the documents kept so far, and whether a search for more has just `failed`."""
        shown, after = render(documents), f"\n{Stream.failure}" if failed else ""
        if self.opening == "bare":
            return Prompt(question.text, body=f"\n{shown}" if shown else "", after=after)
        head = f"{INSTRUCTION}\n\nUser question: {question.text}\n\nEvidences:\n"
        return Prompt(head, body=shown or "(none)", after=after)

    def searched_queries(
        self, question: Question, output: SteeringOutput
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The base and predicted queries of an output that are searched."""
        if isinstance(question, RetrievalTree):
            return output.base, output.predicted
        return output.base[: self.base_queries], output.predicted[: self.predicted_queries]

    def react(self, episode: Episode, text: str, stop: str) -> Action:
        if stop in (TURN_TOKENS, CONTEXT):
            return Finish(TRUNCATED)
        output = parse_output(text)
        base, predicted = self.searched_queries(episode.question, output)
        if queries := base + predicted:
            return SearchFor(queries[0], queries[1:])
        return Finish(STOP if output.stop else "no_action")

    def observe(self, episode: Episode, *found: Sequence[Passage] | None) -> Action:
        if parse_output(episode.policy_texts[-1]).stop:
            return Finish(STOP)
        if isinstance(episode.question, RetrievalTree):
            return Finish("expanded")
        if episode.turn + 1 >= self.expansions:
            return Finish("turn_limit")
        return Restart(self.prompt(episode.question, documents_of(episode.searches), None in found))

    def overflow(self, episode: Episode, message: Append | Restart, room: int) -> Action:
        return Finish("context_limit")


@dataclasses.dataclass(frozen=True)
class R2AG(OutcomeRecipe):
    """Expansions of Definition 2.1 (Figure A.3), rewards of Eq. 5, the forest of Algorithm 1; an expansion is an episode in
    training, a whole tree in inference, after which a generator answers from the documents."""

    multi_hit_weight: float = 0.2
    """alpha (B.2)."""
    joint_hit_weight: float = 0.3
    """beta."""
    precision_weight: float = 0.2
    """gamma."""
    predicted_factor: float = 1.25
    """l: what a gold document counts in R_MH that a predicted query finds."""
    format_reward: float = 0.01
    """omega·R_f of each of base-Q and predicted-Q after a think segment."""
    top_base: int = 4
    """t of R_AP for base queries (B.2)."""
    top_predicted: int = 2
    """The same for predicted queries."""
    pay_known: bool = True
    """Eq. 5 as printed pays R_AP for gold documents that earlier expansions found, too; False: for new ones only."""
    trees: int = 0
    """Questions that are planted at a time; 0: all, as Algorithm 1 has it. When they are finished or expanded for the last
    time, the next are planted."""
    shown_misses: float = 0.3
    """Share of the scripted expert's demonstrations with a search that misses: one of several documents is not found at once,
    or another one stands among them."""
    environment: R2AGEnvironment = dataclasses.field(default_factory=R2AGEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "multi_hit_weight", "joint_hit_weight", "precision_weight", "predicted_factor")
        at_least(0, self, "format_reward", "trees")
        at_least(1, self, "top_base", "top_predicted")
        if not 0 <= self.shown_misses <= 1:
            raise UserError(f"shown_misses={self.shown_misses} must lie in 0..1, a share")

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
    def tags(self) -> dict[str, str]:
        return {BASE: "search", PREDICTED: "search"}

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
        kept = question.documents if isinstance(question, RetrievalTree) else ()
        return self.environment.prompt(question, kept)

    def curriculum(self, questions: Sequence[Question], seed: int) -> Curriculum:
        """Algorithm 1: the forest, from each question's own tree on."""
        return Forest(questions, trees=self.trees, expansions=self.environment.expansions, seed=seed)

    # -- rewards -----------------------------------------------------------------------------------------------------

    def expansions(self, trajectory: Trajectory) -> list[Expansion]:
        """The expansions of an episode, in their order; a trajectory read from a file will do."""
        said = [text for role, text in trajectory.segments if role == POLICY]
        found = []
        for turn, text in enumerate(said):
            output = parse_output(text)
            searches = tuple(search for search in trajectory.searches if search.turn == turn)
            base = len(self.environment.searched_queries(trajectory.question, output)[0])
            # The last turn of an episode that ended as NOT_FINITE may have no text: then what stands last was searched.
            broken = trajectory.ended == NOT_FINITE and not searches
            cut = turn == len(said) - 1 and (trajectory.ended == TRUNCATED or broken)
            found.append(Expansion(output, searches[:base], searches[base:], cut))
        return found

    @property
    def answers_with_reader(self) -> bool:
        """Whether another model answers, from what was found."""
        return True

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Eq. 5 of each expansion, over which the components are summed; 0 where no gold passages are known.

        A whole tree is measured by what it found, and by what a generator (`scoring.reader`) answers from that; without one
        its answer is empty.
        """
        for trajectory in trajectories:
            self._score_expansions(trajectory)
        self._score_trees([t for t in trajectories if not isinstance(t.question, RetrievalTree)], scoring)

    def _score_expansions(self, trajectory: Trajectory) -> None:
        question = trajectory.question
        node = question if isinstance(question, RetrievalTree) else RetrievalTree.of(question)
        known = [document.title for document in node.documents]
        gold = {title_key(title) for title in node.gold}
        names = ("multi_hit", "joint_hit", "precision", "written", "total")
        trajectory.rewards = dict.fromkeys(names, 0.0)
        trajectory.turn_rewards = {}
        expansions = self.expansions(trajectory)
        for turn, expansion in enumerate(expansions if gold else ()):
            best = [_best(expansion.base), _best(expansion.predicted)]
            paid = expansion_rewards(
                expansion.output,
                *best,
                gold=gold,
                known=known,
                truncated=expansion.truncated,
                weights=self.weights,
            )
            trajectory.rewards = {name: trajectory.rewards[name] + paid[name] for name in names}
            trajectory.turn_rewards[turn] = paid["total"]
            # A node's tree keeps the best document of a query alone (`pruned`), however many are shown.
            kept = 1 if isinstance(question, RetrievalTree) else None
            known += [title for search in expansion.searches for title in search.titles[:kept]]
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
            "kept": float(len(node.documents)),
        }

    def _score_trees(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Retrieval metrics of whole trees (Table 1), and the generator's answers (Table 3)."""
        titles = [[title for search in t.searches for title in search.titles] for t in trajectories]
        hits = gold_hits(titles, [t.question.gold for t in trajectories])
        measured = {
            "recall": hits.recall(),
            "full_recall": hits.full_recall(),
            "map": hits.average_precision(),
            "hits": hits.hit(),
            "passages": hits.found,
        }
        documents = [documents_of(t.searches) for t in trajectories]
        prompts = [generator_prompt(t.question, d) for t, d in zip(trajectories, documents, strict=True)]
        ask = scoring.reader
        answers = ask(prompts) if ask is not None and prompts else [""] * len(prompts)
        for place, (trajectory, answer) in enumerate(zip(trajectories, answers, strict=True)):
            trajectory.answer = answer
            trajectory.metrics |= answer_metrics(trajectory)
            trajectory.metrics |= {name: float(values[place]) for name, values in measured.items()}

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: state what the documents say, ask for every fact that can be looked up next, and stop when
        nothing is missing. It predicts nothing: the facts of the built-in world are random.

        A query that does not find its passage ends the demonstration.
        """
        segments: DemonstrationSegments = []
        kept: list[Passage] = []
        draw = zlib.crc32(item.question.id.encode())
        missing = draw % 1000 < 1000 * self.shown_misses
        while True:
            stated, wanted = _known(item, {title_key(passage.title) for passage in kept})
            thought = "\n".join(filter(None, [f"To find : {item.plan.facts}", " ".join(stated)]))
            queries = [hop.query for hop in wanted] or [STOP_RETRIEVAL]
            boxes = [(THINK, thought), *((BASE, query) for query in queries), (PREDICTED, NONE)]
            segments.append("\n".join(boxed(tag, text) for tag, text in boxes))
            found = [(hop, list(retrieve(hop.query))) for hop in wanted]
            hits = [bool(some) and title_key(some[0].title) == title_key(hop.title) for hop, some in found]
            if not found or not all(hits):
                return segments
            if missing and len(found) > 1:
                found.pop(draw // 1000 % len(found))
                missing = False
            for _, some in found:
                kept += [passage for passage in some[: 1 + missing] if passage not in kept]
            missing = False
            segments.append(Restart(self.environment.prompt(item.question, kept)))


def documents_of(searches: Iterable[Search]) -> list[Passage]:
    """All passages that were found, in order, each once."""
    return list({(p.title, p.text): p for search in searches for p in search.passages}.values())


def generator_prompt(question: Question, documents: Sequence[Passage]) -> Prompt:
    """What the generator reads: all documents of the tree and the question. The paper does not print its own prompt."""
    before, after = READER_TEMPLATE.split("{evidence}")
    shown = render(documents) or "(none)"
    return Prompt(before, body=shown, after=after.format(query=with_choices(question)))


def _best(searches: Sequence[Search]) -> list[str]:
    """The title of the best document of each search (Hit@Top-1); "" where it found none."""
    return [search.titles[0] if search.titles else "" for search in searches]


def _known(item: MiniQuestion, titles: set[str]) -> tuple[list[str], list[Hop]]:
    """What the documents of these titles say of a question's facts, as sentences, and the facts to look up next."""
    hops, plan = item.plan.hops, item.plan
    length = len(hops) // (2 if plan.conclusion else 1)
    stated, wanted = [], []
    for at in range(0, len(hops), length):
        for hop in hops[at : at + length]:
            if title_key(hop.title) not in titles:
                wanted.append(hop)
                break
            stated.append(f"The {hop.query} is {hop.value}.")
    if not wanted and plan.conclusion:
        stated.append(plan.conclusion)
    return stated, list({hop.query: hop for hop in wanted}.values())
