"""A run from its config: load, train, and leave behind what a person will look at."""

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
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerBase

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, refuse_unknown_fields
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import save_trajectories
from rrl.errors import UserError
from rrl.files import saving, write_atomically
from rrl.models.decoder import Decoder
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.heads import ValueModel
from rrl.models.hf import folder_hash, load_language_model, load_value_model, save_decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.models.weights import require_folder
from rrl.parallel.mesh import data_shards
from rrl.parallel.rules import shard
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe, RequiresGroups, ScoringContext, check_tags, curves_of, uses_chat
from rrl.recipes.card import RecipeCard, make_card, require_policy, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.episodes import find_long_prompts
from rrl.report.article import HELD_OUT, TRAINING, UNUSED
from rrl.report.curves import plot_training
from rrl.report.summary import summary
from rrl.report.trajectories_html import write_html
from rrl.rewards.judge import Judge
from rrl.rewards.judge_settings import SECTIONS as JUDGE
from rrl.rewards.judge_settings import JudgeSettings
from rrl.rewards.reader import Reader
from rrl.rl.advantages import GROUP_RELATIVE
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.rollout.config import RESULT_INVARIANT_FIELDS, EngineConfig
from rrl.rollout.engine import Engine
from rrl.runs.datasets import DataConfig, RetrieverConfig, data_fingerprint, encoder_folder, load_datasets
from rrl.runs.metrics import read_metrics, refuse_damaged_metrics
from rrl.runs.model_files import MODEL_FILES, write_model_files
from rrl.runs.saved_trajectories import MAX_PER_SOURCE
from rrl.runs.timed_log import TimedLog
from rrl.runs.workdir import lock_workdir, refuse_locked, refuse_other_config
from rrl.train.guard import GuardConfig
from rrl.train.loop import Outcome, Task, train
from rrl.train.rl_config import MAY_DIFFER, MAY_GROW, RLConfig

