"""R-Search (2025): reasoning and search interleaved in one stream, distilled evidence, three rewards.

Numbers of sections, equations and tables are the paper's.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from rrl.data.miniwiki.questions import MiniQuestion
from rrl.data.questions import Question
from rrl.errors import at_least, one_of
from rrl.recipes.base import Answers, Retrieve, Scoring
from rrl.rl.advantages import ESTIMATORS
from rrl.rollout.protocol import Append, Episode, Stream
from rrl.rollout.trajectory import POLICY, Search, Trajectory
from rrl.text.metrics import cover_exact_match, exact_match, token_f1
from rrl.text.spans import boxes, count_tags

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
class RSearch:
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
        one_of(ESTIMATORS, self, "advantage")

    @property
    def tags(self) -> dict[str, str]:
        found = {self.environment.search: "search", self.environment.answer: "answer"}
        return found | ({"original_evidence": "evidence"} if self.use_evidence else {})

    @property
    def judged(self) -> bool:
        return False

    def prompt(self, question: Question) -> str:
        instruction = self.instruction
        if not self.use_evidence and instruction == SYSTEM_TEMPLATE:
            instruction = NO_EVIDENCE_TEMPLATE
        return f"{instruction} {question.text}" if instruction else question.text

    # -- rewards -----------------------------------------------------------------------------------------------------

    def format_reward(self, response: Sequence[str], searched: bool) -> float:
        """Eq. 5. `response` is the policy's own text, cut where the environment spoke."""
        answer_ok = _exactly_one(response, self.environment.answer)
        evidence_ok = _exactly_one(response, "original_evidence")
        if not self.use_evidence:
            return self.answer_weight * answer_ok
        if not searched:
            written = any("<original_evidence>" in part for part in response)
            evidence_ok = self.pay_evidence_without_search or not written
        return self.evidence_weight * evidence_ok + self.answer_weight * answer_ok

    def score(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> None:
        """Eqs. 3-6: answer F1, F1 of the cross-family reader's answer from the evidence, format; summed."""
        for trajectory in trajectories:
            response = [text for role, text in trajectory.segments if role == POLICY]
            trajectory.answer = _last_box(response, self.environment.answer)
            trajectory.evidence = _last_box(response, "original_evidence") if self.use_evidence else ""
            gold = trajectory.question.answers
            trajectory.metrics = {
                "em": exact_match(trajectory.answer, gold),
                "f1": token_f1(trajectory.answer, gold),
                "cem": cover_exact_match(trajectory.answer, gold),
                "searches": float(sum(not search.failed for search in trajectory.searches)),
            }
            trajectory.rewards = {
                "answer": trajectory.metrics["f1"],
                "format": self.format_reward(response, bool(trajectory.searches)),
            }
        if self.use_evidence:
            self._score_evidence(trajectories, scoring.reader)
        for trajectory in trajectories:
            trajectory.rewards["total"] = sum(trajectory.rewards.values())

    def _score_evidence(self, trajectories: Sequence[Trajectory], reader: Answers | None) -> None:
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

    def left_out(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """None of them."""
        return np.zeros(len(trajectories), bool)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """GRPO's, unless `advantage` says otherwise."""
        rewards = np.array([t.rewards["total"] for t in trajectories], np.float64)
        return ESTIMATORS[self.advantage](rewards, np.array([t.group for t in trajectories]))

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: Retrieve) -> list[str | Append]:
        """A scripted expert: say what is needed, search each hop, state what was read, quote the sentences, answer."""
        environment, thought = self.environment, f"To find : {item.plan.facts}\n"
        segments: list[str | Append] = []
        episode = Episode(item.question)
        for hop in item.plan.hops:
            segments.append(f"{thought}<{environment.search}> {hop.query} </{environment.search}>")
            passages = list(retrieve(hop.query))
            episode.searches.append(Search(episode.turn, hop.query, tuple(p.title for p in passages)))
            segments.append(environment.observe(episode, passages))
            episode.turn += 1
            thought = f"The {hop.query} is {hop.value}. "
        evidence = " ".join(dict.fromkeys(hop.sentence for hop in item.plan.hops))
        closing = [thought + item.plan.conclusion] if item.plan.conclusion else [thought.rstrip()]
        if self.use_evidence:
            closing.append(f"<original_evidence> {evidence} </original_evidence>")
        closing.append(f"<{environment.answer}> {item.question.answers[0]} </{environment.answer}>")
        segments.append("\n".join(closing))
        return segments


def _exactly_one(response: Sequence[str], tag: str) -> bool:
    """True when the tag makes exactly one box and stands nowhere else."""
    counts = [count_tags(part, tag) for part in response]
    opened, closed = sum(c[0] for c in counts), sum(c[1] for c in counts)
    return opened == closed == 1 and sum(len(boxes(part, tag)) for part in response) == 1


def _last_box(response: Sequence[str], tag: str) -> str:
    found = [content for part in response for content in boxes(part, tag)]
    return found[-1].strip() if found else ""
