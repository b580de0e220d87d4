"""Settings of a cold start by rejection sampling. Read `ColdStartSettings` first."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_sections, refuse_unknown_fields
from rrl.errors import UserError, at_least
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash
from rrl.recipes.base import Recipe
from rrl.recipes.card import require_policy
from rrl.recipes.catalogue import RECIPES, fill_recipe_defaults, make_recipe
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rewards.judge_settings import SECTIONS as JUDGE_SECTIONS
from rrl.rewards.judge_settings import JudgeSettings, fill_judge_defaults
from rrl.rollout.config import EngineConfig
from rrl.runs.datasets import DataConfig, data_fingerprint
from rrl.runs.retriever import RetrieverConfig, encoder_folder


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How many trajectories are sampled and accepted."""

    questions: int = 0
    """Training questions, taken from the start of the data; 0: all."""
    temperatures: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0)
    """Sampling temperatures: one trajectory of each question at each of them. A temperature may occur more than once."""
    keep: int = 1
    """Largest number of accepted trajectories per question; the first ones are taken. 0: all, without duplicates. The paper takes
    1: it accepts a trajectory for 51,254 of its 64,937 questions."""
    block: int = 64
    """Questions per block; the trajectories of a block are written together."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        at_least(0, self, "questions", "keep", "seed")
        at_least(1, self, "block")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(f"temperatures={self.temperatures} must be one or more numbers, each at least 0")


SECTIONS = {
    "sampling": SamplingConfig,
    "rollout": EngineConfig,
    "data": DataConfig,
    "retriever": RetrieverConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
}
"""The dataclass of each config section, except `recipe`, `endpoint` and the judge's sections."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """Add every missing field with its default to a config (see configs/r3rag_cold_start.py), so that each can be overridden."""
    rename_config(config)
    fill_sections(config, {**SECTIONS, "endpoint": EndpointConfig})
    fill_judge_defaults(config)
    fill_recipe_defaults(config.recipe.name, config.recipe, config.recipe.environment)
    return config


@dataclasses.dataclass(frozen=True)
class ColdStartSettings:
    """The checked and typed settings of a whole cold-start run."""

    model: str
    """Folder of the teacher; "" if the teacher is a service."""
    endpoint: EndpointConfig | None
    """Service of the teacher; None if the teacher is a folder."""
    recipe: Recipe
    """A recipe that makes pairs for supervised fine-tuning (`Recipe.makes_sft_pairs`)."""
    sampling: SamplingConfig
    rollout: EngineConfig
    data: DataConfig
    retriever: RetrieverConfig
    mesh: MeshConfig
    compute: ComputeConfig
    judge: JudgeSettings | None
    """Judge of answers that do not match the gold answers; None if the recipe uses none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ColdStartSettings":
        """Check a config and that its folders exist, without loading anything. Raises UserError."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        refuse_unknown_fields([*SECTIONS, *JUDGE_SECTIONS, "model", "endpoint", "recipe"], values, "config")
        fields = dict(values["recipe"])
        name, environment = fields.pop("name"), fields.pop("environment", {})
        recipe = make_recipe(name, fields, environment)
        if not recipe.makes_sft_pairs:
            able = ", ".join(key for key, known in RECIPES.items() if known.makes_sft_pairs)
            raise UserError(
                f"recipe.name={name!r} cannot turn trajectories into (input, output) pairs; choose {able}"
            )
        model, endpoint = values["model"], values.get("endpoint", {})
        if bool(model) == bool(endpoint.get("url")):
            raise UserError(
                f"model={model!r} and endpoint.url={endpoint.get('url', '')!r}: give exactly one of them as the teacher"
            )
        for field, instead in (("temperature", "temperatures"), ("seed", "seed")):
            if endpoint.get(field):
                raise UserError(
                    f"endpoint.{field}={endpoint[field]} has no effect in a cold start, which sets it for each sample: "
                    f"set sampling.{instead} instead"
                )
        top_p = values.get("rollout", {}).get("top_p", 1.0)
        if not model and top_p != 1.0:
            raise UserError(f"rollout.top_p={top_p} is not sent to a service: set model, or leave it at 1.0")
        if model:
            require_policy(model, "model")
        judge = JudgeSettings.parse(values) if any(section in values for section in JUDGE_SECTIONS) else None
        if recipe.needs_judge and judge is None:
            raise UserError(
                "recipe: a judge must check answers that do not match; give the section judge, or recipe.judge_answers=False"
            )
        if judge is not None:
            judge.check()
        sections: dict[str, Any] = {
            section: build(kind, values.get(section, {}), section) for section, kind in SECTIONS.items()
        }
        sections["compute"] = sections["compute"].for_platform(jax.default_backend())
        encoder_folder(sections["retriever"])
        path = sections["data"].path
        if path != "miniwiki" and not (path and pathlib.Path(path).is_dir()):
            raise UserError(f"data={path!r} is not a folder; give one, or miniwiki for the built-in world")
        return cls(
            model=model,
            endpoint=None if model else build(EndpointConfig, endpoint, "endpoint"),
            recipe=recipe,
            judge=judge if recipe.needs_judge else None,
            **sections,
        )

    def identity(self) -> dict[str, Any]:
        """Return what identifies a run: models by content or name, recipe, sampling, data, retriever and judge.

        `mesh`, `compute` and most of `rollout` are not part of it. `rollout.weights` is, if it is not "auto".
        """
        encoder = encoder_folder(self.retriever)
        identity = {
            "model": folder_hash(self.model) if self.endpoint is None else self.endpoint.identity,
            "recipe": dataclasses.asdict(self.recipe),
            "sampling": dataclasses.asdict(self.sampling),
            "rollout": {name: getattr(self.rollout, name) for name in ("context", "top_k", "top_p")}
            | ({"weights": self.rollout.weights} if self.rollout.weights != "auto" else {}),
            "data": dataclasses.asdict(self.data),
            "retriever": self.retriever.identity() | {"encoder_sha256": encoder and folder_hash(encoder)},
            "judge": self.judge.identity() if self.judge else None,
        }
        if self.data.path != "miniwiki":
            identity |= data_fingerprint(self.data.path)
        return identity
