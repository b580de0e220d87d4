"""Search-R1 (Jin et al., 2025, arXiv 2503.09516): think, search, read, answer; exact match, and v0.3's reward for the form.

A baseline of the papers. "Released" is the authors' code.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, Trajectory
from rrl.errors import UserError
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.expert import think_and_search
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics
from rrl.rollout.protocol import Stream
from rrl.text.spans import Tag, box_sequence, boxes, enclosed_content, last_box

INSTRUCTION = (
    "Answer the question. Whenever you have learned something new, first reason about it between <think> and </think>. If you "
    "find that you lack knowledge, search for it: write <search> your query </search>, and the best results are given to you "
    "between <information> and </information>. Search as often as you need. When nothing is missing any more, write the answer "
    "alone, without an explanation, between <answer> and </answer>, such as <answer> Lake Geneva </answer>."
)
"""In our words: what the published instruction asks for, in its order."""


@dataclasses.dataclass(frozen=True)
class SearchR1Environment(Stream):
    """A turn ends at </search>, at </answer>, or after 500 tokens; one that does neither is told so, which costs a turn."""

    observation: Tag = "information"
    stop_at_answer: bool = True
    max_searches: int = 4
    """Turns, corrected ones included; one more follows in which nothing is searched (v0.3)."""
    turn_tokens: int = 500
    observation_tokens: int = 500


@dataclasses.dataclass(frozen=True)
class SearchR1(OutcomeRecipe):
    """Protocol and rewards of v0.3. GRPO by default; PPO where the config has a critic.

    The reward, by the answer (exact match) and the form:

    | answer | form is right | form is wrong |
    |---|---|---|
    | right | 1 | 0.8 |
    | wrong | 0.2 | 0.1 |
    | none | (its form is wrong) | 0 |

    The form is right where the policy writes nothing but boxes: a thought and a search in every turn but the last, a thought and
    the answer in that, with white space between them and no further tag in them, and where it never had to be corrected.

    Not kept: the released reward reads prompt, response and documents as one text, so that an answer counts only beside another
    (the instruction's example) and a document's tags break the form. Its score for documents that hold the answer is 0 as
    published, and left out.
    """

    instruction: str = INSTRUCTION
    """What stands before the question. A model too small to follow instructions is cold-started without one."""
    use_format: bool = True
    """False is the paper's reward: exact match alone."""
    structure_reward: float = 0.2
    """What the right form earns where the answer is wrong, and what a right answer loses where the form is wrong."""
    answered_reward: float = 0.1
    """What a wrong answer in a wrong form earns, for being in an answer's box."""
    environment: SearchR1Environment = dataclasses.field(default_factory=SearchR1Environment)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("structure_reward", "answered_reward"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(
                    f"{field}={getattr(self, field)} must lie in 0..1, a share of what a right answer earns"
                )

    curves: ClassVar[Curves] = Curves({"answer": "answer: exact match", "format": "format"})

    @property
    def tags(self) -> dict[Tag, str]:
        return {"think": "reasoning", self.environment.search: "search", self.environment.answer: "answer"}

    def prompt(self, question: Question) -> str:
        return f"{self.instruction}\nQuestion: {question.text}" if self.instruction else question.text

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """The table above: "answer" is the exact match, "format" what the form adds to it or takes away."""
        for trajectory in trajectories:
            trajectory.answer = last_box(trajectory.response, self.environment.answer)
            formed = self.well_formed(trajectory)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(formed)}
            right = trajectory.metrics["em"]
            answered = any(boxes(text, self.environment.answer) for text in trajectory.response)
            total = self.total_reward(right > 0, formed, answered) if self.use_format else right
            trajectory.rewards = {"answer": right, "format": total - right, "total": total}

    def total_reward(self, right: bool, formed: bool, answered: bool) -> float:
        """The reward of v0.3."""
        if right:
            return 1.0 if formed else 1.0 - self.structure_reward
        if formed:
            return self.structure_reward
        return self.answered_reward if answered else 0.0

    def well_formed(self, trajectory: Trajectory) -> bool:
        """Whether the form is right; the environment's words are looked at only for corrections."""
        search, answer = self.environment.search, self.environment.answer
        tags: list[Tag] = ["think", search, self.environment.observation, answer]
        turns = [box_sequence(text, tags) for text in trajectory.response]
        given = [text for role, text in trajectory.segments if role == ENVIRONMENT]
        wanted = [["think", search]] * (len(turns) - 1) + [["think", answer]]
        return turns == wanted and all(enclosed_content(text) is not None for text in given)

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: think what is needed, search each hop, think what was read, answer."""
        return think_and_search(self.environment, item, retrieve, item.question.answers[0])
