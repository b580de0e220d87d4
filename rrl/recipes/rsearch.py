"""R-Search (2025): reasoning and search interleaved in one stream, distilled evidence, three rewards.

Numbers of sections, equations and tables are the paper's.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import at_least
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import AnswerFn, Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.expert import DemonstrationBuilder, thoughts
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics
from rrl.rollout.protocol import Stream
from rrl.text.metrics import token_f1
from rrl.text.spans import Tag, boxed, has_exactly_one_box, last_box

SYSTEM_TEMPLATE = (
    "You are a helpful assistant that can solve the given question step by step. For each step, start by explaining "
    "your thought process. If additional information is needed, provide a specific query enclosed in <search> and "
    "</search>. The system will return the top search results within <observation> and </observation>. You can perform "
    "multiple searches as needed. When you know the final answer, use <original_evidence> and </original_evidence> to "
    "provide all potentially relevant original information from the observations. Ensure the information is complete "
    "and preserves the original wording without modification. If no searches were conducted or observations were made, "
    "omit the evidence section. Finally, provide the final answer within <answer> and </answer> tags."
)
"""Table 1; the question is appended at its end."""

NO_EVIDENCE_TEMPLATE = (
    SYSTEM_TEMPLATE[: SYSTEM_TEMPLATE.index("When you know")]
    + SYSTEM_TEMPLATE[SYSTEM_TEMPLATE.index("Finally,") :]
)
"""Table 1 without its evidence section: the ablation of Table 3."""

READER_TEMPLATE = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages: {evidence}\n\nQuestion: {query}\n\nAnswer:"
)
"""Table 5: what the cross-family model reads."""


@dataclasses.dataclass(frozen=True)
class RSearch(OutcomeRecipe):
    """Protocol of section 3.2.1 (Table 1); rewards of Eqs. 3-6; group-normalised advantages by default."""

    instruction: str = SYSTEM_TEMPLATE
    """What stands before the question. A model too small to follow instructions is cold-started without one."""
    answer_weight: float = 0.2
    """gamma_a, section 4.3."""
    evidence_weight: float = 0.2
    """gamma_e, section 4.3."""
    reader_weight: float = 1.0
    """Weight of Eq. 4's reward in the sum; the paper's is 1. Less where the reader is often wrong: its errors are noise."""
    use_evidence: bool = True
    """False is "w/o evidence" (Table 3): no evidence in the rollout, and neither reward that concerns it."""
    pay_evidence_without_search: bool = True
    """Evidence written although nothing was searched: Eq. 5 as printed pays gamma_e; the released code does not."""
    advantage: str = "grpo"
    """How rewards become advantages, where no critic gives them: see `rrl.rl.advantages.ESTIMATORS`. "grpo" is the released
    code's: unbiased standard deviation of the group, epsilon 1e-6."""
    environment: Stream = dataclasses.field(default_factory=Stream)

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
        found: dict[Tag, str] = {self.environment.search: "search", self.environment.answer: "answer"}
        return found | ({"original_evidence": "evidence"} if self.use_evidence else {})

    def prompt(self, question: Question) -> str:
        instruction = self.instruction
        if not self.use_evidence and instruction == SYSTEM_TEMPLATE:
            instruction = NO_EVIDENCE_TEMPLATE
        return f"{instruction} {question.text}" if instruction else question.text

    # -- rewards -----------------------------------------------------------------------------------------------------

    def format_reward(self, response: Sequence[str], searched: bool) -> float:
        """Eq. 5. `response` is the policy's own text, cut where the environment spoke."""
        answer_ok = has_exactly_one_box(response, self.environment.answer)
        evidence_ok = has_exactly_one_box(response, "original_evidence")
        if not self.use_evidence:
            return self.answer_weight * answer_ok
        if not searched:
            written = any("<original_evidence>" in part for part in response)
            evidence_ok = self.pay_evidence_without_search or not written
        return self.evidence_weight * evidence_ok + self.answer_weight * answer_ok

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Eqs. 3-6: answer F1, F1 of the cross-family reader's answer from the evidence, format; summed."""
        for trajectory in trajectories:
            response = trajectory.response
            trajectory.answer = last_box(response, self.environment.answer)
            trajectory.evidence = last_box(response, "original_evidence") if self.use_evidence else ""
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
        """Eq. 4; trajectories without evidence earn 0 and cost the reader nothing."""
        shown = [t for t in trajectories if t.evidence] if reader is not None else []
        prompts = [READER_TEMPLATE.format(evidence=t.evidence, query=t.question.text) for t in shown]
        for trajectory in trajectories:
            trajectory.rewards["evidence"] = trajectory.metrics["reader_f1"] = 0.0
        for trajectory, answer in zip(
            shown, reader(prompts) if reader is not None and prompts else [], strict=True
        ):
            trajectory.reader_answer = answer
            trajectory.metrics["reader_f1"] = token_f1(answer, trajectory.question.answers)
            trajectory.rewards["evidence"] = self.reader_weight * trajectory.metrics["reader_f1"]

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: say what is needed, search each hop, state what was read, quote the sentences, answer."""
        told = DemonstrationBuilder(self.environment, item, retrieve)
        needed, *read = thoughts(item.plan)
        for words, hop in zip([f"{needed}\n", *(f"{thought} " for thought in read)], item.plan.hops):
            told.search(words, hop)
        closing = [read[-1]]
        if self.use_evidence:
            evidence = " ".join(dict.fromkeys(hop.sentence for hop in item.plan.hops))
            closing.append(boxed("original_evidence", evidence))
        closing.append(boxed(self.environment.answer, item.question.answers[0]))
        told.segments.append("\n".join(closing))
        return told.segments
