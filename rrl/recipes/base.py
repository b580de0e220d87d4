"""What a recipe is: everything in which one paper differs from another."""

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
from rrl.text.encoding import special_name
from rrl.text.spans import Tag, markers

RetrieveFn = Callable[[str], Sequence[Passage]]
DemonstrationSegments = list[str | Append | Restart]
"""A demonstration: the expert's own words, and what the environment gives, in turn. A restart opens another context, which the
expert's next words follow."""


@dataclasses.dataclass(frozen=True)
class ScoringContext:
    """What scoring may draw on beside the trajectories: models that can be asked, and where the run stands."""

    reader: AnswerFn | None = None
    """A model of another family that answers from evidence (R-Search)."""
    judge: Judge | None = None
    """Scores reasoning, documents and answers (TIRESRAG-R1, R3-RAG)."""
    step: int = 0
    """Updates made before the trajectories were sampled."""
    steps: int = 0
    """Updates of the whole run; 0 where there is none (an agent that answers)."""

    def at_step(self, step: int, steps: int) -> "ScoringContext":
        """The same models, elsewhere in a run."""
        return dataclasses.replace(self, step=step, steps=steps)


NO_MODELS = ScoringContext()
"""Nothing to draw on."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """What the training curves of a recipe show."""

    rewards: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The components of its reward beside "total", each in words. Any other that it pays is shown by its name."""
    metrics: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"em": "exact match", "f1": "F1"})
    """The metrics of its trajectories that have a panel, each with the title of that."""


class Recipe(Protocol):
    """One paper: its prompt, its environment, its rewards, its advantages."""

    @property
    def environment(self) -> Environment:
        """The protocol between policy and tools."""

    @property
    def tags(self) -> dict[Tag, str]:
        """Tags that the policy writes, by what they hold (search, evidence, answer): for readers of trajectories."""

    @property
    def needs_judge(self) -> bool:
        """Whether its rewards ask a judge; without one a run is refused."""

    def prompt(self, question: Question) -> str | Prompt:
        """What opens an episode; a text is the user's turn."""

    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Fills `rewards` (by component, and "total"), `metrics`, `answer` and `evidence` of each trajectory."""

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Which of these, whole groups, no update shall learn from, by `rewards`."""

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """One advantage a trajectory, from `rewards`; these are all that a step learns from, at least one."""

    def demonstrate(self, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
        """The scripted expert in the built-in world: its own words, and what it is given, in turn: the environment's answers,
        or words of its own that it shall see and not learn to write."""


@runtime_checkable
class HasCurves(Protocol):
    """A recipe that declares what its curves show, where others have the default of `Curves`."""

    @property
    def curves(self) -> Curves:
        """Its reward's components and its metrics, in words."""


@runtime_checkable
class HasCurriculum(Protocol):
    """A recipe that asks what came of its earlier rollouts (R2AG), where others ask each question as it is."""

    def curriculum(self, questions: Sequence[Question], seed: int) -> Curriculum:
        """What a run over these questions asks."""


@runtime_checkable
class RequiresGroups(Protocol):
    """A recipe whose settings need groups of more than one sample, where others can do with one."""

    def check_samples(self, samples: int) -> None:
        """Raises UserError where it would learn nothing from groups of so many."""


def curriculum_of(recipe: Recipe, questions: Sequence[Question], size: int, seed: int) -> Curriculum:
    """What a run of a recipe asks, `size` questions a step: its own curriculum, or the questions in random order."""
    if isinstance(recipe, HasCurriculum):
        return recipe.curriculum(questions, seed)
    return ShuffledQuestions(questions, size, seed)


def curves_of(recipe: Recipe) -> Curves:
    """What the training curves of a recipe show."""
    return recipe.curves if isinstance(recipe, HasCurves) else Curves()


def uses_chat(recipe: Recipe) -> bool:
    """Whether its prompts need a tokenizer with a chat template."""
    opening = recipe.prompt(Question("", "", ("",)))
    return isinstance(opening, str) or opening.chat


def check_tags(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tag of the recipe or of its environment that has a special token of the tokenizer in it: no text
    shows those, so that nobody would see the tag written."""
    opening, environment = recipe.prompt(Question("", "", ("",))), recipe.environment
    text = opening if isinstance(opening, str) else f"{opening.system}{opening.user_message}{opening.prefill}"
    tags = [*recipe.tags, *(["think"] if "<think>" in text else [])]
    if isinstance(environment, Stream):
        tags += [environment.search, environment.observation, environment.answer]
    for marker in (marker for tag in tags for marker in markers(tag)):
        if hidden := special_name(tokenizer, marker):
            raise UserError(
                f"the tag {marker!r} of the recipe would never be seen: {hidden!r} is a special token of the tokenizer "
                f'{tokenizer.name_or_path!r}, which no text shows. Make it an ordinary one ("special": false in tokenizer.json '
                "and tokenizer_config.json), or choose another tag"
            )
