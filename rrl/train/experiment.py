"""An RL run from its config: check the config, load models and data, train, and write the report. Read `run` first."""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerBase

from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import save_trajectories
from rrl.errors import UserError
from rrl.files import saving, write_atomically
from rrl.models.decoder import Decoder
from rrl.models.heads import ValueModel
from rrl.models.hf import folder_hash, load_language_model, load_value_model, save_decoder
from rrl.models.lora import add_lora
from rrl.parallel.mesh import data_shards
from rrl.parallel.rules import shard
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import ScoringContext, check_tags, curves_of, uses_chat
from rrl.recipes.card import RecipeCard, make_card, write_card
from rrl.recipes.episodes import find_long_prompts
from rrl.report.article import HELD_OUT, TRAINING, UNUSED
from rrl.report.curves import plot_training
from rrl.report.summary import summary
from rrl.report.trajectories_html import write_html
from rrl.rewards.judge import Judge
from rrl.rewards.reader import Reader
from rrl.rollout.config import RESULT_INVARIANT_FIELDS, EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.datasets import data_fingerprint, load_datasets
from rrl.runs.metrics import read_metrics, refuse_damaged_metrics
from rrl.runs.model_files import MODEL_FILES, write_model_files
from rrl.runs.retriever import encoder_folder
from rrl.runs.saved_trajectories import MAX_PER_SOURCE
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.train.loop import train
from rrl.train.rl_config import MAY_DIFFER, MAY_GROW
from rrl.train.run import Outcome, RunModels, Task
from rrl.train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class TrainComponents:
    """The loaded models and data of a run."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    reader: Reader | None
    task: Task
    judge: Judge | None = None
    value_model: ValueModel | None = None
    """PPO's initial critic: the policy's body, or its first layers, with a new value head that outputs 0."""


def load(settings: TrainSettings, log: TimedLog, workdir: pathlib.Path) -> TrainComponents:
    """Load models, corpus and questions. A large index is stored in `workdir`."""
    mesh, compute = settings.mesh.make(), settings.compute
    device = mesh.devices.flat[0]
    backend = compute.backend(device.platform, settings.train.objective.share_prefixes)
    sizes = "x".join(str(size) for size in mesh.devices.shape)
    log(
        f"{mesh.size} of {len(jax.devices())} devices ({device.device_kind}), mesh data x fsdp x tensor = {sizes}; "
        f"{compute.dtype}, attention by {backend}"
    )
    log(f"policy {settings.policy}")
    decoder, tokenizer = load_language_model(
        settings.policy,
        "policy",
        chat=uses_chat(settings.recipe),
        context=settings.rollout.context,
        dtype=jnp.dtype(compute.dtype),
        param_dtype=jnp.dtype(compute.param_dtype),
        mesh=mesh if mesh.size > 1 else None,
        attention=backend,
        remat=compute.remat,
    )
    value_model = None
    if settings.train.critic is not None:
        value_model = load_value_model(
            settings.policy,
            layers=settings.train.critic.decoder_config(decoder.config).layers,
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.param_dtype),
            mesh=mesh if mesh.size > 1 else None,
            attention=backend,
            remat=compute.remat,
        )
    add_lora(decoder, settings.lora, rngs=nnx.Rngs(settings.train.seed))
    if mesh.size > 1:
        nnx.update(decoder, shard(nnx.state(decoder), mesh))
    reader = None
    if settings.reader:
        log(f"reader {settings.reader}")
        reader_model = load_language_model(
            settings.reader,
            "reader",
            context=settings.reader_rollout.context,
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.dtype),
            mesh=mesh if mesh.size > 1 else None,
        )
        reader = Reader(*reader_model, settings.reader_rollout, mesh=mesh)
    train_data, held_out = load_datasets(
        settings.data, settings.retriever, log, settings.rollout.search_seconds, workdir
    )
    engine = Engine(decoder, tokenizer, settings.rollout, retriever=train_data.retriever, mesh=mesh)
    task = Task(train_data.questions, held_out.questions, held_out.retriever)
    judge = None
    if settings.recipe.needs_judge and settings.judge is not None:
        log(f"judge: {settings.judge.judge.kind}")
        judge = settings.judge.load([*task.train, *task.held_out], compute, mesh)
    return TrainComponents(decoder, tokenizer, engine, reader, task, judge, value_model)


def run(config: Mapping[str, Any], workdir: str | pathlib.Path) -> Outcome:
    """Run the training that a config describes, and write metrics, curves, trajectories, summary and the policy to `workdir`.

    The same config continues a stopped run; a finished run only writes its report again. A run that a signal stopped writes
    everything except `summary.txt`, which marks a finished run. A run that its guard ended reports its last good checkpoint.

    Raises:
        UserError: the config is wrong, or the workdir belongs to another config or is locked by another process.
        SaveError: the workdir cannot be written.
        ServiceUnavailable: a judge or reader does not answer.
    """
    with contextlib.ExitStack() as stack:
        return _run(config, workdir, stack)


def _run(config: Mapping[str, Any], workdir: str | pathlib.Path, stack: contextlib.ExitStack) -> Outcome:
    """The body of `run`. The workdir stays locked until `stack` is closed."""
    log = TimedLog()
    settings = TrainSettings.from_config(config)
    identity = identity_of(settings)
    workdir = pathlib.Path(workdir)
    train_settings = dataclasses.asdict(settings.train) | {"run": identity}
    increased_fields = refuse_other_config(workdir, train_settings, MAY_DIFFER, MAY_GROW)
    if "steps" in increased_fields:
        log(
            "train.steps: {} before, {} now; the run continues after its last step".format(
                *increased_fields["steps"]
            )
        )
    refuse_occupied(workdir)
    refuse_damaged_metrics(workdir)
    enable_compilation_cache()
    loaded = load(settings, log, workdir)
    check_tags(settings.recipe, loaded.tokenizer)
    loaded = dataclasses.replace(loaded, task=_drop_long_questions(settings, loaded, log))

    def before_writing() -> None:
        stack.enter_context(lock_workdir(workdir))
        if increased_fields:  # e.g. more steps: the run is no longer finished
            (workdir / "summary.txt").unlink(missing_ok=True)
        with saving(workdir / MODEL_FILES):
            write_model_files(
                workdir, loaded.decoder.config, loaded.tokenizer, _card(settings), settings.policy
            )

    if settings.note:
        log(settings.note)
    log(
        "programs that XLA compiles at their first use (later runs load the update from the compilation cache): "
        f"{describe_programs(settings)}"
    )
    outcome = train(
        settings.train,
        settings.recipe,
        loaded.task,
        RunModels(
            loaded.engine,
            loaded.decoder,
            loaded.value_model,
            ScoringContext(loaded.reader.answers if loaded.reader else None, loaded.judge),
        ),
        workdir,
        identity=identity,
        before_writing=before_writing,
    )
    # A run that was stopped before its first update has nothing to report.
    if outcome.step or outcome.stopped != "signal":
        report(settings, loaded, outcome, workdir, log)
    if outcome.stopped == "signal":
        log(f"stopped after step {outcome.step} of {settings.train.steps}; the same command continues")
    return outcome


def _drop_long_questions(settings: TrainSettings, loaded: TrainComponents, log: TimedLog) -> Task:
    """Return the task without the training questions that do not fit the context, since nothing can be learned from them.

    Held-out questions that do not fit stay and count as wrong.

    Raises:
        UserError: no training question fits.
    """
    task = loaded.task
    questions = [*task.train, *task.held_out]
    long = find_long_prompts(loaded.engine, settings.recipe, questions, settings.data.on_error, log)
    train = [question for index, question in enumerate(task.train) if index not in long]
    if len(train) < len(task.train):
        log(
            f"{len(task.train) - len(train)} of {len(task.train)} training questions do not fit the context and are left out"
        )
    if not train:
        raise UserError(
            f"none of the {len(task.train)} training questions fits rollout.context={settings.rollout.context}; raise it"
        )
    return dataclasses.replace(task, train=train) if long else task


def describe_programs(settings: TrainSettings) -> str:
    """Describe the programs that a run compiles, each with the shape of its batch. Nothing else is compiled."""
    objective, shards = settings.train.objective, data_shards(settings.mesh.make())
    update = ", ".join(
        f"{objective.rows_per_microbatch(length, shards)} x {length}" for length in objective.row_lengths
    )

    def engine(name: str, config: EngineConfig) -> str:
        return f"{name} of {config.rows} rows x {config.context} tokens"

    reader = f"; {engine('the reader', settings.reader_rollout)}" if settings.reader else ""
    judge_settings = settings.judge if settings.recipe.needs_judge else None
    judge = (
        f"; {engine('the judge', judge_settings.rollout)}"
        if judge_settings and judge_settings.judge.kind == "model"
        else ""
    )
    return f"{engine('rollout', settings.rollout)}{reader}{judge}; update of {update}"


def identity_of(settings: TrainSettings) -> dict[str, Any]:
    """Return what identifies a run besides `RLConfig`: models and data by content (not by path), and other settings."""
    encoder = encoder_folder(settings.retriever)
    identity = {
        "name": settings.name,
        "policy": folder_hash(settings.policy),
        "reader": settings.reader and folder_hash(settings.reader),
        "data": dataclasses.asdict(settings.data),
        "retriever": settings.retriever.identity() | {"encoder": encoder and folder_hash(encoder)},
        "rollout": _result_fields(settings.rollout),
        "reader_rollout": _result_fields(settings.reader_rollout),
        "lora": dataclasses.asdict(settings.lora),
        "compute": {name: getattr(settings.compute, name) for name in ("dtype", "param_dtype")},
        "recipe": dataclasses.asdict(settings.recipe),  # type: ignore[call-overload]
    }
    if settings.recipe.needs_judge and settings.judge is not None:
        identity["judge"] = settings.judge.identity()
    if settings.data.path != "miniwiki":
        identity["data"] |= data_fingerprint(settings.data.path)
    return identity


def _result_fields(rollout: EngineConfig) -> dict[str, Any]:
    """Return the fields of an engine's settings that affect its results."""
    return {
        name: value
        for name, value in dataclasses.asdict(rollout).items()
        if name not in RESULT_INVARIANT_FIELDS
    }


