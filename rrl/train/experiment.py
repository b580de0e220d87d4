"""An RL run from its config: check the config, load models and data, train, and write the report. Read `run` first."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError
from rrl.files import saving
from rrl.models.hf import folder_hash
from rrl.parallel.mesh import data_shards
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import ScoringContext, check_tags
from rrl.recipes.episodes import find_long_prompts
from rrl.rollout.config import RESULT_INVARIANT_FIELDS, EngineConfig
from rrl.runs.datasets import data_fingerprint
from rrl.runs.metrics import refuse_damaged_metrics
from rrl.runs.model_files import MODEL_FILES, write_model_files
from rrl.runs.retriever import encoder_folder
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.setup.rl_config import MAY_DIFFER, MAY_GROW
from rrl.setup.settings import TrainSettings
from rrl.train.components import TrainComponents, load_components
from rrl.train.final_report import recipe_card, write_report
from rrl.train.loop import train
from rrl.train.task import Outcome, RunModels, Task


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
    loaded = load_components(settings, log, workdir)
    check_tags(settings.recipe, loaded.tokenizer)
    loaded = dataclasses.replace(loaded, task=_drop_long_questions(settings, loaded, log))

    def before_writing() -> None:
        stack.enter_context(lock_workdir(workdir))
        if increased_fields:  # e.g. more steps: the run is no longer finished
            (workdir / "summary.txt").unlink(missing_ok=True)
        with saving(workdir / MODEL_FILES):
            write_model_files(
                workdir,
                loaded.decoder.config,
                loaded.tokenizer,
                recipe_card(settings),
                settings.policy,
                identity["policy"],
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
        _run_models(settings, loaded),
        workdir,
        identity=identity,
        before_writing=before_writing,
    )
    # A run that was stopped before its first update has nothing to report.
    if outcome.step or outcome.stopped != "signal":
        write_report(settings, loaded, outcome, workdir, log)
    if outcome.stopped == "signal":
        log(f"stopped after step {outcome.step} of {settings.train.steps}; the same command continues")
    return outcome


def _run_models(settings: TrainSettings, loaded: TrainComponents) -> RunModels:
    """Return the models that the training loop uses, with what scores a trajectory."""
    answers = loaded.reader.answers if loaded.reader else None
    scoring = ScoringContext(answers, loaded.judge, settings.rewards.load())
    return RunModels(loaded.engine, loaded.decoder, loaded.value_model, scoring)


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
    """Describe the largest programs that a run compiles, each with the shape of its batch."""
    objective, shards = settings.train.objective, data_shards(settings.mesh.make())
    update = ", ".join(
        f"{objective.rows_per_microbatch(length, shards)} rows x {length} tokens"
        for length in objective.row_lengths
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
    identity: dict[str, Any] = {
        "name": settings.name,
        "policy": folder_hash(settings.policy),
        "reader": settings.reader and folder_hash(settings.reader),
        "data": dataclasses.asdict(settings.data),
        "retriever": settings.retriever.identity() | {"encoder": encoder and folder_hash(encoder)},
        "rollout": _result_fields(settings.rollout),
        "reader_rollout": _result_fields(settings.reader_rollout),
        "lora": dataclasses.asdict(settings.lora),
        "compute": {name: getattr(settings.compute, name) for name in ("dtype", "param_dtype")},
        "recipe": dataclasses.asdict(settings.recipe),
    }
    if settings.recipe.needs_judge and settings.judge is not None:
        identity["judge"] = settings.judge.identity()
    if settings.rewards.functions:
        identity["rewards"] = dataclasses.asdict(settings.rewards)
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
