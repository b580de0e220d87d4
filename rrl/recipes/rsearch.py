"""R-Search (2025): reasoning and search interleaved in one context, distilled evidence, three rewards.

Sections, equations and tables are numbered as in the paper.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import Trajectory
from rrl.errors import at_least
from rrl.recipes.base import AnswerFn, Curves, Recipe, ScoringContext, register
from rrl.recipes.scoring import answer_metrics
from rrl.rollout.protocol import Stream
from rrl.text.metrics import token_f1
from rrl.text.spans import Tag, has_exactly_one, last_content

SYSTEM_TEMPLATE = (
    "You are a helpful assistant that can solve the given question step by step. For each step, start by explaining "
    "your thought process. If additional information is needed, provide a specific query enclosed in <search> and "
    "</search>. The system will return the top search results within <observation> and </observation>. You can perform "
    "multiple searches as needed. When you know the final answer, use <original_evidence> and </original_evidence> to "
    "provide all potentially relevant original information from the observations. Ensure the information is complete "
    "and preserves the original wording without modification. If no searches were conducted or observations were made, "
    "omit the evidence section. Finally, provide the final answer within <answer> and </answer> tags."
)
"""The prompt of Table 1; the question follows it."""

NO_EVIDENCE_TEMPLATE = (
    SYSTEM_TEMPLATE[: SYSTEM_TEMPLATE.index("When you know")]
    + SYSTEM_TEMPLATE[SYSTEM_TEMPLATE.index("Finally,") :]
)
"""Table 1 without its evidence section: the ablation of Table 3."""

READER_TEMPLATE = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages: {evidence}\n\nQuestion: {query}\n\nAnswer:"
)
"""Table 5: the prompt of the cross-family model."""


@register("rsearch")
@dataclasses.dataclass(frozen=True)
class RSearch(Recipe):
    """The protocol of section 3.2.1 (Table 1), the rewards of Eqs. 3-6, and group-normalised advantages by default."""

    instruction: str = SYSTEM_TEMPLATE
    """The text before the question; "" for a policy that is too small to follow instructions and was cold-started without any."""
    answer_weight: float = 0.2
    """gamma_a of the format reward (Eq. 5; section 4.3)."""
    evidence_weight: float = 0.2
    """gamma_e of the format reward (Eq. 5; section 4.3)."""
    reader_weight: float = 1.0
    """Weight of Eq. 4's reward in the sum; 1 in the paper. Use less if the reader is often wrong: its errors are noise."""
    use_evidence: bool = True
    """False: "w/o evidence" (Table 3), with no evidence in the rollout and neither of the two evidence rewards."""
    pay_evidence_without_search: bool = True
    """Applies to trajectories without a search. True: they always earn gamma_e (Eq. 5 as printed). False: they earn it only if
    they write no evidence (released code)."""
    advantage: str = "grpo"
    """How rewards become advantages if there is no critic: a name in `rrl.rl.advantages.ESTIMATORS`. "grpo" is as in the
    released code: unbiased standard deviation of the group, epsilon 1e-6."""
    environment: Stream = dataclasses.field(default_factory=Stream)
    """By default the tags are <search>, <observation> and <answer>. There are at most four turns with a search, and then one last
    turn without."""

    def __post_init__(self) -> None:
        at_least(0, self, "answer_weight", "evidence_weight", "reader_weight")
        super().__post_init__()

    curves: ClassVar[Curves] = Curves(
        {
            "answer": "answer: F1 (Eq. 3)",
            "evidence": "evidence: F1 of the reader (Eq. 4)",
            "format": "format (Eq. 5)",
        }
    )

    @property
    def tags(self) -> dict[Tag, str]:
        tags: dict[Tag, str] = {self.environment.search: "search", self.environment.answer: "answer"}
        return tags | ({"original_evidence": "evidence"} if self.use_evidence else {})

    @property
    def reward_range(self) -> tuple[float, float]:
        evidence = self.evidence_weight + self.reader_weight if self.use_evidence else 0.0
        return 0.0, 1.0 + self.answer_weight + evidence

    @property
    def needs_other_family(self) -> bool:
        """True if the reader's answers are rewarded: evidence must be readable for other models than the policy (Eq. 4)."""
        return self.use_evidence and self.reader_weight > 0

    @property
    def uninformative_spread(self) -> float:
        """The largest difference between the totals of answers with equal F1, which is due to format and evidence alone.

        It is the same without evidence, so that "w/o evidence" (Table 3) leaves out groups by the same rule.
        """
        return self.answer_weight + (self.evidence_weight + self.reader_weight)

    def prompt(self, question: Question) -> str:
        instruction = self.instruction
        if not self.use_evidence and instruction == SYSTEM_TEMPLATE:
            instruction = NO_EVIDENCE_TEMPLATE
        return f"{instruction} {question.text}" if instruction else question.text

    # -- rewards -----------------------------------------------------------------------------------------------------

    def format_reward(self, response: Sequence[str], searched: bool) -> float:
        """Return the format reward (Eq. 5).

        Args:
          response: the policy's text, one string per turn.
          searched: whether the policy made a search.
        """
        answer_ok = has_exactly_one(response, self.environment.answer)
        evidence_ok = has_exactly_one(response, "original_evidence")
        if not self.use_evidence:
            return self.answer_weight * answer_ok
        if not searched:
            written = any("<original_evidence>" in part for part in response)
            evidence_ok = self.pay_evidence_without_search or not written
        return self.evidence_weight * evidence_ok + self.answer_weight * answer_ok

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards of Eqs. 3-6: "answer" (F1), "evidence" (F1 of the reader's answer), "format" and their sum, "total"."""
        for trajectory in trajectories:
            response = trajectory.response
            trajectory.answer = last_content(response, self.environment.answer)
            trajectory.evidence = last_content(response, "original_evidence") if self.use_evidence else ""
            trajectory.metrics = answer_metrics(trajectory)
            trajectory.rewards = {
                "answer": trajectory.metrics["f1"],
                "format": self.format_reward(response, bool(trajectory.searches)),
            }
        if self.use_evidence:
            self._score_evidence(trajectories, scoring.reader)
        for trajectory in trajectories:
            trajectory.rewards["total"] = sum(trajectory.rewards.values())

    def _score_evidence(self, trajectories: Sequence[Trajectory], reader: AnswerFn | None) -> None:
        """Set Eq. 4's reward. A trajectory without evidence earns 0, and the reader is not asked."""
        with_evidence = [t for t in trajectories if t.evidence] if reader is not None else []
        prompts = [
            READER_TEMPLATE.format(evidence=t.evidence, query=with_choices(t.question)) for t in with_evidence
        ]
        for trajectory in trajectories:
            trajectory.rewards["evidence"] = trajectory.metrics["reader_f1"] = 0.0
        for trajectory, answer in zip(
            with_evidence, reader(prompts) if reader is not None and prompts else [], strict=True
        ):
            trajectory.reader_answer = answer
            trajectory.metrics["reader_f1"] = token_f1(answer, trajectory.question.answers)
            trajectory.rewards["evidence"] = self.reader_weight * trajectory.metrics["reader_f1"]
