"""Search-R1 (Jin et al., 2025, arXiv 2503.09516): think, search, read, answer; exact match, and a format reward.

A baseline of R-Search, TIRESRAG-R1, R3-RAG and R2AG. "Released" means the authors' code, and v0.3 its version that adds
the format reward to the paper's exact match.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, Trajectory
from rrl.errors import UserError
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.scoring import answer_metrics
from rrl.rollout.protocol import Stream
from rrl.text.spans import Tag, enclosed_content, last_content, tag_contents, tag_sequence

INSTRUCTION = (
    "Answer the question. Whenever you have learned something new, first reason about it between <think> and </think>. If you "
    "find that you lack knowledge, search for it: write <search> your query </search>, and the best results are given to you "
    "between <information> and </information>. Search as often as you need. When nothing is missing any more, write the answer "
    "alone, without an explanation, between <answer> and </answer>, such as <answer> Lake Geneva </answer>."
)
"""A paraphrase of the published instruction, in the same order."""


@dataclasses.dataclass(frozen=True)
class SearchR1Environment(Stream):
    """A turn ends at `</search>`, at `</answer>`, or after 500 tokens. A turn without search and answer gets a correction, which
    costs a turn."""

    observation: Tag = "information"
    stop_at_answer: bool = True
    max_searches: int = 4
    """Maximum number of turns, including corrected ones. After them the policy gets one last turn without search (v0.3)."""
    turn_tokens: int = 500
    observation_tokens: int = 500


@register("search_r1")
@dataclasses.dataclass(frozen=True)
class SearchR1(Recipe):
    """The protocol and the rewards of v0.3. GRPO by default; PPO if the config has a critic.

    The reward, by answer (exact match) and format:

    | answer | correct format | wrong format |
    |---|---|---|
    | right | 1 | 0.8 |
    | wrong | 0.2 | 0.1 |
    | none | (always wrong format) | 0 |

    The format is correct if every turn but the last is one thought and one search, the last turn is one thought and the
    answer, only white space stands between the tags, no tag holds another one, and no turn needed a correction.

    Differences from the released code: The released reward parses prompt, response and documents as one text. It therefore
    needs two answers, of which the first is the example in the instruction, and tags in a document break the format. Here only
    the policy's text is parsed. The released code can also reward documents that contain the answer. The published value
    of that reward is 0, so it is omitted here.
    """

    instruction: str = INSTRUCTION
    """The text before the question; "" for a policy that is too small to follow instructions and was cold-started without any."""
    use_format: bool = True
    """False: the paper's reward, exact match alone."""
    structure_reward: float = 0.2
    """Reward of a wrong answer in the correct format. A right answer in a wrong format earns 1 minus this."""
    answered_reward: float = 0.1
    """Reward of a wrong answer in a wrong format."""
    environment: SearchR1Environment = dataclasses.field(default_factory=SearchR1Environment)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("structure_reward", "answered_reward"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(
                    f"{field}={getattr(self, field)} must lie in 0..1, a fraction of the reward of a right answer"
                )

    curves: ClassVar[Curves] = Curves({"answer": "answer: exact match", "format": "format"})

    @property
    def tags(self) -> dict[Tag, str]:
        return {"think": "reasoning", self.environment.search: "search", self.environment.answer: "answer"}

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def uninformative_spread(self) -> float:
        """1.5 times the largest effect of the format (0.3 by default).

        Right and wrong answers differ by more: with the default rewards, by at least 0.6.
        """
        return round(1.5 * max(self.structure_reward, self.answered_reward), 10)

    def prompt(self, question: Question) -> str:
        return f"{self.instruction}\nQuestion: {question.text}" if self.instruction else question.text

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards: "answer" is the exact match, "format" what the format adds or subtracts, "total" their sum."""
        for trajectory in trajectories:
            trajectory.answer = last_content(trajectory.response, self.environment.answer)
            well_formed = self.well_formed(trajectory)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(well_formed)}
            right = trajectory.metrics["em"]
            answered = any(tag_contents(text, self.environment.answer) for text in trajectory.response)
            total = self.total_reward(right > 0, well_formed, answered) if self.use_format else right
            trajectory.rewards = {"answer": right, "format": total - right, "total": total}

    def total_reward(self, right: bool, well_formed: bool, answered: bool) -> float:
        """Return the reward of v0.3 (the table of the class docstring)."""
        if right:
            return 1.0 if well_formed else 1.0 - self.structure_reward
        if well_formed:
            return self.structure_reward
        return self.answered_reward if answered else 0.0

    def well_formed(self, trajectory: Trajectory) -> bool:
        """Return whether the format is correct. Of the environment's text, only corrections count against it."""
        search, answer = self.environment.search, self.environment.answer
        tags: list[Tag] = ["think", search, self.environment.observation, answer]
        turns = [tag_sequence(text, tags) for text in trajectory.response]
        observations = [text for role, text in trajectory.segments if role == ENVIRONMENT]
        expected = [["think", search]] * (len(turns) - 1) + [["think", answer]]
        # A correction is the only text of the environment that has no observation tag.
        return turns == expected and all(enclosed_content(text) is not None for text in observations)
