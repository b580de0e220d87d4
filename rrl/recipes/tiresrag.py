"""TIRESRAG-R1 (2025): think, search, answer, reflect; rewards for sufficiency, thinking and reflection beside the answer's.

Numbers of sections, equations, figures and tables are the paper's. Where it is silent, the authors' released code is
followed, and called "released" here.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.base import Curves, DemonstrationSegments, RetrieveFn, ScoringContext
from rrl.recipes.expert import DemonstrationBuilder, thoughts
from rrl.recipes.outcome import answer_metrics
from rrl.recipes.tiresrag_shaping import (
    SCHEDULES,
    auxiliary_weight,
    consistency_penalty,
    difficulty_weight,
    saturated,
)
from rrl.rewards.judge_prompts import JudgePrompt, Sufficiency, Thinking, transcript_of
from rrl.rl.advantages import ESTIMATORS, group_normalize
from rrl.rollout.protocol import Append, Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import cover_exact_match, token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, boxed, boxes

_RULES = (
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
        *_RULES,
        "Only after satisfying all the above, give the final answer inside <answer> and </answer>. For example, "
        "<answer>Beijing</answer>.",
        f"After outputting the final answer in <answer></answer>, {_REFLECTION} <answer></answer>.",
    )
)
"""Figure 9: the system's turn (as released), the question being the user's."""

BASE_PROMPT = "\n\n".join(
    (
        "Answer the given question.",
        *_RULES,
        "Only after satisfying all the above, give the final answer inside <answer> </answer>. For example, "
        "<answer> Beijing </answer>.",
        f"After outputting the final answer in <answer> </answer>, {_REFLECTION} <answer> </answer>.",
    )
)
"""Figure 10: plain text, which the question follows (as released)."""

PROMPTS = ("instruct", "base", "bare")
REFLECTIONS = ("paper", "released")
ANSWER_RULE = RULES["tiresrag-r1"]
"""How the answer's reward (Eq. 1) and the released table of reflections compare answers; Eq. 4 and metrics compare as
everywhere."""


@dataclasses.dataclass(frozen=True)
class TiresRagEnvironment(Stream):
    """Section 4.1: what follows an answer belongs to the same turn, so that the policy may think and search again.

    A turn ends at </search>, at the end of the text, or after 512 tokens; one that does none of these ends the episode.
    """

    observation: str = "information"
    max_searches: int = 8
    turn_tokens: int = 512
    correction: str = ""
    """The paper tells of no message to a turn that neither searches nor answers."""


@dataclasses.dataclass(frozen=True)
class TiresRag:
    """Protocol of 4.1 (Figures 9 and 10); rewards of Eqs. 1-5; advantages of 4.4. Table 7's ablations are single fields."""

    opening: str = "instruct"
    """The prompt: "instruct" (Figure 9), "base" (Figure 10, without a chat template), or "bare", the question alone, for a
    policy too small to follow instructions, which is cold-started without one."""
    thinking_weight: float = 0.6
    """w_t (C.1). 0 is "w/o Thinking" (Table 7)."""
    sufficient_weight: float = 0.3
    """w_s (C.1). 0 is "w/o Sufficient"."""
    reflect_weight: float = 0.3
    """w_r (C.1). 0 is "w/o Reflect"."""
    schedule: str = "paper"
    """Of a_t, the weight of the three together: see `rrl.rl.shaping.auxiliary_weight`."""
    reflect_table: str = "paper"
    """"paper" is Eq. 4; "released" never gives more than 0 (see `reflect_reward`)."""
    use_filter: bool = True
    """Groups whose answers are all right or all wrong are not learned from (4.4). False is "w/o Filter"."""
    filter_low: float = 0.1
    filter_high: float = 0.9
    """Algorithm 1, line 14: a group stays iff its largest answer F1 is above the one and its smallest below the other."""
    use_difficulty: bool = True
    """Eq. 6. False is "w/o Difficulty"."""
    difficulty_low: float = 0.4
    """A of Eq. 6 (C.1)."""
    difficulty_high: float = 1.5
    """B."""
    difficulty_middle: float = 0.75
    """rho_0."""
    difficulty_steepness: float = 10.0
    """k."""
    penalty_weight: float = 0.1
    """lambda_p of Eq. 7 (C.1). 0 is "w/o Penalty"."""
    advantage: str = "grpo_population"
    """What totals become before they are shaped: one of `rrl.rl.advantages.ESTIMATORS`. Algorithm 1's line 15 has the deviation
    of all samples; "reinforce_plus_plus" is Table 4's and appendix D's."""
    shown_reflections: float = 0.3
    """Share of the scripted expert's demonstrations, of questions with more than one step, that show a reflection."""
    environment: TiresRagEnvironment = dataclasses.field(default_factory=TiresRagEnvironment)

    def __post_init__(self) -> None:
        at_least(0, self, "thinking_weight", "sufficient_weight", "reflect_weight", "penalty_weight")
        at_least(0, self, "difficulty_low", "difficulty_high", "difficulty_steepness")
        for field in ("filter_low", "filter_high", "difficulty_middle"):
            if not 0 <= getattr(self, field) <= 1:
                raise UserError(
                    f"{field}={getattr(self, field)} must lie in 0..1, as what it is held against does"
                )
        one_of(PROMPTS, self, "opening")
        one_of(SCHEDULES, self, "schedule")
        one_of(REFLECTIONS, self, "reflect_table")
        one_of(ESTIMATORS, self, "advantage")
        if not 0 <= self.shown_reflections <= 1:
            raise UserError(f"shown_reflections={self.shown_reflections} must lie in 0..1, a share")

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
    def _uses_sufficiency(self) -> bool:
        return self.sufficient_weight > 0 or self.use_difficulty or self.penalty_weight > 0

    @property
    def _uses_thinking(self) -> bool:
        return self.thinking_weight > 0 or self.penalty_weight > 0

    def prompt(self, question: Question) -> Prompt:
        """The thought is opened for the policy."""
        if self.opening == "base":
            text = f"{BASE_PROMPT}\n\nQuestion:{question.text}\n\n"
            return Prompt(text, prefill="<think>", chat=False)
        system = INSTRUCT_PROMPT if self.opening == "instruct" else ""
        return Prompt(question.text, system=system, prefill="<think>")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Eqs. 1-5. Components are unweighted; "total" is R^A + a_t·(w_t·R^T + w_s·R^S + w_r·R^R)."""
        weight = auxiliary_weight(scoring.step, scoring.steps, self.schedule)
        for trajectory in trajectories:
            answers = [
                content.strip()
                for text in trajectory.response
                for content in boxes(text, self.environment.answer)
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
            found = trajectory.rewards
            auxiliary = (
                self.thinking_weight * found["thinking"]
                + self.sufficient_weight * found["sufficient"]
                + self.reflect_weight * found["reflect"]
            )
            found["total"] = found["answer"] + weight * auxiliary

    def _judge(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Eqs. 2 and 3; answers of the judge that say nothing count 0, and in the metric "judge_unread"."""
        if scoring.judge is None or not self.needs_judge:
            return
        asked: list[tuple[Trajectory, str, JudgePrompt]] = []
        for trajectory in trajectories:
            told = transcript_of(trajectory, self.environment.answer, "<think>")
            if self._uses_sufficiency:
                asked.append((trajectory, "sufficient", Sufficiency(trajectory.question, told)))
            if self._uses_thinking:
                asked.append((trajectory, "thinking", Thinking(trajectory.question, told)))
            trajectory.metrics["judge_unread"] = 0.0
        scores = scoring.judge.grade([case for *_, case in asked])
        for (trajectory, name, _), score in zip(asked, scores, strict=True):
            trajectory.rewards[name] = trajectory.metrics[name] = score or 0.0
            trajectory.metrics["judge_unread"] += score is None

    # -- advantages --------------------------------------------------------------------------------------------------

    def check_samples(self, samples: int) -> None:
        """See `rrl.recipes.base.RequiresGroups`."""
        if samples == 1 and self.use_filter:
            raise UserError(
                "recipe.use_filter leaves out groups whose answers are all right or all wrong, as the one answer of a group of "
                "train.samples=1 mostly is: raise it, or take recipe.use_filter=False"
            )

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Group filtering (4.4)."""
        if not self.use_filter or not trajectories:
            return np.zeros(len(trajectories), bool)
        answers, groups = _rewards(trajectories, "answer"), np.array([t.group for t in trajectories])
        return saturated(answers, groups, self.filter_low, self.filter_high)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """A' = (A - A^P)·W (4.4)."""
        _, groups = np.unique([t.group for t in trajectories], return_inverse=True)
        advantages = ESTIMATORS[self.advantage](_rewards(trajectories, "total"), groups)
        sufficient = _rewards(trajectories, "sufficient")
        if self.penalty_weight:
            normal = functools.partial(group_normalize, groups=groups, unbiased=False)
            advantages = advantages - consistency_penalty(
                normal(sufficient),
                normal(_rewards(trajectories, "thinking")),
                normal(_rewards(trajectories, "answer")),
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

    # -- the cold start in the built-in world ------------------------------------------------------------------------

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """A scripted expert: think what is needed, search each hop, think what was read, answer.

        In some demonstrations an answer stands too early, wrong or "unknown": words that it shall see and not learn to
        write. It then says what is still to be found, goes on, and answers again.
        """
        told = DemonstrationBuilder(self.environment, item, retrieve)
        early, mistake = self._mistake(item)
        said = [boxed("think", thought) for thought in thoughts(item.plan)]
        said[0] = said[0].removeprefix("<think>")  # the prompt has opened it
        for place, hop in enumerate(item.plan.hops):
            if place == early:
                told.segments += [said[place], Append(f"\n{boxed(self.environment.answer, mistake)}\n")]
                said[place] = boxed("think", f"Not yet. To find : {hop.query}")
            told.search(f"{said[place]}\n", hop)
        told.segments.append(f"{said[-1]}\n{boxed(self.environment.answer, item.question.answers[0])}")
        return told.segments

    def _mistake(self, item: MiniQuestion) -> tuple[int, str]:
        """Before which hop an answer stands too early, and that answer; a pure function of the question. Else -1.

        Wrong is what the last fact read says (Table 2: the chain ends too soon), or the opposite of yes and no.
        """
        draw = zlib.crc32(item.question.id.encode())
        hops = item.plan.hops
        if len(hops) < 2 or draw % 1000 >= 1000 * self.shown_reflections:
            return -1, ""
        draw //= 1000
        early = 1 + draw % (len(hops) - 1)
        if draw // len(hops) % 2:
            return early, "unknown"
        answer = item.question.answers[0]
        wrong = {"yes": "no", "no": "yes"}.get(answer) or hops[early - 1].value
        return early, wrong if wrong != answer else "unknown"


def answer_reward(answer: str, gold: Sequence[str]) -> float:
    """Eq. 1: token F1, where yes and no count as a whole and punctuation parts words."""
    return token_f1(answer, gold, ANSWER_RULE)


def reflect_reward(answers: Sequence[str], gold: Sequence[str], table: str = "paper") -> float:
    """What a second thought earned, from all answers of a trajectory in their order; the first and the last count.

    "paper" (Eq. 4): 1 for a wrong answer made right, -1 for a right one made wrong, else 0, by cover exact match.
    "released": an answer is right with an F1 above 0.5 too. -1 where the last is wrong, or has a lower F1 than a right
    first one; 0 for everything else, no answer among it.
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
