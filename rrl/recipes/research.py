r"""ReSearch (Chen et al., 2025, arXiv 2503.19470): think, search, read, answer in \boxed{}; F1, and a little for the form alone.

A baseline of the papers.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import at_least, one_of
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.expert import think_and_search
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics, one_search_per_turn
from rrl.rollout.protocol import Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, boxes, count_tags, has_exactly_one_box, last_box

TOKEN_BUDGET = 8192
"""Tokens of a trajectory, prompt and results included: the only limit there is."""

INSTRUCTION = (
    "You answer questions step by step, with a search tool for Wikipedia at hand. Think first, between <think> and </think>. "
    "While you think you may look up facts as often as you like: write <search> your query </search>, and what is found is given "
    "to you between <result> and </result>; then think again. At the end write the answer between <answer> and </answer>, and in "
    "it the exact answer in \\boxed{}. An example: <think> what is needed </think> <search> a query </search> <result> what was "
    "found </result> <think> what follows </think> <answer> It is \\boxed{the exact answer} </answer>."
)
"""In our words: what the published templates ask for. The system's turn, or for a base model what its text begins with."""

OPENINGS = ("instruct", "base", "bare")


@dataclasses.dataclass(frozen=True)
class ReSearchEnvironment(Stream):
    """A turn ends at </search> or with the text. Neither searches nor turns nor results have a limit of their own."""

    observation: Tag = "result"
    max_searches: int = TOKEN_BUDGET
    turn_tokens: int = TOKEN_BUDGET
    observation_tokens: int = TOKEN_BUDGET
    correction: str = ""
    """What neither searches nor answers ends the episode."""


@dataclasses.dataclass(frozen=True)
class ReSearch(OutcomeRecipe):
    r"""Protocol and reward of the paper: 0 in the wrong form, 0.1 where F1 is 0 but the form is right, else F1.

    The form is right where thoughts are in closed boxes, at least one of them; every turn but the last ends in one search; the
    last has the one answer, with \boxed{} in it; and the policy writes no result itself.
    """

    opening: str = "instruct"
    """The prompt: "instruct" (a system's turn), "base" (no chat template), or "bare", the question alone, for a policy too small
    to follow instructions, which is cold-started without one."""
    format_reward: float = 0.1
    """Of the right form with a wrong answer."""
    pay_malformed: bool = False
    """True is the paper's Eq. 2 as printed: F1 is paid whatever the form."""
    answer_rule: str = "rrl"
    """How the reward's F1 compares answers, a name of `rrl.text.normalize.RULES`; "hotpotqa" is what was released."""
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

    def prompt(self, question: Question) -> Prompt:
        if self.opening == "base":
            return Prompt(f"{INSTRUCTION}\n\nUser: {question.text}\nAssistant:", chat=False)
        return Prompt(question.text, system=INSTRUCTION if self.opening == "instruct" else "")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """The reward as its parts: "answer" is the F1 that is paid, "format" what the form alone earns."""
        for trajectory in trajectories:
            boxed = last_boxed(last_box(trajectory.response, self.environment.answer))
            trajectory.answer = "" if boxed is None else boxed
            formed = self.well_formed(trajectory.response)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(formed)}
            f1 = token_f1(trajectory.answer, trajectory.question.answers, RULES[self.answer_rule])
            answer = f1 if formed or self.pay_malformed else 0.0
            form = self.format_reward if formed and not answer else 0.0
            trajectory.rewards = {"answer": answer, "format": form, "total": answer + form}

    def well_formed(self, response: Sequence[str]) -> bool:
        """Whether the form is right; `response` is the policy's own text, cut where the environment spoke."""
        answer, whole = self.environment.answer, "".join(response)
        return (
            one_search_per_turn(response, self.environment)
            and count_tags(whole, "think") == (len(boxes(whole, "think")),) * 2 != (0, 0)
            and has_exactly_one_box(response, answer)
            and last_boxed(last_box(response[-1:], answer)) is not None
        )

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: think what is needed, search each hop, think what was read, answer."""
        answer = f"\\boxed{{ {item.question.answers[0]} }}"
        return think_and_search(self.environment, item, retrieve, answer)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, its braces matched, white space stripped; None without one or where it stays open."""
    _, opened, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:at].strip()
    return None
