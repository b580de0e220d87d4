"""Settings of a whole RL run: the sections of its config, checked and typed. Read `TrainSettings` first."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_sections, refuse_unknown_fields
from rrl.errors import UserError
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.lora import LoraConfig
from rrl.models.weights import require_folder
from rrl.recipes.base import Recipe
from rrl.recipes.card import require_policy
from rrl.recipes.catalogue import fill_recipe_defaults, make_recipe
from rrl.rewards.functions import RewardConfig
from rrl.rewards.judge_settings import SECTIONS as JUDGE_SECTIONS
from rrl.rewards.judge_settings import JudgeSettings, fill_judge_defaults
from rrl.rl.advantages import GROUP_RELATIVE
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.rollout.config import EngineConfig
from rrl.runs.datasets import DataConfig
from rrl.runs.retriever import RetrieverConfig, encoder_folder
from rrl.setup.automatic import add_automatic_defaults, resolve_automatic
from rrl.setup.rl_config import GuardConfig, RLConfig

SECTIONS = {
    "train": RLConfig,
    "optim": OptimConfig,
    "objective": ObjectiveConfig,
    "rollout": EngineConfig,
    "reader_rollout": EngineConfig,
    "data": DataConfig,
    "retriever": RetrieverConfig,
    "rewards": RewardConfig,
    "lora": LoraConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
    "guard": GuardConfig,
}
"""The dataclass of each config section, except `recipe` and optional sections."""
CRITIC_SECTIONS = {"critic": CriticConfig, "critic_optim": OptimConfig}
"""The dataclasses of the optional sections for PPO."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """Add every missing field with its default to a config (see configs/rsearch_grpo.py), so that each can be overridden."""
    rename_config(config)
    has_critic = any(name in config for name in CRITIC_SECTIONS)
    sections = {**SECTIONS, **(CRITIC_SECTIONS if has_critic else {})}
    for name in sections:
        if name not in config:
            config[name] = ConfigDict()
    add_automatic_defaults(config)
    fill_sections(config, sections)
    fill_judge_defaults(config)
    fill_recipe_defaults(config.recipe.name, config.recipe, config.recipe.environment)
    return config


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """The checked and typed settings of a whole RL run."""

    name: str
    """Name of the run, for its workdir and its report."""
    policy: str
    """Folder of the initial policy."""
    reader: str
    """Folder of the reader, which answers from evidence (R-Search); "" without one."""
    train: RLConfig
    rollout: EngineConfig
    data: DataConfig
    retriever: RetrieverConfig
    recipe: Recipe
    rewards: RewardConfig
    """Reward functions of the user, beside the recipe's rewards."""
    reader_rollout: EngineConfig
    lora: LoraConfig
    mesh: MeshConfig
    compute: ComputeConfig
    judge: JudgeSettings | None = None
    """Judge for the recipe's rewards; None if the config has no judge."""
    reference: tuple[str, float] | None = None
    """An earlier result to print next to this run's, such as that of SFT: its name and its exact match (0..1). Not the reference
    policy of the KL penalty."""
    note: str = ""
    """A remark about the result, printed in the log and below the table."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TrainSettings":
        """Check a config (see configs/rsearch_grpo.py) and that its folders exist; return it with this platform's dtypes.

        Imports the user's reward functions, but loads no model.

        Raises:
            UserError: a field is wrong or a folder is missing.
        """
        settings = cls.parse(config)
        if not settings.name:
            raise UserError("name='' is empty; give the run a name, which also names its folder")
        require_policy(settings.policy)
        if settings.reader:
            require_folder("reader", settings.reader)
        if settings.judge is not None:
            settings.judge.check()
        # Each of these calls raises UserError if what it reads is wrong. The results are not needed yet.
        settings.rewards.load()
        encoder_folder(settings.retriever)
        settings.retriever.identity()
        path = settings.data.path
        if path != "miniwiki" and not (path and pathlib.Path(path).is_dir()):
            raise UserError(f"data={path!r} is not a folder; give one, or miniwiki for the built-in world")
        return dataclasses.replace(settings, compute=settings.compute.for_platform(jax.default_backend()))

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "TrainSettings":
        """Check the fields of a config, but not its folders. Raises UserError for a wrong field."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        sections = [*SECTIONS, *CRITIC_SECTIONS, *JUDGE_SECTIONS]
        refuse_unknown_fields(
            [*sections, "recipe", "name", "policy", "reader", "reference", "note"], values, "config"
        )
        recipe_values = dict(values["recipe"])
        name, environment = recipe_values.pop("name"), recipe_values.pop("environment", {})
        recipe = make_recipe(name, recipe_values, environment)
        judge = JudgeSettings.parse(values) if any(section in values for section in JUDGE_SECTIONS) else None
        if recipe.needs_judge and judge is None:
            raise UserError(
                f"recipe.name={name!r} needs a judge for its rewards; give the section judge, with kind oracle, model "
                "or endpoint"
            )
        train = _train_config(resolve_automatic(values, recipe))
        _check_advantage(recipe, make_recipe(name).advantage, train)
        if train.steps:
            recipe.check_samples(train.samples)
        parts_of_train = ("train", "optim", "objective", "guard")  # `_train_config` builds these
        built: dict[str, Any] = {
            section: build(kind, values.get(section, {}), section)
            for section, kind in SECTIONS.items()
            if section not in parts_of_train
        }
        lengths = train.objective.row_lengths
        if lengths[-1] < built["rollout"].context:
            raise UserError(
                f"objective.row_lengths={lengths} is too short for rollout.context={built['rollout'].context}: the last "
                "length must be at least the context"
            )
        return cls(
            name=values["name"],
            policy=values["policy"],
            reader=values["reader"],
            train=train,
            recipe=recipe,
            judge=judge,
            reference=values.get("reference"),
            note=values.get("note", ""),
            **built,
        )


