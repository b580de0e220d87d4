"""The config of an evaluation: sections, defaults and checks. Read `EvaluationSettings` first."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, fill_sections, refuse_unknown_fields
from rrl.errors import UserError, at_least, at_most, one_of
from rrl.eval.dataset import DatasetConfig
from rrl.eval.judging import PROMPTS
from rrl.eval.methods import AnsweringMethod, make_answering_method
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.weights import require_folder
from rrl.recipes.card import require_policy
from rrl.recipes.catalogue import fill_recipe_defaults, is_recipe
from rrl.recipes.prompted.base import PromptedSettings
from rrl.recipes.prompted.catalogue import METHODS, make_prompted_method
from rrl.rewards.judge_settings import SECTIONS as JUDGE_SECTIONS
from rrl.rewards.judge_settings import JudgeSettings, fill_judge_defaults
from rrl.rollout.config import EngineConfig
from rrl.runs.retriever import RetrieverConfig, encoder_folder
from rrl.text.normalize import rule_named


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How answers are sampled and scored."""

    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Seed of sampling and of the bootstrap."""
    normalization: str = "squad"
    """A name of `rrl.text.normalize.RULES`."""
    judge_prompt: str = "tiresrag"
    """Prompt of the judge: tiresrag (Figure 13) or r2ag (Figure A.4)."""
    level: float = 0.95
    """Confidence level of the intervals."""

    def __post_init__(self) -> None:
        at_least(0, self, "temperature", "seed", "level")
        at_most(2**32 - 1, self, "seed")
        one_of(PROMPTS, self, "judge_prompt")
        rule_named(self.normalization)
        if not 0 < self.level < 1:
            raise UserError(f"level={self.level} must lie between 0 and 1, such as 0.95")


SECTIONS: Mapping[str, type] = {
    "eval": EvalConfig,
    "data": DatasetConfig,
    "retriever": RetrieverConfig,
    "rollout": EngineConfig,
    "reader_rollout": EngineConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
}
"""The dataclass of each config section that every method has."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """Add every missing field with its default to a config (see configs/eval.py), so that each can be overridden."""
    rename_config(config)
    fill_sections(config, SECTIONS)
    fill_judge_defaults(config)
    name = config.method.name
    if name in METHODS:
        for option, value in make_prompted_method(name).option_values.items():
            if option not in config.method:
                config.method[option] = value
        fill_defaults(config.prompted, PromptedSettings)
        for field in ("temperature", "token_bytes"):  # set by the evaluation and the tokenizer
            del config.prompted[field]
    elif is_recipe(name):
        if "environment" not in config.recipe:
            config.recipe.environment = ConfigDict()
        fill_recipe_defaults(name, config.recipe, config.recipe.environment)
    return config


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """An evaluation's config, checked and typed."""

    name: str
    policy: str
    method: AnsweringMethod
    eval: EvalConfig
    data: DatasetConfig
    retriever: RetrieverConfig
    rollout: EngineConfig
    reader_rollout: EngineConfig
    mesh: MeshConfig
    compute: ComputeConfig
    reader: str = ""
    """Folder of the model that answers from the passages that a recipe retrieved (R2AG's generator)."""
    judge: JudgeSettings | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "EvaluationSettings":
        """Check a config (see configs/eval.py) and that its folders exist. Nothing is loaded yet. Raises UserError."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        names = ("name", "policy", "reader", "method", "recipe", "prompted")
        refuse_unknown_fields([*SECTIONS, *JUDGE_SECTIONS, *names], values, "config")
        reader = values.get("reader", "")
        method = make_answering_method(values["method"], values.get("recipe"), values.get("prompted"), reader)
        if not values["name"]:
            raise UserError("name='' is empty; give a name, which becomes the name of the run's folder")
        require_policy(values["policy"])
        if reader:
            require_folder("reader", reader)
        sections: dict[str, Any] = {name: build(kind, values[name], name) for name, kind in SECTIONS.items()}
        judge = JudgeSettings.parse(values) if "judge" in values else None
        folders = {"policy": values["policy"], "reader": reader}
        settings = cls(name=values["name"], method=method, judge=judge, **folders, **sections)
        if settings.judge is not None:
            settings.judge.check()
        if settings.searches:
            encoder_folder(settings.retriever)
            settings.retriever.identity()  # checks its index, if it has one
        return dataclasses.replace(settings, compute=settings.compute.for_platform(jax.default_backend()))

    @property
    def searches(self) -> bool:
        """Whether the evaluation searches at all."""
        return self.method.searches and self.retriever.kind != "off"
