"""TIRESRAG-R1 (2025): think, search, answer, reflect; rewards for the answer, sufficiency, thinking and reflection.

Sections, equations, figures and tables are numbered as in the paper. "Released" marks details of the authors' code that the
paper does not give.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.scoring import answer_metrics
from rrl.recipes.tiresrag_shaping import (
    SCHEDULES,
    auxiliary_weight,
    consistency_penalty,
    difficulty_weight,
    saturated,
)
from rrl.rewards.judge_prompts import JudgePrompt, Sufficiency, Thinking
from rrl.rewards.transcript import transcript_of
from rrl.rl.advantages import ESTIMATORS, group_normalize
from rrl.rollout.protocol import Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import cover_exact_match, token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, tag_contents

_PROMPT_RULES = (
    "You must reason **clearly and completely** inside <think> and </think> before providing any final answer. Always identify "
    "and verify all key entities (e.g., person names, locations, dates, awards) mentioned in the question.",
    "If you are uncertain about an entity or fact, or if the question requires external knowledge, you may use "
    "<search>your query</search>, and the top search results will be returned between <information> and </information>. "
    "Carefully read and reflect on each newly retrieved piece of information. You can search as many times as you want.",
    "When reasoning, you must ensure your reasoning path aligns strictly with the evidence.",
    "After reasoning, before providing your final answer, rethink it to make sure the answer is exactly correct for the "
    "original question. Use the most accurate span from the evidence when possible.",
)
_REFLECTION = (
    "you have one chance to reflect on the answer. If you choose not to reflect, nothing further needs to be done. Otherwise, "
    "you can then re-examine your thinking process, the information obtained, and even search for more information to verify "
    "your previous answer or correct the previous answer. Remember, after reflection ends, you should output the answer in"
)

INSTRUCT_PROMPT = "\n\n".join(
    (
        "You are a helpful assistant. Answer the given question.",
        *_PROMPT_RULES,
        "Only after satisfying all the above, give the final answer inside <answer> and </answer>. For example, "
        "<answer>Beijing</answer>.",
        f"After outputting the final answer in <answer></answer>, {_REFLECTION} <answer></answer>.",
    )
)
"""Figure 9: the system turn (as released); the question is the user's turn."""

BASE_PROMPT = "\n\n".join(
    (
        "Answer the given question.",
        *_PROMPT_RULES,
        "Only after satisfying all the above, give the final answer inside <answer> </answer>. For example, "
        "<answer> Beijing </answer>.",
        f"After outputting the final answer in <answer> </answer>, {_REFLECTION} <answer> </answer>.",
    )
)
"""Figure 10: plain text; the question follows it (as released)."""

OPENINGS = ("instruct", "base", "bare")
"""Values of `TiresRag.opening`."""
REFLECT_TABLES = ("paper", "released")
"""Values of `TiresRag.reflect_table`."""
ANSWER_RULE = RULES["tiresrag-r1"]
"""How Eq. 1 and the released reflection table compare answers. Eq. 4 and the metrics use the default rule."""


@dataclasses.dataclass(frozen=True)
class TiresRagEnvironment(Stream):
    """The protocol of section 4.1: a turn does not end at `</answer>`, so the policy may reflect, search and answer again.

    A turn ends at `</search>`, at the end-of-sequence token, or after 512 tokens. A turn without a search ends the episode.
    """

    observation: str = "information"
    max_searches: int = 8
    turn_tokens: int = 512
    correction: str = ""
    """Empty: the paper has no message for a turn that neither searches nor answers."""


