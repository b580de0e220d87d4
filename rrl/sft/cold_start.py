"""Demonstrations for a cold start by rejection sampling (R3-RAG, 3.2.1): a teacher's correct and well-formed trajectories.

Algorithm 1 samples trajectories (`sample_block`). Algorithm 2 turns the accepted ones into (input, output) pairs. Trajectories
are written in blocks of questions, so that a killed run continues after its last complete block. Read `run` first.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY
from rrl.files import read_json_lines, saving, write_atomically
from rrl.models.hf import load_language_model
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe, ScoringContext, check_tags, uses_chat
from rrl.recipes.episodes import find_long_prompts
from rrl.rewards.judge import Judge
from rrl.rollout.engine import Engine
from rrl.rollout.memory import require_inference_memory
from rrl.runs.datasets import SearchDataset, load_datasets
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.sft.cold_start_pairs import ColdStartReport, select_pairs
from rrl.sft.cold_start_settings import ColdStartSettings
from rrl.sft.teacher import REFUSED, EndpointTeacher, PolicyTeacher, Teacher
from rrl.stopping import ServiceUnavailable, stop_requested

FOLDERS = ("blocks", "indexes")
"""Folders that a run creates in its workdir."""
FILES = ("pairs.jsonl", "report.json")
"""Files that a run creates in its workdir, besides config.json."""


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
    sampling = settings.sampling
    with lock_workdir(folder):
        data, _ = load_datasets(
            settings.data, settings.retriever, log, settings.rollout.search_seconds, folder
        )
        data = dataclasses.replace(data, questions=data.questions[: sampling.questions or None])
        blocks = {
            folder / "blocks" / f"{first:08d}.jsonl": data.questions[first : first + sampling.block]
            for first in range(0, len(data.questions), sampling.block)
        }
        missing = {
            file: questions
            for file, questions in blocks.items()
            if not _is_complete(file, len(questions) * len(sampling.temperatures), log)
        }
        models = load_models(settings, data, log) if missing else None
        # Written only now: if the models cannot be loaded, the user can change the config and use the same workdir.
        _write(folder / "config.json", json.dumps(identity, indent=2, sort_keys=True))
        if models is not None:
            with saving(folder / "blocks"):
                (folder / "blocks").mkdir(exist_ok=True)
            if not _sample_blocks(settings, *models, missing, log):
                log("stopped; the same command continues")
                return None
        fix = "delete that file and give the same command again: it samples the file's questions again"
        records = (record for file in blocks for _, record in read_json_lines(file, fix))
        pairs, report = select_pairs(records, sampling.keep, len(data.questions))
        _write(folder / "pairs.jsonl", "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs))
        _write(folder / "report.json", json.dumps(dataclasses.asdict(report), indent=2))
    print(report.text())
    return report


def load_models(
    settings: ColdStartSettings, data: SearchDataset, log: TimedLog
) -> tuple[Teacher, Judge | None]:
    """Load the teacher, and the judge if there is one."""
    mesh = settings.mesh.make()
    temperatures, seed = settings.sampling.temperatures, settings.sampling.seed
    teacher: Teacher
    if settings.endpoint is not None:
        log(f"teacher {settings.endpoint.model} at {settings.endpoint.url}")
        teacher = EndpointTeacher(
            settings.endpoint, settings.recipe, data.retriever, settings.rollout.top_k, temperatures, seed
        )
    else:
        log(f"teacher {settings.model}")
        dtype = jnp.dtype(settings.compute.dtype)
        require_inference_memory({"model": (settings.model, settings.rollout)}, mesh, dtype)
        decoder, tokenizer = load_language_model(
            settings.model,
            "model",
            chat=uses_chat(settings.recipe),
            context=settings.rollout.context,
            dtype=dtype,
            param_dtype=dtype,
            mesh=mesh if mesh.size > 1 else None,
        )
        engine = Engine(decoder, tokenizer, settings.rollout, retriever=data.retriever, mesh=mesh)
        check_tags(settings.recipe, tokenizer)
        find_long_prompts(engine, settings.recipe, data.questions, settings.data.on_error, log)
        teacher = PolicyTeacher(engine, nnx.state(decoder), settings.recipe, temperatures, seed)
    judge = None if settings.judge is None else settings.judge.load(data.questions, settings.compute, mesh)
    return teacher, judge


def _sample_blocks(
    settings: ColdStartSettings,
    teacher: Teacher,
    judge: Judge | None,
    blocks: Mapping[pathlib.Path, Sequence[Question]],
    log: TimedLog,
) -> bool:
    """Sample the questions of each block and write their records to its file; return False if a signal stopped it."""
    temperatures = settings.sampling.temperatures
    with stop_requested() as stop:
        for file, questions in blocks.items():
            if stop:
                return False
            first = int(file.stem)
            try:
                records = sample_block(teacher, settings.recipe, questions, first, temperatures, judge)
            except ServiceUnavailable:
                if not stop:
                    raise
                return False
            _write(file, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
            accepted = sum(not record["fault"] for record in records)
            log(
                f"questions {first + 1} to {first + len(questions)}: {accepted} of {len(records)} trajectories accepted"
            )
    return True


def _is_complete(file: pathlib.Path, expected: int, log: TimedLog) -> bool:
    """Return whether a file has `expected` lines, one for each trajectory. Logs if the file exists and is incomplete."""
    if not file.exists():
        return False
    count = file.read_bytes().count(b"\n")
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
        first: index of `questions[0]` among all questions of the run.
        temperatures: the teacher's temperatures. Each record states the one of its trajectory.
        judge: judge of answers that do not match the gold answers; None: no judge.

    Returns:
        A record per trajectory, with the reason of its rejection in `fault` ("" if it is accepted).
    """
    trajectories = teacher.sample(questions, first)
    recipe.score(trajectories, ScoringContext(judge=judge))
    records = []
    for index, trajectory in enumerate(trajectories):
        reason = REFUSED if trajectory.ended == REFUSED else recipe.rejection_reason(trajectory)
        records.append(
            {
                "number": trajectory.group,
                "id": trajectory.question.id,
                "question": trajectory.question.text,
                "temperature": temperatures[index % len(temperatures)],
                "fault": reason,
                "unread": int(trajectory.metrics.get("judge_unread", 0)),
                "ended": trajectory.ended,
                "answer": trajectory.answer,
                "said": [text for role, text in trajectory.segments if role == POLICY],
                "pairs": [] if reason else recipe.sft_pairs(trajectory),
            }
        )
    return records
