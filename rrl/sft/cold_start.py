"""Demonstrations for a cold start (R3-RAG, 3.2.1): a strong model's trajectories, of which the right and well-formed are kept.

Algorithm 1 samples, Algorithm 2 makes (input, output) pairs of what is kept. Trajectories are written block by block, so that
a run that was killed goes on where it was.
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, refuse_unknown_fields
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, Trajectory
from rrl.errors import UserError, at_least
from rrl.files import read_json_lines, saving, write_atomically
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash, load_language_model
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.card import require_policy
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.episodes import find_long_prompts
from rrl.rewards.endpoint import EndpointConfig
from rrl.rewards.judge import Judge
from rrl.rewards.judge_settings import SECTIONS as JUDGE
from rrl.rewards.judge_settings import JudgeSettings
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.datasets import (
    DataConfig,
    RetrieverConfig,
    SearchDataset,
    data_fingerprint,
    encoder_folder,
    load_datasets,
)
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import lock_workdir, refuse_locked, refuse_other_config
from rrl.sft.teacher import REFUSED, EndpointTeacher, PolicyTeacher, Teacher
from rrl.stopping import ServiceUnavailable, stop_requested

FOLDERS = ("blocks", "indexes")
"""Folders that a run makes in its workdir."""
FILES = ("pairs.jsonl", "report.json")
"""Files that it makes, beside config.json."""


class HasDemonstrations(Recipe, Protocol):
    """A recipe whose scored trajectories can be demonstrations."""

    def rejection_reason(self, trajectory: Trajectory) -> str:
        """Why it is none; "" where it is one."""

    def sft_pairs(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """What is read (the user's turn) and what shall be written, of each of its steps."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How many trajectories are sampled, and how many are kept."""

    questions: int = 0
    """Of the training questions, from the first on; 0: all."""
    temperatures: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0)
    """One trajectory of a question at each of them; one may stand there twice."""
    keep: int = 1
    """Trajectories of a question that are kept at most, the first of them (the paper keeps 51,254 of 64,937 questions); 0: all
    that differ."""
    block: int = 64
    """Questions whose trajectories are written together."""
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, self, "questions", "keep", "seed")
        at_least(1, self, "block")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(f"temperatures={self.temperatures} must be one number or more, each at least 0")


