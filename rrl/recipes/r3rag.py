"""R3-RAG (2025): reasoning and retrieval step by step, each step in a new prompt; rewards for the answer and each retrieval.

Sections, equations, figures and tables are numbered as in the paper. "Released" marks details of the authors' code that the
paper does not give. The protocol is in `rrl.recipes.r3rag_steps`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rrl.data.questions import Question, as_prompted
from rrl.data.trajectory import NOT_FINITE, POLICY, Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.r3rag_steps import ANSWER, QUERY, R3RagEnvironment, parse_step
from rrl.recipes.scoring import answer_metrics
from rrl.rewards.judge_prompts import Correctness, JudgePrompt, Relevance, ShortAnswer
from rrl.text.chat import Prompt
from rrl.text.metrics import cover_exact_match, exact_match
from rrl.text.spans import Tag

CORRECT, INCORRECT, UNANSWERED, MALFORMED = "correct", "incorrect", "unanswered", "malformed"
"""Outcomes of a trajectory: a right answer, a wrong answer, no answer within the limit, or a malformed step."""

LAST_STEPS = ("figure", "equation")
"""Values of `R3Rag.last_step`."""
MATCHES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "cover": cover_exact_match,
    "exact": exact_match,
}
"""Values of `R3Rag.match`."""
LAST_STEP_REWARD = 2.0
"""Reward of the last step of a correct trajectory in Figure 2."""


@register("r3rag")
@dataclasses.dataclass(frozen=True)
class R3Rag(Recipe):
    """The protocol of 3.1 and the rewards of Eqs. 2-6. Each ablation of Table 2 is one field.

    Training uses all trajectories, right or wrong (appendix A). A critic estimates the advantages.
    """

    use_process: bool = True
    """Whether to reward the relevance of documents (Eq. 3). False: "- Process Reward" (Table 2)."""
    use_outcome: bool = True
    """Whether to reward the correctness of the answer (Eq. 2) and to use Eq. 6's factors, which depend on it. False: "- Outcome
    Reward" (Table 2). The paper's row of that name removes the process reward too, so nothing is trained: it shows the
    cold-started policy."""
    match: str = "cover"
    """Acc_match of Eq. 2: "cover" accepts a sentence that contains a gold answer. "exact" is for short answers; it gives nothing
    for naming several answers at once."""
    judge_answers: bool = True
    """Eq. 2: whether a judge may accept an answer that does not match."""
    correct_scale: float = 1.6
    """lambda of Eq. 6 for a right answer: 1 + gamma_correct (appendix C)."""
    incorrect_scale: float = 0.8
    """lambda for a wrong answer: 1 + gamma_incorrect (appendix C)."""
    unanswered_scale: float = 0.9
    """lambda for no answer within the limit: 1 + gamma_fail (appendix C). For a malformed step lambda is 1."""
    last_step: str = "figure"
    """Reward of the last step of a correct trajectory: 2 ("figure": Figure 2, released) or 1 · lambda ("equation": Eq. 6)."""
    malformed_reward: float = -1.0
    """Reward of a malformed step (Eq. 5). Released: -0.9."""
    short_answers: bool = True
    """Whether EM and F1 use the short forms that a judge extracts from the answer (4.1). Without a judge they use the answer."""
    environment: R3RagEnvironment = dataclasses.field(default_factory=R3RagEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(MATCHES, self, "match")
        one_of(LAST_STEPS, self, "last_step")
        at_least(0, self, "correct_scale", "incorrect_scale", "unanswered_scale")
        if self.malformed_reward > 0:
            raise UserError(f"malformed_reward={self.malformed_reward} must be at most 0")

    curves: ClassVar[Curves] = Curves(
        {
            "answer": "answer right (Eq. 2)",
            "relevance": "relevance of documents (Eq. 3)",
            "format": "broken format: Val - 1 (Eqs. 4, 5)",
        },
        {
            "acc": "right answers",
            "em": "exact match",
            "relevance": "relevance of a retrieval step",
        },
    )

    @property
    def tags(self) -> dict[Tag, str]:
        return {(QUERY, ""): "search", (ANSWER, ""): "answer"}

    @property
    def needs_judge(self) -> bool:
        return self.use_process or self.judge_answers or self.short_answers

    @property
    def judges_short_forms(self) -> bool:
        return self.short_answers

    @property
    def reward_range(self) -> tuple[float, float]:
        """From a malformed first step to an upper bound: relevant documents in all `max_steps` steps, plus a right answer."""
        scale = max(1.0, self.correct_scale, self.incorrect_scale, self.unanswered_scale)
        last = max(LAST_STEP_REWARD, self.correct_scale)
        return self.malformed_reward, scale * self.environment.max_steps + last

    @property
    def collapsed_reward(self) -> float:
        """0: an episode without relevant documents and without a right answer. Only malformed steps earn less."""
        return 0.0

    def prompt(self, question: Question) -> str | Prompt:
        return self.environment.prompt(question, [])

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards of Eqs. 2-6.

        Components are unscaled: "answer" is Acc, "relevance" the sum of Rel over steps, "format" the reward of a malformed
        step. "total" is the sum of r_all over steps; `turn_rewards` pays each r_all at the end of its step.
        """
        for trajectory in trajectories:
            trajectory.answer = _final_answer(trajectory)
            gold = trajectory.question.answers
            trajectory.metrics = answer_metrics(trajectory) | {
                "acc": MATCHES[self.match](trajectory.answer, gold),
                "judge_unread": 0.0,
            }
        relevance = self._judge(trajectories, scoring)
        for trajectory, relevances in zip(trajectories, relevance, strict=True):
            outcome = outcome_of(trajectory)
            rewards = self.step_rewards(relevances, outcome)
            # A step that reached the end of the context has no reward in `step_rewards`; it earns 0.
            rewards += [0.0] * (len(_policy_texts(trajectory)) - len(rewards))
            trajectory.turn_rewards = dict(enumerate(rewards))
            trajectory.rewards = {
                "answer": trajectory.metrics["acc"],
                "relevance": sum(relevances),
                "format": self.malformed_reward if outcome == MALFORMED else 0.0,
                "total": sum(rewards),
            }
            trajectory.metrics["relevance"] = sum(relevances) / max(len(relevances), 1)
            trajectory.metrics["steps"] = float(len(rewards))
            trajectory.metrics["malformed"] = float(outcome == MALFORMED)

    def _judge(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> list[list[float]]:
        """Ask the judge everything in one call. Return Rel of each retrieval step and set the rest in `metrics`.

        A step that found no new document earns 0, and the judge is not asked. The metric "judge_unread" counts the judge's
        replies that cannot be parsed. Such a reply gives Rel or Acc 0. If it should have listed the short forms of an answer,
        "em" and "f1" keep the scores of the answer itself.
        """
        relevance = [[0.0] * len(trajectory.searches) for trajectory in trajectories]
        prompts: list[tuple[int, str, int, JudgePrompt]] = []
        for index, trajectory in enumerate(trajectories):
            question, answer = trajectory.question, trajectory.answer
            if self.use_process:
                documents = self.environment.documents(trajectory.searches)
                prompts += [
                    (index, "relevance", step, Relevance(question, passages))
                    for step, passages in enumerate(documents)
                    if passages
                ]
            if self.judge_answers and answer and not trajectory.metrics["acc"]:
                prompts.append((index, "acc", 0, Correctness(question, answer)))
            if self.short_answers and answer and not trajectory.metrics["em"]:
                prompts += [(index, name, 0, ShortAnswer(question, answer, name)) for name in ("em", "f1")]
        if scoring.judge is None:
            return relevance
        scores = scoring.judge.grade([prompt for *_, prompt in prompts])
        for (index, name, step, _), score in zip(prompts, scores, strict=True):
            trajectories[index].metrics["judge_unread"] += score is None
            if score is None:
                continue
            if name == "relevance":
                relevance[index][step] = score
            else:
                trajectories[index].metrics[name] = score
        return relevance

    def step_rewards(self, relevance: Sequence[float], outcome: str) -> list[float]:
        """Return r_all of each step (Eqs. 5 and 6).

        Args:
          relevance: Rel of each retrieval step.
          outcome: the trajectory's outcome. Unless it is "unanswered", one more step follows the retrieval steps.
        """
        scale = {
            CORRECT: self.correct_scale,
            INCORRECT: self.incorrect_scale,
            UNANSWERED: self.unanswered_scale,
            MALFORMED: 1.0,
        }[outcome]
        if not self.use_outcome:
            scale = 1.0
        steps = [scale * rel for rel in relevance]
        if outcome == CORRECT:
            right = LAST_STEP_REWARD if self.last_step == "figure" else scale
            steps.append(right if self.use_outcome else 0.0)
        elif outcome == INCORRECT:
            steps.append(0.0)
        elif outcome == MALFORMED:
            steps.append(self.malformed_reward)
        return steps

    # -- the cold start (3.2) ----------------------------------------------------------------------------------------

    makes_sft_pairs: ClassVar[bool] = True

    def rejection_reason(self, trajectory: Trajectory) -> str:
        """Return why rejection sampling (3.2.1) rejects a scored trajectory; "" if it accepts it."""
        outcome = outcome_of(trajectory)
        if outcome == CORRECT and any(search.failed for search in trajectory.searches):
            return "search failed"
        return "" if outcome == CORRECT else outcome

    def sft_pairs(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """Return one (prompt, step) pair per step of a trajectory (Algorithm 2). The prompt is the user's turn."""
        parsed = [parse_step(text) for text in _policy_texts(trajectory)]
        steps = [step for step in parsed if step is not None]
        documents = self.environment.documents(trajectory.searches)
        training_environment = dataclasses.replace(self.environment, opening="steps")
        return [
            (
                str(
                    training_environment.prompt(
                        as_prompted(trajectory.question), list(zip(steps[:at], documents, strict=False))
                    )
                ),
                step.to_text(at + 1),
            )
            for at, step in enumerate(steps)
        ]


def outcome_of(trajectory: Trajectory) -> str:
    """Return the outcome of a trajectory whose metric "acc" is set."""
    if trajectory.ended == "answer":
        return CORRECT if trajectory.metrics["acc"] else INCORRECT
    # These are no format errors: the step limit; a context without room for the next prompt or step; logits that are not finite.
    return UNANSWERED if trajectory.ended in ("turn_limit", "context_limit", NOT_FINITE) else MALFORMED


def _policy_texts(trajectory: Trajectory) -> list[str]:
    """Return the policy's text of each step."""
    return [text for role, text in trajectory.segments if role == POLICY]


def _final_answer(trajectory: Trajectory) -> str:
    """Return the final answer; "" if there was none within the limit."""
    step = parse_step(_policy_texts(trajectory)[-1]) if trajectory.ended == "answer" else None
    return step.answer if step is not None else ""
