"""The config sections of a judge, their defaults, and the judge made from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rrl.config.sections import build, fill_sections
from rrl.data.questions import Question
from rrl.errors import UserError, at_least, one_of
from rrl.models.hardware import ComputeConfig
from rrl.models.hf import folder_hash, load_language_model
from rrl.models.weights import require_folder
from rrl.rewards.endpoint import Endpoint
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rewards.judge import Judge, ModelJudge
from rrl.rewards.judge_card import JudgeCard, read_judge_card
from rrl.rewards.oracle import Oracle, require_gold
from rrl.rewards.reader import MIN_PROMPT_TOKENS, SPARE_TOKENS, Reader
from rrl.rollout.config import EngineConfig

KINDS = ("oracle", "model", "endpoint")


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Config section "judge": the kind of judge and its settings."""

    kind: str = "oracle"
    """"oracle": scores by the gold passages that the data names. "model": a frozen decoder in the rollout engine. "endpoint": a
    service, see section judge_endpoint."""
    folder: str = ""
    """kind="model": Hugging Face folder of the model. A judge card in it (`rrl.rewards.judge_card`) determines the prompts."""
    answer_tokens: int = JudgeCard.answer_tokens
    """kind="model": maximum number of tokens of a reply, including the model's thoughts."""
    thinking: bool = False
    """kind="model": whether a model that can think before it answers (Qwen3) does so. Raise `answer_tokens` then."""

    def __post_init__(self) -> None:
        one_of(KINDS, self, "kind")
        at_least(1, self, "answer_tokens")
        if self.folder and self.kind != "model":
            raise UserError(
                f"judge.folder={self.folder!r} needs judge.kind=model, not {self.kind}; leave it out"
            )
        if self.thinking and self.kind != "model":
            raise UserError(
                f"judge.thinking=True needs judge.kind=model, not {self.kind}; for a service set judge_endpoint.thinking"
            )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """The validated config sections of a judge."""

    judge: JudgeConfig
    rollout: EngineConfig
    """kind="model": settings of its rollout engine."""
    endpoint: EndpointConfig | None
    """kind="endpoint": the service."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "JudgeSettings":
        """Read the sections of a config. Raises UserError for a wrong field."""
        judge = build(JudgeConfig, values.get("judge", {}), "judge")
        rollout = build(EngineConfig, values.get("judge_rollout", {}), "judge_rollout")
        if judge.kind == "model" and rollout.context < judge.answer_tokens + MIN_PROMPT_TOKENS + SPARE_TOKENS:
            raise UserError(
                f"judge_rollout.context={rollout.context} must hold judge.answer_tokens={judge.answer_tokens} and a prompt"
            )
        endpoint = None
        if judge.kind == "endpoint":
            endpoint = build(EndpointConfig, values.get("judge_endpoint", {}), "judge_endpoint")
        return cls(judge, rollout, endpoint)

    def check(self) -> None:
        """Raise UserError if the model's folder is missing."""
        if self.judge.kind == "model":
            require_folder("judge.folder", self.judge.folder)

    def identity(self) -> dict[str, Any]:
        """Return what determines the scores: the content hash of a model, or the model name of a service."""
        if self.endpoint is not None:
            return {"kind": "endpoint"} | self.endpoint.identity
        if self.judge.kind == "oracle":
            return {"kind": "oracle"}
        identity = {
            "kind": "model",
            "folder": folder_hash(self.judge.folder),
            "answer_tokens": self.judge.answer_tokens,
            "context": self.rollout.context,
        }
        if self.judge.thinking:
            identity["thinking"] = True
        if self.rollout.weights != "auto":
            identity["weights"] = self.rollout.weights
        card = read_judge_card(self.judge.folder)
        return identity if card is None else identity | {"card": dataclasses.asdict(card)}

    def load(self, questions: Sequence[Question], compute: ComputeConfig, mesh: Mesh) -> Judge:
        """Load the judge.

        Args:
          questions: the questions that it will judge. Raises UserError if an oracle lacks their gold passages.
          compute: dtype of a model.
          mesh: devices of a model.
        """
        if self.endpoint is not None:
            return ModelJudge(Endpoint(self.endpoint).answers)
        if self.judge.kind == "oracle":
            require_gold(questions)
            return Oracle()
        decoder, tokenizer = load_language_model(
            self.judge.folder,
            "judge.folder",
            context=self.rollout.context,
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.dtype),
            mesh=mesh if mesh.size > 1 else None,
        )
        reader = Reader(
            decoder,
            tokenizer,
            self.rollout,
            answer_tokens=self.judge.answer_tokens,
            require_complete=True,
            thinking=self.judge.thinking,
            mesh=mesh,
        )
        return ModelJudge(reader.answers, read_judge_card(self.judge.folder))


SECTIONS: Mapping[str, type] = {
    "judge": JudgeConfig,
    "judge_rollout": EngineConfig,
    "judge_endpoint": EndpointConfig,
}
"""Config sections of a judge -> their dataclasses."""


def fill_judge_defaults(config: ConfigDict) -> None:
    """Add every missing field of a judge's sections with its default, in place, if the config has any of these sections."""
    if any(name in config for name in SECTIONS):
        fill_sections(config, SECTIONS)


def judge_sections(judge: str, model: str = "", context: int = 0) -> dict[str, dict[str, Any]]:
    """Return the config sections of a judge.

    Args:
      judge: "oracle", the folder of a model, or the http address of a service.
      model: name of the service's model.
      context: maximum number of tokens of a model's prompt and reply; 0: the value in its judge card.

    Raises UserError for a `model` without a service.
    """
    kind = "oracle" if judge == "oracle" else "endpoint" if judge.startswith("http") else "model"
    if model and kind != "endpoint":
        raise UserError(
            f"judge_model={model!r} names a service's model, but judge={judge!r} is not a service: give its address, "
            "judge=http://..., or leave judge_model out"
        )
    section: dict[str, Any] = {"kind": kind, "folder": judge if kind == "model" else ""}
    if (card := read_judge_card(judge) if kind == "model" else None) is not None:
        section |= {"answer_tokens": card.answer_tokens}
    context = context or (card or JudgeCard()).context
    return {
        "judge": section,
        "judge_endpoint": {"url": judge if kind == "endpoint" else "", "model": model},
        "judge_rollout": {"rows": 64, "context": context, "prefill_tokens": 2048},
    }