SECTIONS = {
    "sampling": SamplingConfig,
    "rollout": EngineConfig,
    "data": DataConfig,
    "retriever": RetrieverConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
}
"""The dataclass behind each section of a config, but for those of `recipe`, `endpoint` and the judge."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """A config of this form (see configs/r3rag_cold_start.py) with every field there is, so that each can be overridden."""
    rename_config(config)
    judge = JUDGE if any(name in config for name in JUDGE) else {}
    for name, kind in {**SECTIONS, "endpoint": EndpointConfig, **judge}.items():
        if name not in config:
            config[name] = ConfigDict()
        fill_defaults(config[name], kind)
    recipe = make_recipe(config.recipe.name)
    fill_defaults(config.recipe, type(recipe))
    fill_defaults(config.recipe.environment, type(recipe.environment))
    return config


@dataclasses.dataclass(frozen=True)
class ColdStartSettings:
    """A config, checked and typed."""

    model: str
    """Folder of the strong model; empty: it is a service."""
    endpoint: EndpointConfig | None
    recipe: Any
    """A `HasDemonstrations`."""
    sampling: SamplingConfig
    rollout: EngineConfig
    data: DataConfig
    retriever: RetrieverConfig
    mesh: MeshConfig
    compute: ComputeConfig
    judge: JudgeSettings | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ColdStartSettings":
        """Checks a config and that its folders are there; loads nothing yet. Raises UserError."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        refuse_unknown_fields([*SECTIONS, *JUDGE, "model", "endpoint", "recipe"], values, "config")
        fields = dict(values["recipe"])
        name, environment = fields.pop("name"), fields.pop("environment", {})
        recipe = make_recipe(name, fields, environment)
        if not (hasattr(recipe, "rejection_reason") and hasattr(recipe, "sft_pairs")):
            able = ", ".join(
                key
                for key, kind in RECIPES.items()
                if hasattr(kind, "sft_pairs") and hasattr(kind, "rejection_reason")
            )
            raise UserError(f"recipe.name={name!r} makes no pairs of its trajectories; choose {able}")
        model, endpoint = values["model"], values.get("endpoint", {})
        if bool(model) == bool(endpoint.get("url")):
            raise UserError(
                f"model={model!r} and endpoint.url={endpoint.get('url', '')!r}: give one of them as the strong model"
            )
        for field, instead in (("temperature", "temperatures"), ("seed", "seed")):
            if endpoint.get(field):
                raise UserError(
                    f"endpoint.{field}={endpoint[field]} has no part in a cold start, whose samples each have their own: "
                    f"set sampling.{instead}"
                )
        top_p = values.get("rollout", {}).get("top_p", 1.0)
        if not model and top_p != 1.0:
            raise UserError(f"rollout.top_p={top_p} is not sent to a service: set model, or leave it at 1.0")
        if model:
            require_policy(model, "model")
        judge = JudgeSettings.parse(values) if any(section in values for section in JUDGE) else None
        if recipe.needs_judge and judge is None:
            raise UserError(
                "recipe: answers that do not match are to be judged; give the section judge, or recipe.judge_answers=False"
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
            raise UserError(f"data={path!r} is no folder; give one, or miniwiki for the built-in world")
        return cls(
            model=model,
            endpoint=None if model else build(EndpointConfig, endpoint, "endpoint"),
            recipe=recipe,
            judge=judge if recipe.needs_judge else None,
            **sections,
        )

    def identity(self) -> dict[str, Any]:
        """What decides the trajectories: models by content or name, data, search, settings."""
        encoder = encoder_folder(self.retriever)
        found = {
            "model": folder_hash(self.model) if self.endpoint is None else self.endpoint.identity,
            "recipe": dataclasses.asdict(self.recipe),
            "sampling": dataclasses.asdict(self.sampling),
            "rollout": {name: getattr(self.rollout, name) for name in ("context", "top_k", "top_p")},
            "data": dataclasses.asdict(self.data),
            "retriever": self.retriever.identity() | {"encoder_sha256": encoder and folder_hash(encoder)},
            "judge": self.judge.identity() if self.judge else None,
        }
        if self.data.path != "miniwiki":
            found |= data_fingerprint(self.data.path)
        return found

    def load(self, corpus: SearchDataset, say: TimedLog) -> tuple[Teacher, Judge | None]:
        """The strong model, and the judge where one is asked."""
        mesh = self.mesh.make()
        temperatures, seed = self.sampling.temperatures, self.sampling.seed
        strong: Teacher
        if self.endpoint is not None:
            say(f"strong model {self.endpoint.model} at {self.endpoint.url}")
            strong = EndpointTeacher(
                self.endpoint, self.recipe, corpus.retriever, self.rollout.top_k, temperatures, seed
            )
        else:
            say(f"strong model {self.model}")
            dtype = jnp.dtype(self.compute.dtype)
            decoder, tokenizer = load_language_model(
                self.model,
                "model",
                chat=uses_chat(self.recipe),
                context=self.rollout.context,
                dtype=dtype,
                param_dtype=dtype,
                mesh=mesh if mesh.size > 1 else None,
            )
            engine = Engine(decoder, tokenizer, self.rollout, retriever=corpus.retriever, mesh=mesh)
            check_tags(self.recipe, tokenizer)
            find_long_prompts(engine, self.recipe, corpus.questions, self.data.on_error, say)
            strong = PolicyTeacher(engine, nnx.state(decoder), self.recipe, temperatures, seed)
        judge = None if self.judge is None else self.judge.load(corpus.questions, self.compute, mesh)
        return strong, judge


@dataclasses.dataclass(frozen=True)
class ColdStartReport:
    """What was kept, and why the rest fell."""

    questions: int
    trajectories: int
    kept: int
    answered: int
    """Questions of which something is kept."""
    pairs: int
    fell: Mapping[str, int]
    """Trajectories by why they are not kept."""
    by_temperature: Mapping[str, tuple[int, int]]
    """Kept, and sampled, at each."""
    unread: int = 0
    """Answers of the judge that could not be read, which count as no."""

    def text(self) -> str:
        """The same as a table."""
        share = 100 / max(self.trajectories, 1)
        lines = [
            f"{self.trajectories} trajectories of {self.questions} questions",
            f"  {self.kept:6} kept ({share * self.kept:.1f} %), of {self.answered} questions: {self.pairs} pairs",
        ]
        lines += [f"  {count:6} {why} ({share * count:.1f} %)" for why, count in self.fell.items()]
        lines += [
            f"  at temperature {temperature}: {kept} of {sampled} kept"
            for temperature, (kept, sampled) in self.by_temperature.items()
        ]
        if self.unread:
            lines.append(f"  {self.unread} answers of the judge could not be read: they count as no")
        return "\n".join(lines)


def run(config: Mapping[str, Any], workdir: str | os.PathLike[str]) -> ColdStartReport | None:
    """Samples, and writes `pairs.jsonl` ({id, step, input, output}) and `report.json` to `workdir`.

    `blocks/` holds every trajectory, the rejected ones too, with what became of it. None where a signal stopped it; the same
    command continues. Raises UserError for a wrong config, for a workdir of another one, or that another process holds, and for
    a damaged block; SaveError where the workdir cannot be written.
    """
    say, settings, folder = TimedLog(), ColdStartSettings.from_config(config), pathlib.Path(workdir)
    identity = json.loads(json.dumps(settings.identity()))
    # The first is read after all is sampled; the others are known by their content.
    refuse_other_config(folder, identity, ("sampling.keep", "data.path", "retriever.encoder"))
    refuse_locked(folder, FOLDERS, FILES)
    enable_compilation_cache()
    with lock_workdir(folder):
        return _run(settings, identity, folder, say)


def _run(
    settings: ColdStartSettings, identity: Mapping[str, Any], folder: pathlib.Path, say: TimedLog
) -> ColdStartReport | None:
    """As `run`, in a workdir that this process holds."""
    corpus, _ = load_datasets(settings.data, settings.retriever, say, settings.rollout.search_seconds, folder)
    sampling = settings.sampling
    questions = corpus.questions[: sampling.questions or None]
    corpus = dataclasses.replace(corpus, questions=questions)
    blocks = {
        folder / "blocks" / f"{first:08d}.jsonl": range(first, min(first + sampling.block, len(questions)))
        for first in range(0, len(questions), sampling.block)
    }
    missing = [file for file, block in blocks.items() if not _is_complete(file, block, sampling, say)]
    models = settings.load(corpus, say) if missing else None
    # Not before: what `load` refuses is mended with another config.
    _write(folder / "config.json", json.dumps(identity, indent=2, sort_keys=True))
    if models is not None:
        strong, judge = models
        with saving(folder / "blocks"):
            (folder / "blocks").mkdir(exist_ok=True)
        with stop_requested() as stop:
            for file in missing:
                if stop:
                    say("stopped; the same command continues")
                    return None
                some, first = [questions[at] for at in blocks[file]], blocks[file].start
                try:
                    records = sample_block(strong, settings.recipe, some, first, sampling.temperatures, judge)
                except ServiceUnavailable:
                    if not stop:
                        raise
                    say("stopped; the same command continues")
                    return None
                _write(file, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
                good = sum(not record["fault"] for record in records)
                say(
                    f"questions {first + 1} to {first + len(some)}: {good} of {len(records)} trajectories are good"
                )
    cure = "delete that file and give the same command again, which samples its questions again"
    lines = (record for file in blocks for _, record in read_json_lines(file, cure))
    pairs, report = select_pairs(lines, sampling.keep, len(questions))
    _write(folder / "pairs.jsonl", "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs))
    _write(folder / "report.json", json.dumps(dataclasses.asdict(report), indent=2))
    print(report.text())
    return report


def _is_complete(file: pathlib.Path, block: Collection[int], sampling: SamplingConfig, say: TimedLog) -> bool:
    """Whether a file holds a line for each trajectory of a block; says so where it is there and does not."""
    if not file.exists():
        return False
    count, expected = file.read_bytes().count(b"\n"), len(block) * len(sampling.temperatures)
    if count != expected:
        say(f"{file} holds {count} of {expected} trajectories: its questions are sampled again")
    return count == expected


def _write(file: pathlib.Path, text: str) -> None:
    """Writes a file that is there only when it is whole. Raises SaveError."""
    with saving(file):
        write_atomically(file, text)


def sample_block(
    strong: Teacher,
    recipe: HasDemonstrations,
    questions: Sequence[Question],
    first: int,
    temperatures: Sequence[float],
    judge: Judge | None = None,
) -> list[dict[str, Any]]:
    """Algorithm 1 on some questions, and what became of each trajectory: a record a trajectory."""
    trajectories = strong.sample(questions, first)
    recipe.score(trajectories, ScoringContext(judge=judge))
    records = []
    for place, trajectory in enumerate(trajectories):
        fault = REFUSED if trajectory.ended == REFUSED else recipe.rejection_reason(trajectory)
        records.append(
            {
                "number": trajectory.group,
                "id": trajectory.question.id,
                "question": trajectory.question.text,
                "temperature": temperatures[place % len(temperatures)],
                "fault": fault,
                "unread": int(trajectory.metrics.get("judge_unread", 0)),
                "ended": trajectory.ended,
                "answer": trajectory.answer,
                "said": [text for role, text in trajectory.segments if role == POLICY],
                "pairs": [] if fault else recipe.sft_pairs(trajectory),
            }
        )
    return records


def select_pairs(
    records: collections.abc.Iterable[Mapping[str, Any]], keep: int, questions: int
) -> tuple[list[dict[str, Any]], ColdStartReport]:
    """The pairs of what is kept of records in their order, and the report: of a question no two trajectories that say the same
    but for white space, and at most `keep` of them (0: all)."""
    pairs: list[dict[str, Any]] = []
    fell: collections.Counter[str] = collections.Counter()
    sampled: collections.Counter[str] = collections.Counter()
    kept: collections.Counter[str] = collections.Counter()
    seen: dict[int, set[tuple[str, ...]]] = collections.defaultdict(set)
    taken: collections.Counter[int] = collections.Counter()
    unread = 0
    for record in records:
        number, temperature, fault = record["number"], str(record["temperature"]), record["fault"]
        sampled[temperature] += 1
        unread += record["unread"]
        if not fault:
            said = tuple(" ".join(output.split()) for _, output in record["pairs"])
            if said in seen[number]:
                fault = "duplicate"
            elif keep and taken[number] == keep:
                fault = "more than are kept of its question"
            seen[number].add(said)
        if fault:
            fell[fault] += 1
            continue
        taken[number] += 1
        kept[temperature] += 1
        pairs += [
            {"id": record["id"], "step": step, "input": told, "output": said}
            for step, (told, said) in enumerate(record["pairs"], start=1)
        ]
    return pairs, ColdStartReport(
        questions=questions,
        trajectories=sampled.total(),
        kept=kept.total(),
        answered=len(taken),
        pairs=len(pairs),
        fell=dict(fell.most_common()),
        by_temperature={name: (kept[name], count) for name, count in sampled.items()},
        unread=unread,
    )
