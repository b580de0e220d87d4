"""R3-RAG (2025): reasoning and retrieval step by step, each step a fresh prompt; rewards for the answer and for each retrieval.

Numbers of sections, equations, figures and tables are the paper's. Where it is silent, the authors' released code is
followed, and called "released" here. The protocol is in `rrl.recipes.r3rag_steps`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import NOT_FINITE, POLICY, Search, Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.outcome import OutcomeRecipe, answer_metrics
from rrl.recipes.r3rag_steps import ANSWER, QUERY, R3RagEnvironment, Step, parse_step
from rrl.rewards.judge_prompts import Correctness, JudgePrompt, Relevance, ShortAnswer
from rrl.rollout.protocol import Episode
from rrl.text.chat import Prompt
from rrl.text.metrics import cover_exact_match, exact_match
from rrl.text.spans import Tag

CORRECT, INCORRECT, UNANSWERED, MALFORMED = "correct", "incorrect", "unanswered", "malformed"
"""What came of a trajectory: an answer that is right or wrong, none within the limit, or a step that breaks the format."""

LAST_STEPS = ("figure", "equation")
MATCHES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "cover": cover_exact_match,
    "exact": exact_match,
}
LAST_STEP_REWARD = 2.0
"""What the last step of a correct trajectory earns in Figure 2."""


@dataclasses.dataclass(frozen=True)
class R3Rag(OutcomeRecipe):
    """Protocol of 3.1; rewards of Eqs. 2-6. All trajectories are kept, right or wrong (appendix A), and a critic gives the
    advantages. Table 2's ablations are single fields."""

    use_process: bool = True
    """Eq. 3, the documents' relevance. False is "- Process Reward" (Table 2)."""
    use_outcome: bool = True
    """Eq. 2, the answer's correctness, and with it the factors of Eq. 6, which depend on it. False is "- Outcome Reward"; the
    paper's row of that name leaves both rewards out, which is the cold-started policy itself."""
    match: str = "cover"
    """Acc_match of Eq. 2: an answer in sentences matches where it holds a gold one ("cover"); "exact" where answers are short, so
    that naming several at once earns nothing."""
    judge_answers: bool = True
    """Eq. 2: an answer that does not match is right too where a judge says so."""
    correct_scale: float = 1.6
    """lambda of Eq. 6 where the answer is right: 1 + gamma_correct (appendix C)."""
    incorrect_scale: float = 0.8
    """Where it is wrong: 1 + gamma_incorrect."""
    unanswered_scale: float = 0.9
    """Where there is none within the limit: 1 + gamma_fail. Where a step breaks the format it is 1."""
    last_step: str = "figure"
    """The last step of a correct trajectory earns 2 ("figure": Figure 2, released), or 1 times lambda ("equation": Eq. 6)."""
    malformed_reward: float = -1.0
    """Of a step that breaks the format (Eq. 5). Released: -0.9."""
    short_answers: bool = True
    """EM and F1 are taken of the short forms that a judge extracts from the answer (4.1), where there is a judge."""
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
            "format": "format (Eq. 5)",
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

    def prompt(self, question: Question) -> str | Prompt:
        return self.environment.prompt(question, [])

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Eqs. 2-6. Components are unscaled: "answer" is Acc, "relevance" the sum of Rel over steps, "format" what broken steps
        lose; "total" is the sum of r_all over steps, each of which is paid where its step ends."""
        for trajectory in trajectories:
            trajectory.answer = _answer(trajectory)
            gold = trajectory.question.answers
            trajectory.metrics = answer_metrics(trajectory) | {
                "acc": MATCHES[self.match](trajectory.answer, gold),
                "judge_unread": 0.0,
            }
        relevance = self._judge(trajectories, scoring)
        for trajectory, found in zip(trajectories, relevance, strict=True):
            outcome = outcome_of(trajectory)
            paid = self.step_rewards(found, outcome)
            paid += [0.0] * (len(_said(trajectory)) - len(paid))  # a step that the context cut
            trajectory.turn_rewards = dict(enumerate(paid))
            trajectory.rewards = {
                "answer": trajectory.metrics["acc"],
                "relevance": sum(found),
                "format": self.malformed_reward if outcome == MALFORMED else 0.0,
                "total": sum(paid),
            }
            trajectory.metrics["relevance"] = sum(found) / max(len(found), 1)
            trajectory.metrics["steps"] = float(len(paid))
            trajectory.metrics["malformed"] = float(outcome == MALFORMED)

    def _judge(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> list[list[float]]:
        """Asks everything at once; returns Rel of each retrieval step and puts the rest into `metrics`.

        A step that found nothing new earns 0 and costs the judge nothing. What it says that cannot be read counts 0 and in
        "judge_unread"; of short forms that cannot be read the answer as it stands is scored.
        """
        relevance = [[0.0] * len(trajectory.searches) for trajectory in trajectories]
        asked: list[tuple[int, str, int, JudgePrompt]] = []
        for index, trajectory in enumerate(trajectories):
            question, answer = trajectory.question, trajectory.answer
            if self.use_process:
                found = self.environment.documents(trajectory.searches)
                asked += [
                    (index, "relevance", step, Relevance(question, passages))
                    for step, passages in enumerate(found)
                    if passages
                ]
            if self.judge_answers and answer and not trajectory.metrics["acc"]:
                asked.append((index, "acc", 0, Correctness(question, answer)))
            if self.short_answers and answer and not trajectory.metrics["em"]:
                asked += [(index, name, 0, ShortAnswer(question, answer, name)) for name in ("em", "f1")]
        if scoring.judge is None:
            return relevance
        scores = scoring.judge.grade([case for *_, case in asked])
        for (index, name, step, _), score in zip(asked, scores, strict=True):
            trajectories[index].metrics["judge_unread"] += score is None
            if score is None:
                continue
            if name == "relevance":
                relevance[index][step] = score
            else:
                trajectories[index].metrics[name] = score
        return relevance

    def step_rewards(self, relevance: Sequence[float], outcome: str) -> list[float]:
        """r_all of each step (Eqs. 5 and 6): the retrieval steps, whose documents are so relevant, and the last one, which is
        none of them but where the trajectory is "unanswered"."""
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

    def rejection_reason(self, trajectory: Trajectory) -> str:
        """Why a scored trajectory is no demonstration (3.2.1); "" where it is one."""
        outcome = outcome_of(trajectory)
        if outcome == CORRECT and any(search.failed for search in trajectory.searches):
            return "search failed"
        return "" if outcome == CORRECT else outcome

    def sft_pairs(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """Algorithm 2: what the trained policy reads before each step (the user's turn), and the step that it shall write."""
        said = [parse_step(text) for text in _said(trajectory)]
        steps = [step for step in said if step is not None]
        found = self.environment.documents(trajectory.searches)
        trained = dataclasses.replace(self.environment, opening="steps")
        return [
            (
                str(trained.prompt(trajectory.question, list(zip(steps[:at], found, strict=False)))),
                step.to_text(at + 1),
            )
            for at, step in enumerate(steps)
        ]

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: say what is needed, ask for each fact in a step of its own, state what was read, answer. It takes as
        many steps as it needs, whatever the limit."""
        plan, episode = item.plan, Episode(item.question)
        segments: DemonstrationSegments = []
        analysis = f"To find : {plan.facts}"
        for hop in plan.hops:
            episode.policy_texts.append(Step(analysis, query=hop.query).to_text(episode.turn + 1))
            passages = tuple(retrieve(hop.query))
            titles = tuple(passage.title for passage in passages)
            episode.searches.append(Search(episode.turn, hop.query, titles, passages=passages))
            segments += [episode.policy_texts[-1], self.environment.next_context(episode)]
            episode.turn += 1
            analysis = f"The {hop.query} is {hop.value}."
        if plan.conclusion:
            analysis += f" {plan.conclusion}"
        segments.append(Step(analysis, answer=item.question.answers[0]).to_text(episode.turn + 1))
        return segments


def outcome_of(trajectory: Trajectory) -> str:
    """What came of a trajectory whose "acc" is known."""
    if trajectory.ended == "answer":
        return CORRECT if trajectory.metrics["acc"] else INCORRECT
    # The context may have no room for the next step's prompt, or for all of its words, and logits may not be finite: no fault of
    # the policy's form.
    return UNANSWERED if trajectory.ended in ("turn_limit", "context_limit", NOT_FINITE) else MALFORMED


def _said(trajectory: Trajectory) -> list[str]:
    """What the policy wrote, step by step."""
    return [text for role, text in trajectory.segments if role == POLICY]


def _answer(trajectory: Trajectory) -> str:
    """The final answer; "" where none was given within the limit."""
    step = parse_step(_said(trajectory)[-1]) if trajectory.ended == "answer" else None
    return step.answer if step is not None else ""
