"""Demonstrations for a cold start by rejection sampling (R3-RAG, 3.2.1): a teacher's correct and well-formed trajectories.

Algorithm 1 samples trajectories. Algorithm 2 turns the accepted ones into (input, output) pairs. Trajectories are written in
blocks of questions, so that a killed run continues after its last complete block. Read `run` first.
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, refuse_unknown_fields
from rrl.data.questions import Question
from rrl.data.trajectory import POLICY
from rrl.errors import UserError, at_least
from rrl.files import read_json_lines, saving, write_atomically
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash, load_language_model
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.card import require_policy
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.episodes import find_long_prompts
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rewards.judge import Judge
from rrl.rewards.judge_settings import SECTIONS as JUDGE_SECTIONS
from rrl.rewards.judge_settings import JudgeSettings
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.datasets import DataConfig, SearchDataset, data_fingerprint, load_datasets
from rrl.runs.retriever import RetrieverConfig, encoder_folder
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.sft.teacher import REFUSED, EndpointTeacher, PolicyTeacher, Teacher
from rrl.stopping import ServiceUnavailable, stop_requested

FOLDERS = ("blocks", "indexes")
"""Folders that a run creates in its workdir."""
FILES = ("pairs.jsonl", "report.json")
"""Files that a run creates in its workdir, besides config.json."""


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
    judge = JUDGE_SECTIONS if any(name in config for name in JUDGE_SECTIONS) else {}
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
        """Return everything that determines the trajectories: models by content or name, data, retriever, settings."""
        encoder = encoder_folder(self.retriever)
        identity = {
            "model": folder_hash(self.model) if self.endpoint is None else self.endpoint.identity,
            "recipe": dataclasses.asdict(self.recipe),
            "sampling": dataclasses.asdict(self.sampling),
            "rollout": {name: getattr(self.rollout, name) for name in ("context", "top_k", "top_p")},
            "data": dataclasses.asdict(self.data),
            "retriever": self.retriever.identity() | {"encoder_sha256": encoder and folder_hash(encoder)},
            "judge": self.judge.identity() if self.judge else None,
        }
        if self.data.path != "miniwiki":
            identity |= data_fingerprint(self.data.path)
        return identity

    def load(self, data: SearchDataset, log: TimedLog) -> tuple[Teacher, Judge | None]:
        """Load the teacher, and the judge if there is one."""
        mesh = self.mesh.make()
        temperatures, seed = self.sampling.temperatures, self.sampling.seed
        teacher: Teacher
        if self.endpoint is not None:
            log(f"teacher {self.endpoint.model} at {self.endpoint.url}")
            teacher = EndpointTeacher(
                self.endpoint, self.recipe, data.retriever, self.rollout.top_k, temperatures, seed
            )
        else:
            log(f"teacher {self.model}")
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
            engine = Engine(decoder, tokenizer, self.rollout, retriever=data.retriever, mesh=mesh)
            check_tags(self.recipe, tokenizer)
            find_long_prompts(engine, self.recipe, data.questions, self.data.on_error, log)
            teacher = PolicyTeacher(engine, nnx.state(decoder), self.recipe, temperatures, seed)
        judge = None if self.judge is None else self.judge.load(data.questions, self.compute, mesh)
        return teacher, judge


@dataclasses.dataclass(frozen=True)
class ColdStartReport:
    """Counts of accepted (`kept`) and rejected (`fell`) trajectories. The field names are keys of report.json."""

    questions: int
    """Questions that were sampled."""
    trajectories: int
    """Sampled trajectories."""
    kept: int
    """Accepted trajectories."""
    answered: int
    """Questions with at least one accepted trajectory."""
    pairs: int
    """(input, output) pairs of the accepted trajectories."""
    fell: Mapping[str, int]
    """Rejected trajectories by reason."""
    by_temperature: Mapping[str, tuple[int, int]]
    """(accepted, sampled) trajectories by temperature."""
    unread: int = 0
    """Judge answers that could not be parsed; they count as "no"."""

    def text(self) -> str:
        """Return the report as a table."""
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
            lines.append(f"  {self.unread} answers of the judge could not be parsed: they count as no")
        return "\n".join(lines)


def run(config: Mapping[str, Any], workdir: str | os.PathLike[str]) -> ColdStartReport | None:
    """Sample trajectories and write `pairs.jsonl` ({id, step, input, output}) and `report.json` to `workdir`.

    `blocks/` gets every trajectory, rejected ones too, with the reason of its rejection. The same command continues a stopped
    run.

    Returns:
        The report; None if a signal stopped the run.

    Raises:
        UserError: the config is wrong, the workdir belongs to another config or is locked by another process, or a block is
            damaged.
        SaveError: the workdir cannot be written.
    """
    log, settings, folder = TimedLog(), ColdStartSettings.from_config(config), pathlib.Path(workdir)
    identity = json.loads(json.dumps(settings.identity()))
    # These fields may change: `keep` does not affect sampling, and `identity` holds content hashes of data and encoder.
    refuse_other_config(folder, identity, ("sampling.keep", "data.path", "retriever.encoder"))
    refuse_occupied(folder, FOLDERS, FILES)
    enable_compilation_cache()
    with lock_workdir(folder):
        return _run(settings, identity, folder, log)


def _run(
    settings: ColdStartSettings, identity: Mapping[str, Any], folder: pathlib.Path, log: TimedLog
) -> ColdStartReport | None:
    """The body of `run`, within the lock on the workdir."""
    data, _ = load_datasets(settings.data, settings.retriever, log, settings.rollout.search_seconds, folder)
    sampling = settings.sampling
    questions = data.questions[: sampling.questions or None]
    data = dataclasses.replace(data, questions=questions)
    blocks = {
        folder / "blocks" / f"{first:08d}.jsonl": range(first, min(first + sampling.block, len(questions)))
        for first in range(0, len(questions), sampling.block)
    }
    missing = [file for file, block in blocks.items() if not _is_complete(file, block, sampling, log)]
    models = settings.load(data, log) if missing else None
    # Written only after `load`. If `load` raises, the user corrects the config, and no stored config may forbid that.
    _write(folder / "config.json", json.dumps(identity, indent=2, sort_keys=True))
    if models is not None:
        teacher, judge = models
        with saving(folder / "blocks"):
            (folder / "blocks").mkdir(exist_ok=True)
        with stop_requested() as stop:
            for file in missing:
                if stop:
                    log("stopped; the same command continues")
                    return None
                batch, first = [questions[number] for number in blocks[file]], blocks[file].start
                try:
                    records = sample_block(
                        teacher, settings.recipe, batch, first, sampling.temperatures, judge
                    )
                except ServiceUnavailable:
                    if not stop:
                        raise
                    log("stopped; the same command continues")
                    return None
                _write(file, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
                accepted = sum(not record["fault"] for record in records)
                log(
                    f"questions {first + 1} to {first + len(batch)}: {accepted} of {len(records)} trajectories accepted"
                )
    fix = "delete that file and give the same command again: it samples the file's questions again"
    lines = (record for file in blocks for _, record in read_json_lines(file, fix))
    pairs, report = select_pairs(lines, sampling.keep, len(questions))
    _write(folder / "pairs.jsonl", "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs))
    _write(folder / "report.json", json.dumps(dataclasses.asdict(report), indent=2))
    print(report.text())
    return report


def _is_complete(file: pathlib.Path, block: Collection[int], sampling: SamplingConfig, log: TimedLog) -> bool:
    """Return whether a file has a line for each trajectory of a block. Logs if the file exists and is incomplete."""
    if not file.exists():
        return False
    count, expected = file.read_bytes().count(b"\n"), len(block) * len(sampling.temperatures)
    if count != expected:
        log(f"{file} holds {count} of {expected} trajectories: its questions are sampled again")
    return count == expected


def _write(file: pathlib.Path, text: str) -> None:
    """Write a file atomically. Raises SaveError."""
    with saving(file):
        write_atomically(file, text)


def sample_block(
    teacher: Teacher,
    recipe: Recipe,
    questions: Sequence[Question],
    first: int,
    temperatures: Sequence[float],
    judge: Judge | None = None,
) -> list[dict[str, Any]]:
    """Sample and score trajectories of some questions (Algorithm 1).

    Args:
        teacher: samples the trajectories.
        recipe: scores them and turns them into pairs.
        questions: questions of the block.
        first: number of the first question in the run.
        temperatures: the teacher's temperatures, which the records name.
        judge: judge of answers that do not match the gold answers; None: no judge.

    Returns:
        A record per trajectory, with the reason of its rejection in `fault` ("" if it is accepted).
    """
    trajectories = teacher.sample(questions, first)
    recipe.score(trajectories, ScoringContext(judge=judge))
    records = []
    for index, trajectory in enumerate(trajectories):
        fault = REFUSED if trajectory.ended == REFUSED else recipe.rejection_reason(trajectory)
        records.append(
            {
                "number": trajectory.group,
                "id": trajectory.question.id,
                "question": trajectory.question.text,
                "temperature": temperatures[index % len(temperatures)],
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
    """Select trajectories and return their pairs, in the order of the records, and the report.

    Of several trajectories of a question whose outputs differ only in white space, the first is taken.

    Args:
        records: records of all blocks, as `sample_block` returns them.
        keep: largest number of trajectories per question; 0: all.
        questions: number of sampled questions, for the report.
    """
    pairs: list[dict[str, Any]] = []
    rejected: collections.Counter[str] = collections.Counter()
    sampled: collections.Counter[str] = collections.Counter()
    accepted: collections.Counter[str] = collections.Counter()
    seen: dict[int, set[tuple[str, ...]]] = collections.defaultdict(set)
    taken: collections.Counter[int] = collections.Counter()
    unread = 0
    for record in records:
        number, temperature, fault = record["number"], str(record["temperature"]), record["fault"]
        sampled[temperature] += 1
        unread += record["unread"]
        if not fault:
            outputs = tuple(" ".join(output.split()) for _, output in record["pairs"])
            if outputs in seen[number]:
                fault = "duplicate"
            elif keep and taken[number] == keep:
                fault = "more than are kept of its question"
            seen[number].add(outputs)
        if fault:
            rejected[fault] += 1
            continue
        taken[number] += 1
        accepted[temperature] += 1
        pairs += [
            {"id": record["id"], "step": step, "input": text, "output": output}
            for step, (text, output) in enumerate(record["pairs"], start=1)
        ]
    return pairs, ColdStartReport(
        questions=questions,
        trajectories=sampled.total(),
        kept=accepted.total(),
        answered=len(taken),
        pairs=len(pairs),
        fell=dict(rejected.most_common()),
        by_temperature={name: (accepted[name], count) for name, count in sampled.items()},
        unread=unread,
    )