def report(
    settings: TrainSettings, loaded: TrainComponents, outcome: Outcome, workdir: pathlib.Path, log: TimedLog
) -> None:
    """Write policy, curves, trajectories and, for a finished run, the summary; print the summary.

    All processes take part in writing the policy, which is sharded over them; the first process does the rest.
    """
    with saving(workdir / "policy"):
        save_decoder(workdir / "policy", loaded.decoder, loaded.tokenizer)
    if jax.process_index() != 0:
        return
    with saving(workdir / "policy"):
        write_card(workdir / "policy", _card(settings))
    metrics_lines = read_metrics(workdir / "metrics.jsonl")
    with saving(workdir / "curves.png"):
        plot_training(
            metrics_lines,
            workdir / "curves.png",
            f"Training of {settings.name}",
            settings.train.eval_temperature,
            curves_of(settings.recipe),
        )
    on_page = page_trajectories(outcome)
    if outcome.eval_trajectories:
        with saving(workdir / "trajectories.jsonl"):
            save_trajectories(workdir / "trajectories.jsonl", outcome.eval_trajectories)
    if on_page:
        with saving(workdir / "trajectories.html"):
            write_html(
                [trajectory for trajectory, _ in on_page],
                workdir / "trajectories.html",
                title=f"{settings.name}: step {outcome.step}",
                tags=settings.recipe.tags,
                token_bytes=loaded.engine.bytes,
                sources=[source for _, source in on_page],
            )
    facts = {
        "steps": f"{outcome.step} of {settings.train.steps} "
        f"({outcome.stopped}{outcome.guard_message and f': {outcome.guard_message}'})",
        "minutes": f"{outcome.seconds / 60:.1f} of training, {(time.perf_counter() - log.began) / 60:.1f} of this command",
        "policy": f"{settings.policy} (sha256 {folder_hash(settings.policy)[:12]})",
        "retriever": f"{settings.retriever.index or settings.retriever.kind}, top {settings.rollout.top_k}",
        "seed": settings.train.seed,
        "versions": ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax")),
        "command": shlex.join(["python", *sys.argv]),
    }
    outputs = [workdir / name for name in ("curves.png", "trajectories.html", "metrics.jsonl", "policy")]
    files = [str(file) for file in outputs if file.exists()]
    text = summary(
        outcome.start_metrics,
        outcome.final_metrics,
        facts=facts,
        reference=settings.reference,
        temperature=settings.train.eval_temperature,
        files=files,
        questions=len(loaded.task.held_out),
        note=settings.note,
    )
    if outcome.stopped != "signal":
        with saving(workdir / "summary.txt"):
            write_atomically(workdir / "summary.txt", text + "\n")
    print(text)


def _card(settings: TrainSettings) -> RecipeCard:
    """Return the recipe card, which records for later evaluation how the policy was trained."""
    return make_card(settings.recipe, settings.rollout.context, settings.rollout.top_k)


def page_trajectories(outcome: Outcome) -> list[tuple[Trajectory, str]]:
    """Return the trajectories of trajectories.html, each with its source: held-out ones, then the last training step's."""
    held_out = [(trajectory, HELD_OUT) for trajectory in outcome.eval_trajectories]
    trained = [
        (trajectory, UNUSED if left_out else TRAINING)
        for trajectory, left_out in zip(outcome.last_trajectories, outcome.left_out, strict=True)
    ]
    return held_out[:MAX_PER_SOURCE] + trained[:MAX_PER_SOURCE]
