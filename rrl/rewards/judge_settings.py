"""The judge of a run, from its config."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from rrl.config.sections import build
from rrl.data.questions import Question
from rrl.errors import UserError, at_least, one_of
from rrl.models.hardware import ComputeConfig
from rrl.models.hf import folder_hash, load_language_model
from rrl.models.weights import require_folder
from rrl.rewards.endpoint import Endpoint, EndpointConfig
from rrl.rewards.judge import Judge, ModelJudge
from rrl.rewards.judge_card import JudgeCard, read_judge_card
from rrl.rewards.oracle import Oracle, require_gold
from rrl.rewards.reader import Reader
from rrl.rollout.config import EngineConfig

KINDS = ("oracle", "model", "endpoint")


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Which judge, and the section of its kind."""

    kind: str = "oracle"
    """oracle: the questions' gold passages, where the data has them; model: a frozen decoder in the run's own engine;
    endpoint: a service (section judge_endpoint)."""
    folder: str = ""
    """Of a model: its Hugging Face folder; a card in it (`rrl.rewards.judge_card`) says how it is asked."""
    answer_tokens: int = JudgeCard.answer_tokens
    """Of a model: most tokens of an answer, its thoughts among them."""
    thinking: bool = False
    """Of a model that may think before it answers (Qwen3): whether it does. Then give it tokens for that."""

    def __post_init__(self) -> None:
        one_of(KINDS, self, "kind")
        at_least(1, self, "answer_tokens")
        if self.folder and self.kind != "model":
            raise UserError(
                f"judge.folder={self.folder!r} goes with judge.kind=model, not {self.kind}; leave it out"
            )
        if self.thinking and self.kind != "model":
            raise UserError(
                f"judge.thinking=True goes with judge.kind=model, not {self.kind}; a service is told by judge_endpoint.thinking"
            )


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    """A judge's sections of a config, checked."""

    judge: JudgeConfig
    rollout: EngineConfig
    """Sizes of a model's engine."""
    endpoint: EndpointConfig | None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "JudgeSettings":
        """From a config's sections. Raises UserError for a wrong field."""
        judge = build(JudgeConfig, values.get("judge", {}), "judge")
        rollout = build(EngineConfig, values.get("judge_rollout", {}), "judge_rollout")
        if judge.kind == "model" and rollout.context < judge.answer_tokens + 3:
            raise UserError(
                f"judge_rollout.context={rollout.context} must hold judge.answer_tokens={judge.answer_tokens} and a prompt"
            )
        endpoint = None
        if judge.kind == "endpoint":
            endpoint = build(EndpointConfig, values.get("judge_endpoint", {}), "judge_endpoint")
        return cls(judge, rollout, endpoint)

    def check(self) -> None:
        """Raises UserError for a model that is not there."""
        if self.judge.kind == "model":
            require_folder("judge.folder", self.judge.folder)

    def identity(self) -> dict[str, Any]:
        """What decides its scores: a model by content, a service by the name of its model."""
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
        card = read_judge_card(self.judge.folder)
        return identity if card is None else identity | {"card": dataclasses.asdict(card)}

    def load(self, questions: Sequence[Question], compute: ComputeConfig, mesh: Mesh) -> Judge:
        """The judge itself.

        Raises UserError where `questions`, which it will be asked about, say too little for an oracle.
        """
        if self.endpoint is not None:
            return ModelJudge(Endpoint(self.endpoint).answers)
        if self.judge.kind == "oracle":
            require_gold(questions)
            return Oracle()
        frozen = load_language_model(
            self.judge.folder,
            "judge.folder",
            context=self.rollout.context,
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.dtype),
            mesh=mesh if mesh.size > 1 else None,
        )
        reader = Reader(
            *frozen,
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
"""The sections of a config that has a judge, and the dataclass behind each."""


def judge_sections(judge: str, model: str = "", context: int = 0) -> dict[str, dict[str, Any]]:
    """The sections of a config for a judge that is named in one word: "oracle", a folder, or the http address of a service
    whose `model` it is. `context`: most tokens of a model's prompt and answer; 0: what its card says.

    Raises UserError for a `model` beside anything else than a service.
    """
    kind = "oracle" if judge == "oracle" else "endpoint" if judge.startswith("http") else "model"
    if model and kind != "endpoint":
        raise UserError(
            f"judge_model={model!r} names a service's model, but judge={judge!r} is no service: give its address, "
            "judge=http://..., or leave judge_model out"
        )
    found: dict[str, Any] = {"kind": kind, "folder": judge if kind == "model" else ""}
    if (card := read_judge_card(judge) if kind == "model" else None) is not None:
        found |= {"answer_tokens": card.answer_tokens}
    context = context or (card or JudgeCard()).context
    return {
        "judge": found,
        "judge_endpoint": {"url": judge if kind == "endpoint" else "", "model": model},
        "judge_rollout": {"rows": 64, "context": context, "prefill_tokens": 2048},
    }
