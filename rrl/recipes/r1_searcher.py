"""R1-Searcher (Song et al., 2025, arXiv 2503.05592): searches inside one long thought, two reward stages, REINFORCE++.

A baseline of R-Search, TIRESRAG-R1, R3-RAG and R2AG. "Released" means the authors' code.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, at_least, one_of
from rrl.recipes.base import Curves, Recipe, ScoringContext, register
from rrl.recipes.scoring import answer_metrics, one_search_per_turn
from rrl.rollout.protocol import Stream
from rrl.text.chat import Prompt
from rrl.text.metrics import token_f1
from rrl.text.normalize import RULES
from rrl.text.spans import Tag, has_exactly_one, last_content, tag_sequence

INSTRUCTION = (
    "The user asks a question and you answer it. First you think it through, between <think> and </think>; then you give the "
    "final answer between <answer> and </answer>, as short as it can be. While you think you may search for what you are not "
    "sure of: write <|begin_of_query|> keywords <|end_of_query|>, each query about one fact only. The search system then gives "
    "you what it finds between <|begin_of_documents|> and <|end_of_documents|>, and you go on thinking."
)
"""A paraphrase of the published prompts. It begins the text of a base model, and is the system turn of an instruction-tuned
model."""

OPENINGS = ("base", "instruct", "bare")
"""Values of `R1Searcher.opening`."""
_FOREIGN_TEXT = re.compile("[Aa]ssistant|[\u4e00-\u9fff]")
"""Matches signs of degenerate text of a base model: a dialogue turn ("assistant"), or Chinese characters."""


@dataclasses.dataclass(frozen=True)
class R1SearcherEnvironment(Stream):
    """The policy searches inside its thought.

    A turn ends at `<|end_of_query|>`, at the end-of-sequence token, or after 512 tokens.
    """

    search: Tag = ("<|begin_of_query|>", "<|end_of_query|>")
    observation: Tag = ("<|begin_of_documents|>", "<|end_of_documents|>")
    max_searches: int = 8
    turn_tokens: int = 512
    correction: str = ""
    """Empty: a turn that neither searches nor answers ends the episode."""


@register("r1_searcher")
@dataclasses.dataclass(frozen=True)
class R1Searcher(Recipe):
    """The protocol and the rewards of both stages. The prompt opens the thought (`<think>`) for the policy.

    - Stage 1 trains searching: 0.5 for at least one search, and 0.5 for the correct format; the answer does not count.
    - Stage 2 trains answering: F1, minus 2 if the format is wrong. It starts from the policy of stage 1.

    The format is correct if one thought is opened and closed, exactly one answer follows it and nothing else does, the
    answer is short, every turn but the last ends in one query inside the thought, and the policy writes no documents.
    """

    opening: str = "base"
    """The prompt: "base" (no chat template), "instruct" (a system turn), or "bare": the question alone, for a policy that is
    too small to follow instructions and was cold-started without any."""
    stage: int = 2
    """1 or 2: which rewards are given."""
    retrieval_reward: float = 0.5
    """Stage 1: for at least one search."""
    format_reward: float = 0.5
    """Stage 1: for the correct format."""
    malformed_penalty: float = 2.0
    """Stage 2: subtracted if the format is wrong. The published value is for base models."""
    longest_answer: int = 10
    """Maximum number of words of an answer in the correct format (released)."""
    answer_rule: str = "rrl"
    """How the reward's F1 compares answers: a name in `rrl.text.normalize.RULES`. The released code matches "tiresrag-r1"."""
    released_form: bool = False
    """True: the format check of the released code. It ignores text around the answer, and it rejects the word "assistant" and
    Chinese characters in the policy's text. (The released code also rejects them in documents; this one does not.)"""
    advantage: str = "reward"
    """REINFORCE++: the advantage is the reward. The objective subtracts the KL of each token and whitens the result over all
    tokens (`objective.kl_in`, `objective.whiten`)."""
    environment: R1SearcherEnvironment = dataclasses.field(default_factory=R1SearcherEnvironment)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(OPENINGS, self, "opening")
        if self.stage not in (1, 2):
            raise UserError(f"stage={self.stage} must be 1 (retrieval and format) or 2 (answer and format)")
        one_of(RULES, self, "answer_rule")
        at_least(0, self, "retrieval_reward", "format_reward", "malformed_penalty")
        at_least(1, self, "longest_answer")

    curves: ClassVar[Curves] = Curves(
        {"retrieval": "search made (stage 1)", "answer": "answer: F1 (stage 2)", "format": "format"}
    )

    @property
    def tags(self) -> dict[Tag, str]:
        return {self.environment.search: "search", self.environment.answer: "answer"}

    @property
    def reward_range(self) -> tuple[float, float]:
        """A policy whose episodes are all malformed earns the lower end; a base model can start close to it."""
        if self.stage == 1:
            return 0.0, self.retrieval_reward + self.format_reward
        return -self.malformed_penalty, 1.0

    def prompt(self, question: Question) -> Prompt:
        if self.opening == "base":
            text = f"{INSTRUCTION}\n\nUser: {question.text}\nAssistant: "
            return Prompt(text, prefill="<think>", chat=False)
        system = INSTRUCTION if self.opening == "instruct" else ""
        return Prompt(question.text, system=system, prefill="<think>")

    # -- rewards -----------------------------------------------------------------------------------------------------

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set the rewards: in stage 1 "retrieval" and "format", in stage 2 "answer" and "format", and their sum as "total"."""
        for trajectory in trajectories:
            trajectory.answer = last_content(trajectory.response, self.environment.answer)
            well_formed = self.well_formed(trajectory.sampled_texts)
            trajectory.metrics = {**answer_metrics(trajectory), "well_formed": float(well_formed)}
            if self.stage == 1:
                trajectory.rewards = {
                    "retrieval": self.retrieval_reward * bool(trajectory.searches),
                    "format": self.format_reward * well_formed,
                }
            else:
                f1 = token_f1(trajectory.answer, trajectory.question.answers, RULES[self.answer_rule])
                trajectory.rewards = {
                    "answer": f1,
                    "format": 0.0 if well_formed else -self.malformed_penalty,
                }
            trajectory.rewards["total"] = sum(trajectory.rewards.values())

    def well_formed(self, response: Sequence[str]) -> bool:
        """Return whether the format is correct.

        Args:
          response: `Trajectory.sampled_texts`, one string per turn. They do not contain the `<think>` of the prompt.
        """
        search, answer = self.environment.search, self.environment.answer
        if not one_search_per_turn(response, self.environment):
            return False
        turns = [f"<think>{response[0]}", *response[1:]]
        text, (_, _, after) = "".join(turns), turns[-1].partition("</think>")
        if not (has_exactly_one([text], "think") and has_exactly_one(turns, answer)):
            return False
        if len(last_content(turns, answer).split()) > self.longest_answer:
            return False
        if self.released_form:
            return not _FOREIGN_TEXT.search(text)
        return tag_sequence(after, [search, answer]) == [answer]