SECTIONS = {
    "train": RLConfig,
    "optim": OptimConfig,
    "objective": ObjectiveConfig,
    "rollout": EngineConfig,
    "reader_rollout": EngineConfig,
    "data": DataConfig,
    "retriever": RetrieverConfig,
    "lora": LoraConfig,
    "mesh": MeshConfig,
    "compute": ComputeConfig,
    "guard": GuardConfig,
}
"""The dataclass behind each section of a config, but for `recipe`."""
CRITIC_SECTIONS = {"critic": CriticConfig, "critic_optim": OptimConfig}
"""The same of the sections that make it PPO."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """A config of this form (see configs/rsearch_grpo.py) with every field there is, so that each can be overridden."""
    rename_config(config)
    critic = CRITIC_SECTIONS if "critic" in config else {}
    judge = JUDGE if any(name in config for name in JUDGE) else {}
    for name in judge:
        if name not in config:
            config[name] = ConfigDict()
    for name, kind in {**SECTIONS, **critic, **judge}.items():
        fill_defaults(config[name], kind)
    recipe = make_recipe(config.recipe.name)
    fill_defaults(config.recipe, type(recipe))
    fill_defaults(config.recipe.environment, type(recipe.environment))
    return config


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """A config, checked and typed."""

    name: str
    policy: str
    reader: str
    train: RLConfig
    rollout: EngineConfig
    data: DataConfig
    retriever: RetrieverConfig
    recipe: Recipe
    reader_rollout: EngineConfig
    lora: LoraConfig
    mesh: MeshConfig
    compute: ComputeConfig
    judge: JudgeSettings | None = None
    """What the recipe's rewards ask, where they ask a judge."""
    reference: tuple[str, float] | None = None
    """What the result is printed beside, and its exact match."""
    note: str = ""
    """What else a reader of the result must know: it stands in the log and below the table."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TrainSettings":
        """Checks a config (see configs/rsearch_grpo.py for its form) and that its folders are there; loads nothing yet."""
        settings = cls.parse(config)
        if not settings.name:
            raise UserError("name='' names no run; give a name, from which comes its folder")
        require_policy(settings.policy)
        if settings.reader:
            require_folder("reader", settings.reader)
        if settings.judge is not None:
            settings.judge.check()
        encoder_folder(settings.retriever)
        settings.retriever.identity()  # its index, where it has one
        path = settings.data.path
        if path != "miniwiki" and not (path and pathlib.Path(path).is_dir()):
            raise UserError(f"data={path!r} is no folder; give one, or miniwiki for the built-in world")
        return dataclasses.replace(settings, compute=settings.compute.for_platform(jax.default_backend()))

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "TrainSettings":
        """Checks a config's fields alone."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        refuse_unknown_fields(
            [*SECTIONS, *CRITIC_SECTIONS, *JUDGE, "recipe", "name", "policy", "reader", "reference", "note"],
            values,
            "config",
        )
        steps = values["train"]["steps"]
        objective = build(ObjectiveConfig, values["objective"], "objective")
        critic = _critic_config(values, steps)
        waits = critic.warmup_steps if critic else 0
        total = max(steps - waits, 1) * objective.optimizer_steps
        optim = build(OptimConfig, values["optim"], "optim", total_steps=total)
        recipe_values = dict(values["recipe"])
        name, environment = recipe_values.pop("name"), recipe_values.pop("environment", {})
        rollout = build(EngineConfig, values["rollout"], "rollout")
        if objective.row_lengths[-1] < rollout.context:
            raise UserError(
                f"objective.row_lengths={objective.row_lengths} must reach rollout.context={rollout.context}: add it as the last"
            )
        recipe = make_recipe(name, recipe_values, environment)
        usual, asked = (getattr(made, "advantage", None) for made in (make_recipe(name), recipe))
        if critic is not None and asked != usual:
            raise UserError(
                f"recipe.advantage={asked!r} has no part in a run with a critic, which gives the advantages: leave it at "
                f"{usual!r}, or take the config's critic out"
            )
        if critic is None and steps and values["train"].get("samples") == 1 and asked in GROUP_RELATIVE:
            raise UserError(
                f"recipe.advantage={asked!r} compares the samples of a question, of which train.samples=1 gives one: nothing "
                "would be learned from. Raise it, or take reinforce_plus_plus or reward, which compare questions"
            )
        if steps and isinstance(recipe, RequiresGroups):
            recipe.check_samples(values["train"].get("samples", RLConfig.samples))
        judge = JudgeSettings.parse(values) if any(section in values for section in JUDGE) else None
        if recipe.needs_judge and judge is None:
            raise UserError(
                f"recipe.name={name!r} asks a judge for its rewards; give the section judge, with a kind of oracle, model "
                "or endpoint"
            )
        return cls(
            name=values["name"],
            policy=values["policy"],
            reader=values["reader"],
            train=build(
                RLConfig,
                values["train"],
                "train",
                optim=optim,
                objective=objective,
                critic=critic,
                guard=build(GuardConfig, values["guard"], "guard"),
            ),
            rollout=rollout,
            data=build(DataConfig, values["data"], "data"),
            retriever=build(RetrieverConfig, values["retriever"], "retriever"),
            recipe=recipe,
            reader_rollout=build(EngineConfig, values["reader_rollout"], "reader_rollout"),
            lora=build(LoraConfig, values["lora"], "lora"),
            mesh=build(MeshConfig, values["mesh"], "mesh"),
            compute=build(ComputeConfig, values["compute"], "compute"),
            judge=judge,
            reference=values.get("reference"),
            note=values.get("note", ""),
        )


def _critic_config(values: Mapping[str, Any], steps: int) -> CriticConfig | None:
    """PPO's critic, where the config has its sections."""
    if not any(name in values for name in CRITIC_SECTIONS):
        return None
    sections = {name: values.get(name, {}) for name in CRITIC_SECTIONS}
    config = build(CriticConfig, sections["critic"], "critic", optim=OptimConfig())
    total = max(steps, 1) * config.optimizer_steps
    optim = build(OptimConfig, sections["critic_optim"], "critic_optim", total_steps=total)
    return dataclasses.replace(config, optim=optim)


