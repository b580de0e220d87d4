"""`Recipe`: everything in which one paper differs from another. Read it first."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np
from jaxtyping import Bool, Float
from transformers import PreTrainedTokenizerBase

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, one_of
from rrl.rewards.functions import NO_FUNCTIONS, RewardFunctions
from rrl.rewards.judge import AnswerFn, Judge
from rrl.rl.advantages import ESTIMATORS
from rrl.rollout.curriculum import Curriculum, ShuffledQuestions
from rrl.rollout.protocol import Environment, Stream
from rrl.text.chat import Prompt
from rrl.text.encoding import find_special_token
from rrl.text.spans import Tag, markers


@dataclasses.dataclass(frozen=True)
class ScoringContext:
    """What scoring may use besides the trajectories: frozen models, functions of the user, and the position in the run."""

    reader: AnswerFn | None = None
    """A frozen model that answers the question: in R-Search from the policy's evidence, in R2AG from the documents found. In
    R-Search it belongs to another model family than the policy."""
    judge: Judge | None = None
    """Scores reasoning, documents and answers (TIRESRAG-R1, R3-RAG)."""
    functions: RewardFunctions = NO_FUNCTIONS
    """Reward functions of the user, added to the rewards of the recipe."""
    step: int = 0
    """Updates made before the trajectories were sampled."""
    steps: int = 0
    """Updates of the whole run; 0 outside training."""

    def at_step(self, step: int, steps: int) -> "ScoringContext":
        """Return the same models and functions at another position in the run."""
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


@dataclasses.dataclass(frozen=True)
class Recipe(abc.ABC):
    """One paper: its prompt, environment, rewards and advantages.

    A recipe must define `tags`, `prompt` and `score`. All other members are optional features. Their defaults are those of a
    paper with an outcome reward and group-normalised advantages.
    """

    environment: Environment = dataclasses.field(default_factory=Stream)
    """The protocol between policy and tools. By default (`Stream`) all turns of an episode share one context."""
    advantage: str = "grpo"
    """How rewards become advantages if there is no critic: a name in `rrl.rl.advantages.ESTIMATORS`."""

    def __post_init__(self) -> None:
        one_of(ESTIMATORS, self, "advantage")

    # -- what every recipe defines -----------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def tags(self) -> dict[Tag, str]:
        """Tag that the policy writes -> label of its content ("search", "evidence", "answer"). Used to show trajectories."""

    @abc.abstractmethod
    def prompt(self, question: Question) -> str | Prompt:
        """Return the prompt of an episode; a string is the user's turn. The text of `question` includes its choices."""

    @abc.abstractmethod
    def score(self, trajectories: Sequence[Trajectory], scoring: ScoringContext) -> None:
        """Set `rewards` (one entry per component, and "total"), `metrics`, `answer` and `evidence` of each trajectory."""

    # -- optional features: rewards ----------------------------------------------------------------------------------

    @property
    def needs_judge(self) -> bool:
        """Whether rewards or metrics need a judge. Training and cold starts are then refused without one; evaluation is not."""
        return False

    @property
    def answers_with_reader(self) -> bool:
        """Whether another model, the reader, answers from the documents found (R2AG). `rrl.eval` then accepts a reader."""
        return False

    @property
    def needs_other_family(self) -> bool:
        """Whether the reader must belong to another model family than the policy (R-Search). A run with a reader of the policy's
        family is then refused."""
        return False

    @property
    def judges_short_forms(self) -> bool:
        """Whether EM and F1 are those of the short forms that a judge extracts from a long answer (R3-RAG)."""
        return False

    @property
    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest possible `rewards["total"]`."""
        return -math.inf, math.inf

    @property
    def collapsed_reward(self) -> float:
        """Mean of `rewards["total"]` at or below which a policy counts as collapsed: what it earns if every episode fails.

        `guard.reward="auto"` is this. By default the lowest possible total, or 0 if there is none.
        """
        low, _ = self.reward_range
        return low if math.isfinite(low) else 0.0

    @property
    def uninformative_spread(self) -> float:
        """A group whose totals differ by at most this is uninformative: its answers may all be equally good.

        `objective.drop_spread="auto"` leaves such groups out of the update. 0: only groups with equal totals.
        """
        return 0.0

    # -- optional features: from rewards to updates ------------------------------------------------------------------

    def curriculum(self, questions: Sequence[Question], size: int, seed: int) -> Curriculum:
        """Return the curriculum of a run: shuffled questions, `size` per step, unless the next questions depend on earlier
        rollouts (R2AG)."""
        return ShuffledQuestions(questions, size, seed)

    def check_samples(self, samples: int) -> None:  # noqa: B027
        """Raise UserError if groups of `samples` trajectories would teach nothing. By default any number is accepted."""

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Return a mask of `trajectories`, which are whole groups, based on `rewards`.

        A group is left out of the update if the mask is True for all of its trajectories. Otherwise the mask has no effect on it.
        """
        return np.zeros(len(trajectories), bool)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """Return one advantage per trajectory, based on `rewards`: by the estimator that `advantage` names.

        `trajectories` are all trajectories of the groups that a step learns from (N >= 1).
        """
        rewards = np.array([t.rewards["total"] for t in trajectories], np.float64)
        return ESTIMATORS[self.advantage](rewards, np.array([t.group for t in trajectories]))

    # -- optional features: supervised fine-tuning on accepted trajectories, and curves --------------------------------

    makes_sft_pairs: ClassVar[bool] = False
    """Whether `rejection_reason` and `sft_pairs` are defined, so that a cold start by rejection sampling is possible (R3-RAG)."""

    def rejection_reason(self, trajectory: Trajectory) -> str:
        """Return why rejection sampling rejects a scored trajectory; "" if it accepts it."""
        raise NotImplementedError(f"{type(self).__name__} has no cold start by rejection sampling")

    def sft_pairs(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """Return (input, output) for each step of an accepted trajectory: the user's turn, and the text to learn."""
        raise NotImplementedError(f"{type(self).__name__} has no cold start by rejection sampling")

    curves: ClassVar[Curves] = Curves()
    """Labels of the reward components and metrics."""


RecipeClass = TypeVar("RecipeClass", bound=type[Recipe])
REGISTERED: dict[str, type[Recipe]] = {}
"""Name -> recipe class; filled by `register`. Read `rrl.recipes.catalogue.RECIPES` instead, which imports all recipes first."""


def register(name: str) -> Callable[[RecipeClass], RecipeClass]:
    """Give a recipe class of this package its name in configs. Use it as a decorator above `dataclass`.

    Raises ValueError if another class has the name.
    """

    def decorate(recipe: RecipeClass) -> RecipeClass:
        if REGISTERED.setdefault(name, recipe) is not recipe:
            raise ValueError(f"recipe {name!r} is registered already, by {REGISTERED[name].__module__}")
        return recipe

    return decorate


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
    tags = [*recipe.tags, *(["think"] if "<think>" in text else []), *environment.tags]
    for marker in (marker for tag in tags for marker in markers(tag)):
        if special_token := find_special_token(tokenizer, marker):
            raise UserError(
                f"the tag {marker!r} of the recipe would never be recognised: {special_token!r} is a special token of the "
                f"tokenizer {tokenizer.name_or_path!r}, and decoded text leaves special tokens out. Make it an ordinary token "
                '("special": false in tokenizer.json and tokenizer_config.json), or choose another tag'
            )