def _train_config(values: Mapping[str, Any]) -> RLConfig:
    """Return the settings of the RL run itself, with those of its objective, optimisers and guard. No field is "auto"."""
    steps = values["train"]["steps"]
    objective = build(ObjectiveConfig, values["objective"], "objective")
    critic = _critic_config(values, steps)
    warmup = critic.warmup_steps if critic else 0
    total = max(steps - warmup, 1) * objective.optimizer_steps
    return build(
        RLConfig,
        values["train"],
        "train",
        optim=build(OptimConfig, values["optim"], "optim", total_steps=total),
        objective=objective,
        critic=critic,
        guard=build(GuardConfig, values["guard"], "guard"),
    )


def _check_advantage(recipe: Recipe, default: str, train: RLConfig) -> None:
    """Raise UserError if `recipe.advantage` has no effect, or if all advantages would be 0."""
    if train.critic is not None and recipe.advantage != default:
        raise UserError(
            f"recipe.advantage={recipe.advantage!r} has no effect in a run with a critic, which gives the advantages: leave it "
            f"at {default!r}, or remove the config's critic"
        )
    if train.critic is None and train.steps and train.samples == 1 and recipe.advantage in GROUP_RELATIVE:
        raise UserError(
            f"recipe.advantage={recipe.advantage!r} compares the samples of a question, but train.samples=1 gives only one: all "
            "advantages would be 0. Raise train.samples, or set recipe.advantage to reinforce_plus_plus or reward, which do "
            "not compare the samples of a question"
        )


def _critic_config(values: Mapping[str, Any], steps: int) -> CriticConfig | None:
    """Return the settings of PPO's critic; None if the config has no section for it."""
    if not any(name in values for name in CRITIC_SECTIONS):
        return None
    sections = {name: values.get(name, {}) for name in CRITIC_SECTIONS}
    config = build(CriticConfig, sections["critic"], "critic", optim=OptimConfig())
    total = max(steps, 1) * config.optimizer_steps
    optim = build(OptimConfig, sections["critic_optim"], "critic_optim", total_steps=total)
    return dataclasses.replace(config, optim=optim)