@dataclasses.dataclass(frozen=True)
class TrainComponents:
    """Everything a run needs in memory."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    reader: Reader | None
    task: Task
    judge: Judge | None = None
    value_model: ValueModel | None = None
    """Where PPO's critic starts: the policy's body, or its first layers, with a new output that says 0."""


def load(settings: TrainSettings, say: TimedLog, workdir: pathlib.Path) -> TrainComponents:
    """Loads models, corpus and questions; `workdir` stores a large index."""
    mesh, compute = settings.mesh.make(), settings.compute
    device = mesh.devices.flat[0]
    backend = compute.backend(device.platform, settings.train.objective.share_prefixes)
    sizes = "x".join(str(size) for size in mesh.devices.shape)
    say(
        f"{mesh.size} of {len(jax.devices())} devices ({device.device_kind}), mesh data x fsdp x tensor = {sizes}; "
        f"{compute.dtype}, attention by {backend}"
    )
    say(f"policy {settings.policy}")
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
            layers=settings.train.critic.body(decoder.config).layers,
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
        say(f"reader {settings.reader}")
        frozen = load_language_model(
            settings.reader,
            "reader",
            context=settings.reader_rollout.context,
            dtype=jnp.dtype(compute.dtype),
            param_dtype=jnp.dtype(compute.dtype),
            mesh=mesh if mesh.size > 1 else None,
        )
        reader = Reader(*frozen, settings.reader_rollout, mesh=mesh)
    train_side, held_out = load_datasets(
        settings.data, settings.retriever, say, settings.rollout.search_seconds, workdir
    )
    engine = Engine(decoder, tokenizer, settings.rollout, retriever=train_side.retriever, mesh=mesh)
    task = Task(train_side.questions, held_out.questions, held_out.retriever)
    judge = None
    if settings.recipe.needs_judge and settings.judge is not None:
        say(f"judge: {settings.judge.judge.kind}")
        judge = settings.judge.load([*task.train, *task.held_out], compute, mesh)
    return TrainComponents(decoder, tokenizer, engine, reader, task, judge, value_model)


def run(config: Mapping[str, Any], workdir: str | pathlib.Path) -> Outcome:
    """Trains as the config says and writes metrics, curves, trajectories, summary and the policy to `workdir`.

    Running it again with the same config continues; a finished run only reports again. A run that a signal stopped
    writes everything but `summary.txt`, the mark of a finished one; one that its guard ended reports its last good checkpoint.

    Raises UserError for a wrong config and for a workdir of another one, or that another process holds; SaveError where the
    workdir cannot be written; Unavailable as `train`.
    """
    with contextlib.ExitStack() as stack:
        return _run(config, workdir, stack)


def _run(config: Mapping[str, Any], workdir: str | pathlib.Path, stack: contextlib.ExitStack) -> Outcome:
    """As `run`; the workdir is held until `stack` is closed."""
    say = TimedLog()
    settings = TrainSettings.from_config(config)
    identity = identity_of(settings)
    workdir = pathlib.Path(workdir)
    train_settings = dataclasses.asdict(settings.train) | {"run": identity}
    grown = refuse_other_config(workdir, train_settings, MAY_DIFFER, MAY_GROW)
    if "steps" in grown:
        say("train.steps: {} before, {} now; the run goes on from where it was".format(*grown["steps"]))
    refuse_locked(workdir)
    refuse_damaged_metrics(workdir)
    enable_compilation_cache()
    loaded = load(settings, say, workdir)
    check_tags(settings.recipe, loaded.tokenizer)
    loaded = dataclasses.replace(loaded, task=_drop_long_questions(settings, loaded, say))

    def ready() -> None:
        stack.enter_context(lock_workdir(workdir))
        if grown:  # it is not finished any more
            (workdir / "summary.txt").unlink(missing_ok=True)
        with saving(workdir / MODEL_FILES):
            write_model_files(
                workdir, loaded.decoder.config, loaded.tokenizer, _card(settings), settings.policy
            )

    if settings.note:
        say(settings.note)
    say(f"compiling on first use (the update stays in the compilation cache): {describe_programs(settings)}")
    outcome = train(
        settings.train,
        settings.recipe,
        loaded.task,
        loaded.engine,
        loaded.decoder,
        workdir,
        scoring=ScoringContext(loaded.reader.answers if loaded.reader else None, loaded.judge),
        identity=identity,
        value_model=loaded.value_model,
        ready=ready,
    )
    # Stopped before the first update, there is nothing to report.
    if outcome.step or outcome.stopped != "signal":
        report(settings, loaded, outcome, workdir, say)
    if outcome.stopped == "signal":
        say(f"stopped after step {outcome.step} of {settings.train.steps}; the same command continues")
    return outcome


def _drop_long_questions(settings: TrainSettings, loaded: TrainComponents, say: TimedLog) -> Task:
    """The task without training questions that do not fit the context: nothing can be learned from them. Held-out ones stay and
    count as wrong."""
    task = loaded.task
    questions = [*task.train, *task.held_out]
    long = find_long_prompts(loaded.engine, settings.recipe, questions, settings.data.on_error, say)
    train = [question for place, question in enumerate(task.train) if place not in long]
    if len(train) < len(task.train):
        say(
            f"left out: {len(task.train) - len(train)} of {len(task.train)} training questions, for that reason"
        )
    if not train:
        raise UserError(
            f"none of the {len(task.train)} training questions fits rollout.context={settings.rollout.context}; raise it"
        )
    return dataclasses.replace(task, train=train) if long else task


def describe_programs(settings: TrainSettings) -> str:
    """The programs of a run and their sizes, in words: nothing else is compiled after they have been met once."""
    objective, shards = settings.train.objective, data_shards(settings.mesh.make())
    update = ", ".join(
        f"{objective.rows_per_microbatch(length, shards)} x {length}" for length in objective.row_lengths
    )

    def loop(name: str, sizes: EngineConfig) -> str:
        return f"{name} of {sizes.rows} rows x {sizes.context} tokens"

    reader = f"; {loop('the reader', settings.reader_rollout)}" if settings.reader else ""
    asked = settings.judge if settings.recipe.needs_judge else None
    judge = f"; {loop('the judge', asked.rollout)}" if asked and asked.judge.kind == "model" else ""
    return f"{loop('rollout', settings.rollout)}{reader}{judge}; update of {update}"


def identity_of(settings: TrainSettings) -> dict[str, Any]:
    """What makes a run this run, apart from its training settings: models and data by content, not by path."""
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
    """What of an engine's settings its numbers depend on."""
    return {
        name: value
        for name, value in dataclasses.asdict(rollout).items()
        if name not in RESULT_INVARIANT_FIELDS
    }