@register("tiresrag")
@dataclasses.dataclass(frozen=True)
class TiresRag(Recipe):
    """The protocol of 4.1 (Figures 9 and 10), the rewards of Eqs. 1-5 and the advantages of 4.4.

    Each ablation of Table 7 is one field.
    """

    opening: str = "instruct"
    """The prompt: "instruct" (Figure 9), "base" (Figure 10, no chat template), or "bare": the question alone, for a policy
    that is too small to follow instructions and was cold-started without any."""
    thinking_weight: float = 0.6
    """w_t of Eq. 5 (C.1). 0: "w/o Thinking" (Table 7)."""
    sufficient_weight: float = 0.3
    """w_s of Eq. 5 (C.1). 0: "w/o Sufficient" (Table 7)."""
    reflect_weight: float = 0.3
    """w_r of Eq. 5 (C.1). 0: "w/o Reflect" (Table 7)."""
    schedule: str = "paper"
    """Schedule of a_t, the common weight of these three rewards: see `tiresrag_shaping.auxiliary_weight`."""
    reflect_table: str = "paper"
    """The reflection reward: "paper" is Eq. 4; "released" gives at most 0 (see `reflect_reward`)."""
    use_filter: bool = True
    """Whether to exclude groups whose answers are all right or all wrong (4.4). False: "w/o Filter" (Table 7)."""
    filter_low: float = 0.1
    """A group counts as all wrong if its largest answer F1 is at most this value (Algorithm 1, line 14)."""
    filter_high: float = 0.9
    """A group counts as all right if its smallest answer F1 is at least this value (Algorithm 1, line 14)."""
    use_difficulty: bool = True
    """Whether to multiply advantages by the difficulty weight of Eq. 6. False: "w/o Difficulty" (Table 7)."""
    difficulty_low: float = 0.4
    """A of Eq. 6 (C.1)."""
    difficulty_high: float = 1.5
    """B of Eq. 6 (C.1)."""
    difficulty_middle: float = 0.75
    """rho_0 of Eq. 6 (C.1)."""
    difficulty_steepness: float = 10.0
    """k of Eq. 6 (C.1)."""
    penalty_weight: float = 0.1
    """lambda_p of Eq. 7 (C.1). 0: "w/o Penalty" (Table 7)."""
    advantage: str = "grpo_population"
    """The advantage estimator before shaping: a name in `rrl.rl.advantages.ESTIMATORS`. "grpo_population" divides by the
    population standard deviation of the group (Algorithm 1, line 15). "reinforce_plus_plus" is for Table 4 and appendix D."""
    shown_reflections: float = 0.3
    """Only for cold starts on the built-in data (`rrl.miniwiki`): fraction of the scripted demonstrations that show a
    reflection, among questions with more than one step."""
    environment: TiresRagEnvironment = dataclasses.field(default_factory=TiresRagEnvironment)

    def __post_init__(self) -> None:
        at_least(0, self, "thinking_weight", "sufficient_weight", "reflect_weight", "penalty_weight")
        at_least(0, self, "difficulty_low", "difficulty_high", "difficulty_steepness")
        for field in ("filter_low", "filter_high", "difficulty_middle"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(
                    f"{field}={getattr(self, field)} must lie in 0..1, the range of the reward that it is compared with"
                )
        one_of(OPENINGS, self, "opening")
        one_of(SCHEDULES, self, "schedule")
        one_of(REFLECT_TABLES, self, "reflect_table")
        super().__post_init__()
        if not 0 <= self.shown_reflections <= 1:
            raise UserError(f"shown_reflections={self.shown_reflections} must lie in 0..1, a fraction")

    curves: ClassVar[Curves] = Curves(
        {
            "answer": "answer (Eq. 1)",
            "sufficient": "sufficient documents (Eq. 2)",
            "thinking": "quality of thinking (Eq. 3)",
            "reflect": "reflection (Eq. 4)",
        }
    )

    @property
    def tags(self) -> dict[Tag, str]:
        return {self.environment.search: "search", self.environment.answer: "answer"}

    @property
    def needs_judge(self) -> bool:
        return self._uses_sufficiency or self._uses_thinking

    @property
    def reward_range(self) -> tuple[float, float]:
        """With a_t = 1, and the reflection reward in -1..1."""
        weights = self.thinking_weight + self.sufficient_weight + self.reflect_weight
        return -self.reflect_weight, 1.0 + weights

    @property
    def collapsed_reward(self) -> float:
        """0: no answers. Only reflections that make right answers wrong earn less."""
        return 0.0

    @property
    def _uses_sufficiency(self) -> bool:
        return self.sufficient_weight > 0 or self.use_difficulty or self.penalty_weight > 0

    @property
    def _uses_thinking(self) -> bool:
        return self.thinking_weight > 0 or self.penalty_weight > 0

    def prompt(self, question: Question) -> Prompt:
        """See `Recipe.prompt`; the prompt opens the thought (`<think>`) for the policy."""
        if self.opening == "base":
            text = f"{BASE_PROMPT}\n\nQuestion:{question.text}\n\n"
            return Prompt(text, prefill="<think>", chat=False)
        system = INSTRUCT_PROMPT if self.opening == "instruct" else ""
        return Prompt(question.text, system=system, prefill="<think>")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards of Eqs. 1-5. Components are unweighted; "total" is R^A + a_t·(w_t·R^T + w_s·R^S + w_r·R^R)."""
        weight = auxiliary_weight(scoring.step, scoring.steps, self.schedule)
        for trajectory in trajectories:
            answers = [
                content.strip()
                for text in trajectory.response
                for content in tag_contents(text, self.environment.answer)
            ]
            gold = trajectory.question.answers
            trajectory.answer = answers[-1] if answers else ""
            trajectory.metrics = {
                **answer_metrics(trajectory),
                "reflected": float(len(answers) > 1),
                "auxiliary_weight": weight,
            }
            trajectory.rewards = {
                "answer": answer_reward(trajectory.answer, gold),
                "sufficient": 0.0,
                "thinking": 0.0,
                "reflect": reflect_reward(answers, gold, self.reflect_table),
            }
        self._judge(trajectories, scoring)
        for trajectory in trajectories:
            rewards = trajectory.rewards
            auxiliary = (
                self.thinking_weight * rewards["thinking"]
                + self.sufficient_weight * rewards["sufficient"]
                + self.reflect_weight * rewards["reflect"]
            )
            rewards["total"] = rewards["answer"] + weight * auxiliary

    def _judge(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards of Eqs. 2 and 3. Replies that cannot be parsed give 0; the metric "judge_unread" counts them."""
        if scoring.judge is None or not self.needs_judge:
            return
        prompts: list[tuple[Trajectory, str, JudgePrompt]] = []
        for trajectory in trajectories:
            transcript = transcript_of(trajectory, self.environment.answer, "<think>")
            if self._uses_sufficiency:
                prompts.append((trajectory, "sufficient", Sufficiency(trajectory.question, transcript)))
            if self._uses_thinking:
                prompts.append((trajectory, "thinking", Thinking(trajectory.question, transcript)))
            trajectory.metrics["judge_unread"] = 0.0
        scores = scoring.judge.grade([prompt for *_, prompt in prompts])
        for (trajectory, name, _), score in zip(prompts, scores, strict=True):
            trajectory.rewards[name] = trajectory.metrics[name] = score or 0.0
            trajectory.metrics["judge_unread"] += score is None

    # -- advantages --------------------------------------------------------------------------------------------------

    def check_samples(self, samples: int) -> None:
        if samples == 1 and self.use_filter:
            raise UserError(
                "recipe.use_filter excludes groups whose answers are all right or all wrong. With train.samples=1 a group has "
                "one answer, so almost every group is excluded: raise train.samples, or set recipe.use_filter=False"
            )

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Return the trajectories of saturated groups: the group filter of 4.4."""
        if not self.use_filter or not trajectories:
            return np.zeros(len(trajectories), bool)
        answers, groups = _rewards(trajectories, "answer"), np.array([t.group for t in trajectories])
        return saturated(answers, groups, self.filter_low, self.filter_high)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """Return A' = (A - P)·W (4.4), with the penalty P of Eq. 7 and the difficulty weight W of Eq. 6."""
        _, groups = np.unique([t.group for t in trajectories], return_inverse=True)
        advantages = ESTIMATORS[self.advantage](_rewards(trajectories, "total"), groups)
        sufficient = _rewards(trajectories, "sufficient")
        if self.penalty_weight:
            normalize = functools.partial(group_normalize, groups=groups, unbiased=False)
            advantages = advantages - consistency_penalty(
                normalize(sufficient),
                normalize(_rewards(trajectories, "thinking")),
                normalize(_rewards(trajectories, "answer")),
                weight=self.penalty_weight,
            )
        if self.use_difficulty:
            mean = np.bincount(groups, sufficient) / np.bincount(groups)
            advantages = advantages * difficulty_weight(
                mean[groups],
                low=self.difficulty_low,
                high=self.difficulty_high,
                middle=self.difficulty_middle,
                steepness=self.difficulty_steepness,
            )
        return advantages.astype(np.float32)


def answer_reward(answer: str, gold: Sequence[str]) -> float:
    """Return Eq. 1: token F1. Yes and no must match as a whole, and punctuation separates words."""
    return token_f1(answer, gold, ANSWER_RULE)


def reflect_reward(answers: Sequence[str], gold: Sequence[str], table: str = "paper") -> float:
    """Return the reflection reward, which compares the first and the last answer of a trajectory.

    Args:
      answers: all answers of the trajectory, in order.
      gold: the gold answers.
      table: "paper" is Eq. 4: 1 if a wrong answer becomes right, -1 if a right answer becomes wrong, else 0, by cover exact
        match. "released": -1 if the last answer is wrong, or if the first is right and the last has a lower F1; else 0, as for
        a trajectory without an answer. For "released" an answer is right by cover exact match, or with an F1 above 0.5.
    """
    if table == "released":
        if not answers:
            return 0.0
        f1 = [answer_reward(answer, gold) for answer in (answers[0], answers[-1])]
        right = [
            score > 0.5 or cover_exact_match(answer, gold, ANSWER_RULE) > 0
            for score, answer in zip(f1, (answers[0], answers[-1]), strict=True)
        ]
        return 0.0 if right[1] and not (right[0] and f1[1] < f1[0]) else -1.0
    if len(answers) < 2:
        return 0.0
    return cover_exact_match(answers[-1], gold) - cover_exact_match(answers[0], gold)


def _rewards(trajectories: Sequence[Trajectory], name: str) -> Float[np.ndarray, "N"]:
    return np.array([t.rewards[name] for t in trajectories], np.float64)
