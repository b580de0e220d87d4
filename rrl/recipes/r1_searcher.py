"""R1-Searcher (Song et al., 2025, arXiv 2503.05592): searches inside one long thought; rewards in two stages; REINFORCE++.

A baseline of the papers. "Released" is the authors' code.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.expert import DemonstrationBuilder, thoughts
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics, one_search_per_turn
from rrl.rollout.protocol import Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, box_sequence, boxed, has_exactly_one_box, last_box

INSTRUCTION = (
    "The user asks a question and you answer it. First you think it through, between <think> and </think>; then you give the "
    "final answer between <answer> and </answer>, as short as it can be. While you think you may search for what you are not "
    "sure of: write <|begin_of_query|> keywords <|end_of_query|>, each query about one fact only. The search system then gives "
    "you what it finds between <|begin_of_documents|> and <|end_of_documents|>, and you go on thinking."
)
"""In our words: what the published prompts ask for. For a base model its text begins with it, else it is the system's turn."""

OPENINGS = ("base", "instruct", "bare")
_STRANGE = re.compile("[Aa]ssistant|[\u4e00-\u9fff]")
"""A base model's signs that it goes on writing somebody else's dialogue."""


@dataclasses.dataclass(frozen=True)
class R1SearcherEnvironment(Stream):
    """A turn ends at <|end_of_query|>, with the text, or after 512 tokens."""

    search: Tag = ("<|begin_of_query|>", "<|end_of_query|>")
    observation: Tag = ("<|begin_of_documents|>", "<|end_of_documents|>")
    max_searches: int = 8
    turn_tokens: int = 512
    correction: str = ""
    """What neither searches nor answers ends the episode."""


@dataclasses.dataclass(frozen=True)
class R1Searcher(OutcomeRecipe):
    """Protocol and rewards of both stages. The thought is opened for the policy.

    - Stage 1, how to search: 0.5 for at least one search, and 0.5 for the right form; the answer is not looked at.
    - Stage 2, how to answer: F1, less 2 where the form is wrong. It starts from the policy of stage 1.

    The form is right where one thought is opened and closed and the one answer follows it with nothing else outside, the
    answer is short, every turn but the last ends in one query inside the thought, and the policy writes no documents itself.
    """

    opening: str = "base"
    """The prompt: "base" (no chat template), "instruct" (a system's turn), or "bare", the question alone, for a policy too small
    to follow instructions, which is cold-started without one."""
    stage: int = 2
    retrieval_reward: float = 0.5
    """Stage 1."""
    format_reward: float = 0.5
    """Stage 1."""
    malformed_penalty: float = 2.0
    """Stage 2; the published one is that of base models."""
    longest_answer: int = 10
    """Words of an answer in the right form (released)."""
    answer_rule: str = "rrl"
    """How the reward's F1 compares answers, a name of `rrl.text.normalize.RULES`; "tiresrag-r1" is what was released here too."""
    released_form: bool = False
    """True: what stands around the one answer is not looked at, and the word "assistant" or a Chinese character in what the
    policy writes is the wrong form. (Released, where "assistant" in a document is too; that is not kept.)"""
    advantage: str = "reward"
    """REINFORCE++: the reward itself, of which the objective takes the KL of each token and which it whitens over all tokens
    (`objective.kl_in`, `objective.whiten`)."""
    environment: R1SearcherEnvironment = dataclasses.field(default_factory=R1SearcherEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(OPENINGS, self, "opening")
        if self.stage not in (1, 2):
            raise UserError(f"stage={self.stage} must be 1 (retrieval and form) or 2 (answer and form)")
        one_of(RULES, self, "answer_rule")
        at_least(0, self, "retrieval_reward", "format_reward", "malformed_penalty")
        at_least(1, self, "longest_answer")

    curves: ClassVar[Curves] = Curves(
        {"retrieval": "search made (stage 1)", "answer": "answer: F1 (stage 2)", "format": "format"}
    )

    @property
    def tags(self) -> dict[Tag, str]:
        return {self.environment.search: "search", self.environment.answer: "answer"}

    def prompt(self, question: Question) -> Prompt:
        if self.opening == "base":
            text = f"{INSTRUCTION}\n\nUser: {question.text}\nAssistant: "
            return Prompt(text, prefill="<think>", chat=False)
        system = INSTRUCTION if self.opening == "instruct" else ""
        return Prompt(question.text, system=system, prefill="<think>")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Stage 1: "retrieval" and "format"; stage 2: "answer" and "format"; and their sum."""
        for trajectory in trajectories:
            trajectory.answer = last_box(trajectory.response, self.environment.answer)
            formed = self.well_formed(trajectory.written)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(formed)}
            if self.stage == 1:
                trajectory.rewards = {
                    "retrieval": self.retrieval_reward * bool(trajectory.searches),
                    "format": self.format_reward * formed,
                }
            else:
                f1 = token_f1(trajectory.answer, trajectory.question.answers, RULES[self.answer_rule])
                trajectory.rewards = {
                    "answer": f1,
                    "format": 0.0 if formed else -self.malformed_penalty,
                }
            trajectory.rewards["total"] = sum(trajectory.rewards.values())

    def well_formed(self, response: Sequence[str]) -> bool:
        """Whether the form is right; `response` is what the policy wrote behind the opened thought, cut where the environment
        spoke."""
        search, answer = self.environment.search, self.environment.answer
        if not one_search_per_turn(response, self.environment):
            return False
        said = [f"<think>{response[0]}", *response[1:]]
        whole, (_, _, after) = "".join(said), said[-1].partition("</think>")
        if not (has_exactly_one_box([whole], "think") and has_exactly_one_box(said, answer)):
            return False
        if len(last_box(said, answer).split()) > self.longest_answer:
            return False
        if self.released_form:
            return not _STRANGE.search(whole)
        return box_sequence(after, [search, answer]) == [answer]

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: one thought, in which it says what is needed, searches each hop and states what was read."""
        told = DemonstrationBuilder(self.environment, item, retrieve)
        needed, *read = thoughts(item.plan)
        for thought, hop in zip([f" {needed}", *read], item.plan.hops):
            told.search(f"{thought} ", hop)
        told.segments.append(
            f"{read[-1]} </think>\n{boxed(self.environment.answer, item.question.answers[0])}"
        )
        return told.segments