def report(
    settings: TrainSettings, loaded: TrainComponents, outcome: Outcome, workdir: pathlib.Path, say: TimedLog
) -> None:
    """Writes the policy, curves, trajectories and (of a finished run) the summary, and prints the last.

    All processes hold parts of the policy; the rest is the first one's work.
    """
    with saving(workdir / "policy"):
        save_decoder(workdir / "policy", loaded.decoder, loaded.tokenizer)
    if jax.process_index() != 0:
        return
    with saving(workdir / "policy"):
        write_card(workdir / "policy", _card(settings))
    rows = read_metrics(workdir / "metrics.jsonl")
    with saving(workdir / "curves.png"):
        plot_training(
            rows,
            workdir / "curves.png",
            f"Training of {settings.name}",
            settings.train.eval_temperature,
            curves_of(settings.recipe),
        )
    shown = page_trajectories(outcome)
    if outcome.eval_trajectories:
        with saving(workdir / "trajectories.jsonl"):
            save_trajectories(workdir / "trajectories.jsonl", outcome.eval_trajectories)
    if shown:
        with saving(workdir / "trajectories.html"):
            write_html(
                [trajectory for trajectory, _ in shown],
                workdir / "trajectories.html",
                title=f"{settings.name}: step {outcome.step}",
                tags=settings.recipe.tags,
                token_bytes=loaded.engine.bytes,
                sources=[source for _, source in shown],
            )
    facts = {
        "steps": f"{outcome.step} of {settings.train.steps} "
        f"({outcome.stopped}{outcome.guard_message and f': {outcome.guard_message}'})",
        "minutes": f"{outcome.seconds / 60:.1f} of training, {(time.perf_counter() - say.began) / 60:.1f} of this command",
        "policy": f"{settings.policy} (sha256 {folder_hash(settings.policy)[:12]})",
        "retriever": f"{settings.retriever.index or settings.retriever.kind}, top {settings.rollout.top_k}",
        "seed": settings.train.seed,
        "versions": ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax")),
        "command": shlex.join(["python", *sys.argv]),
    }
    written = [workdir / name for name in ("curves.png", "trajectories.html", "metrics.jsonl", "policy")]
    files = [str(file) for file in written if file.exists()]
    text = summary(
        outcome.start_metrics,
        outcome.final_metrics,
        run=facts,
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
    return make_card(settings.recipe, settings.rollout.context, settings.rollout.top_k)


def page_trajectories(outcome: Outcome) -> list[tuple[Trajectory, str]]:
    """What the page shows, with where it came from: held-out trajectories, then those of the last training step."""
    held_out = [(trajectory, HELD_OUT) for trajectory in outcome.eval_trajectories]
    trained = [
        (t, UNUSED if idle else TRAINING)
        for t, idle in zip(outcome.last_trajectories, outcome.left_out, strict=True)
    ]
    return held_out[:MAX_PER_SOURCE] + trained[:MAX_PER_SOURCE]
