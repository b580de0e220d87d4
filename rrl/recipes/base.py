"""The `Recipe` protocol: everything in which one paper differs from another.

Read `Recipe` first. Its optional features are the protocols `HasCurves`, `HasCurriculum` and `RequiresGroups`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from transformers import PreTrainedTokenizerBase

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.miniwiki.questions import MiniQuestion
from rrl.rewards.judge import AnswerFn, Judge
from rrl.rollout.curriculum import Curriculum, ShuffledQuestions
from rrl.rollout.protocol import Append, Environment, Restart, Stream
from rrl.text.chat import Prompt
from rrl.text.encoding import find_special_token
from rrl.text.spans import Tag, markers

RetrieveFn = Callable[[str], Sequence[Passage]]
"""Returns the passages of a query."""
DemonstrationSegments = list[str | Append | Restart]
"""A demonstration as a list of segments. A string is text of the expert, and an imitation target. An `Append` is text that the
environment adds to the context. A `Restart` replaces the context by a new prompt."""


@dataclasses.dataclass(frozen=True)
class ScoringContext:
    """What scoring may use besides the trajectories: frozen models, and the position in the run."""

    reader: AnswerFn | None = None
    """A frozen model that answers from evidence (R-Search: of another family than the policy) or from documents (R2AG)."""
    judge: Judge | None = None
    """Scores reasoning, documents and answers (TIRESRAG-R1, R3-RAG)."""
    step: int = 0
    """Updates made before the trajectories were sampled."""
    steps: int = 0
    """Updates of the whole run; 0 outside training."""

    def at_step(self, step: int, steps: int) -> "ScoringContext":
        """Return the same models at another position in the run."""
        return dataclasses.replace(self, step=step, steps=steps)


NO_MODELS = ScoringContext()
"""A scoring context without a reader and a judge, outside training."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """What the training curves of a recipe show."""

    rewards: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Reward component -> label; "total" needs none. A component without a label is shown under its name."""
    metrics: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"em": "exact match", "f1": "F1"})
    """Trajectory metric -> title of its panel. Other metrics have no panel."""


class Recipe(Protocol):
    """One paper: its prompt, environment, rewards and advantages."""

    @property
    def environment(self) -> Environment:
        """The protocol between policy and tools."""

    @property
    def tags(self) -> dict[Tag, str]:
        """Tag that the policy writes -> label of its content ("search", "evidence", "answer"). Used to show trajectories."""

    @property
    def needs_judge(self) -> bool:
        """Whether its rewards need a judge. A run without one is then refused."""

    def prompt(self, question: Question) -> str | Prompt:
        """Return the prompt of an episode; a string is the user's turn."""

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set `rewards` (one entry per component, and "total"), `metrics`, `answer` and `evidence` of each trajectory."""

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Return the mask of trajectories to leave out of the update, based on `rewards`. `trajectories` are whole groups."""

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """Return one advantage per trajectory, based on `rewards`. `trajectories` are all that a step learns from (N >= 1)."""

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """Return a demonstration by the scripted expert of the built-in world (`rrl.miniwiki`).

        The cold start (supervised fine-tuning before RL) has a loss on the strings only. An `Append` may therefore also hold
        text of the policy that must not be imitated, such as an early wrong answer.
        """


@runtime_checkable
class HasCurves(Protocol):
    """A recipe that declares its training curves; other recipes have the default of `Curves`."""

    @property
    def curves(self) -> Curves:
        """Labels of its reward components and metrics."""


@runtime_checkable
class HasCurriculum(Protocol):
    """A recipe whose next questions depend on its earlier rollouts (R2AG); other recipes ask shuffled questions."""

    def curriculum(self, questions: Sequence[Question], seed: int) -> Curriculum:
        """Return the curriculum of a run over these questions."""


@runtime_checkable
class RequiresGroups(Protocol):
    """A recipe that checks the group size, because some of its settings need more than one sample per question."""

    def check_samples(self, samples: int) -> None:
        """Raise UserError if groups of `samples` trajectories would teach nothing."""


def curriculum_of(recipe: Recipe, questions: Sequence[Question], size: int, seed: int) -> Curriculum:
    """Return the curriculum of a run: the recipe's own, or shuffled questions, `size` per step."""
    if isinstance(recipe, HasCurriculum):
        return recipe.curriculum(questions, seed)
    return ShuffledQuestions(questions, size, seed)


def curves_of(recipe: Recipe) -> Curves:
    """Return what the training curves of a recipe show."""
    return recipe.curves if isinstance(recipe, HasCurves) else Curves()


def uses_chat(recipe: Recipe) -> bool:
    """Return whether its prompts need a tokenizer with a chat template."""
    prompt = recipe.prompt(Question("", "", ("",)))
    return isinstance(prompt, str) or prompt.chat


def check_tags(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if a tag of the recipe or its environment contains a special token of the tokenizer.

    Decoded text leaves special tokens out, so such a tag would never be recognised.
    """
    prompt, environment = recipe.prompt(Question("", "", ("",))), recipe.environment
    text = prompt if isinstance(prompt, str) else f"{prompt.system}{prompt.user_message}{prompt.prefill}"
    tags = [*recipe.tags, *(["think"] if "<think>" in text else [])]
    if isinstance(environment, Stream):
        tags += [environment.search, environment.observation, environment.answer]
    for marker in (marker for tag in tags for marker in markers(tag)):
        if special_token := find_special_token(tokenizer, marker):
            raise UserError(
                f"the tag {marker!r} of the recipe would never be recognised: {special_token!r} is a special token of the "
                f"tokenizer {tokenizer.name_or_path!r}, and decoded text leaves special tokens out. Make it an ordinary token "
                '("special": false in tokenizer.json and tokenizer_config.json), or choose another tag'
            )
