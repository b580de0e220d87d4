r"""ReSearch (Chen et al., 2025, arXiv 2503.19470): think, search, read, answer in \boxed{}; F1, or a small format reward.

A baseline of R-Search, TIRESRAG-R1, R3-RAG and R2AG.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import at_least, one_of
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.scoring import answer_metrics, one_search_per_turn
from rrl.rollout.protocol import Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, count_tags, has_exactly_one, last_content, tag_contents

TOKEN_BUDGET = 8192
"""Tokens of a trajectory, with prompt and search results. The paper has no other limit."""

INSTRUCTION = (
    "You answer questions step by step, with a search tool for Wikipedia at hand. Think first, between <think> and </think>. "
    "While you think you may look up facts as often as you like: write <search> your query </search>, and what is found is given "
    "to you between <result> and </result>; then think again. At the end write the answer between <answer> and </answer>, and in "
    "it the exact answer in \\boxed{}. An example: <think> what is needed </think> <search> a query </search> <result> what was "
    "found </result> <think> what follows </think> <answer> It is \\boxed{the exact answer} </answer>."
)
"""A paraphrase of the published templates. It begins the text of a base model, and is the system turn of an instruction-tuned
model."""

OPENINGS = ("instruct", "base", "bare")
"""Values of `ReSearch.opening`."""


@dataclasses.dataclass(frozen=True)
class ReSearchEnvironment(Stream):
    """A turn ends at `</search>` or at the end-of-sequence token. Only `TOKEN_BUDGET` limits searches, turns and results."""

    observation: Tag = "result"
    max_searches: int = TOKEN_BUDGET
    turn_tokens: int = TOKEN_BUDGET
    observation_tokens: int = TOKEN_BUDGET
    correction: str = ""
    """Empty: a turn that neither searches nor answers ends the episode."""


@register("research")
@dataclasses.dataclass(frozen=True)
class ReSearch(Recipe):
    r"""The protocol and the reward of the paper: 0 if the format is wrong, else F1, or 0.1 if F1 is 0.

    The format is correct if there is at least one thought and all thoughts are closed, every turn but the last ends in one
    search, the last turn has the only answer, with \boxed{} in it, and the policy writes no search result.
    """

    opening: str = "instruct"
    """The prompt: "instruct" (a system turn), "base" (no chat template), or "bare": the question alone, for a policy that is
    too small to follow instructions and was cold-started without any."""
    format_reward: float = 0.1
    """For the correct format with F1 = 0."""
    pay_malformed: bool = False
    """True: F1 is given even if the format is wrong, as Eq. 2 is printed."""
    answer_rule: str = "rrl"
    """How the reward's F1 compares answers: a name in `rrl.text.normalize.RULES`. The released code matches "hotpotqa"."""
    environment: ReSearchEnvironment = dataclasses.field(default_factory=ReSearchEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(OPENINGS, self, "opening")
        one_of(RULES, self, "answer_rule")
        at_least(0, self, "format_reward")

    curves: ClassVar[Curves] = Curves({"answer": "answer: F1", "format": "format"})

    @property
    def tags(self) -> dict[Tag, str]:
        return {"think": "reasoning", self.environment.search: "search", self.environment.answer: "answer"}

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, max(1.0, self.format_reward)

    @property
    def uninformative_spread(self) -> float:
        """1.5 times the reward of the format alone.

        The totals of two answers with F1 = 0 never differ by more than this, whatever their format. Those of answers with
        different F1 usually do.
        """
        return round(1.5 * self.format_reward, 10)

    def prompt(self, question: Question) -> Prompt:
        if self.opening == "base":
            return Prompt(f"{INSTRUCTION}\n\nUser: {question.text}\nAssistant:", chat=False)
        return Prompt(question.text, system=INSTRUCTION if self.opening == "instruct" else "")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards: "answer" is F1, "format" the reward of the format alone, "total" their sum.

        In a wrong format "answer" is 0, unless `pay_malformed`.
        """
        for trajectory in trajectories:
            # `last_content` returns the content of the last <answer>...</answer>, `last_boxed` that of the last \boxed{} in it.
            latex_answer = last_boxed(last_content(trajectory.response, self.environment.answer))
            trajectory.answer = "" if latex_answer is None else latex_answer
            well_formed = self.well_formed(trajectory.response)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(well_formed)}
            f1 = token_f1(trajectory.answer, trajectory.question.answers, RULES[self.answer_rule])
            answer = f1 if well_formed or self.pay_malformed else 0.0
            format_only = self.format_reward if well_formed and not answer else 0.0
            trajectory.rewards = {"answer": answer, "format": format_only, "total": answer + format_only}

    def well_formed(self, response: Sequence[str]) -> bool:
        """Return whether the format is correct; `response` is the policy's text, one string per turn."""
        answer, whole = self.environment.answer, "".join(response)
        thoughts = len(tag_contents(whole, "think"))
        return (
            one_search_per_turn(response, self.environment)
            and thoughts > 0
            and count_tags(whole, "think") == (thoughts, thoughts)  # no stray tag
            and has_exactly_one(response, answer)
            and last_boxed(last_content(response[-1:], answer)) is not None
        )


def last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last \boxed{...} with matched braces; None if there is none or it is not closed."""
    _, opened, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:at].strip()
    return None
