"""A run from its config: load, train, and leave behind what a person will look at."""

import dataclasses
import importlib.metadata
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from transformers import PreTrainedTokenizerBase

from rrl.data.tokenizer import load_tokenizer
from rrl.errors import UserError
from rrl.eval.curves import plot_training
from rrl.eval.summary import summary
from rrl.eval.trajectories_html import write_html
from rrl.models.decoder import Decoder
from rrl.models.hf import folder_hash, load_decoder, save_decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.runtime import enable_compilation_cache
from rrl.recipes.base import Recipe
from rrl.recipes.card import card_of, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.rewards.reader import Reader
from rrl.rl.optim import OptimConfig
from rrl.rollout.engine import Engine, EngineConfig
from rrl.train.checkpoints import refuse_other_config
from rrl.train.metrics import read_metrics
from rrl.train.rl import MAY_DIFFER, Outcome, RLConfig, Task, train
from rrl.train.tasks import DataConfig, RetrieverConfig, load_corpora
from rrl.train.update import ObjectiveConfig

Fields = TypeVar("Fields")
SHOWN = 60
"""Trajectories on the page."""


def build(kind: type[Fields], values: Mapping[str, Any], where: str, **more: Any) -> Fields:
    """A frozen dataclass from config values; UserError names a field that it does not have."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise UserError(
                f"{where}.{name} is unknown; the fields of {where} are {', '.join(sorted(known))}"
            )
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        return kind(**plain, **more)
    except TypeError as error:
        raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Settings:
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
    reference: tuple[str, float] | None = None
    """What the result is printed beside, and its exact match."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Settings":
        """Checks a config (see configs/rsearch_grpo.py for its form); nothing is loaded yet."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        steps = values["train"]["steps"]
        optim = build(OptimConfig, values["optim"], "optim", total_steps=max(steps, 1))
        objective = build(ObjectiveConfig, values["objective"], "objective")
        recipe_values = dict(values["recipe"])
        name, environment = recipe_values.pop("name"), recipe_values.pop("environment", {})
        rollout = build(EngineConfig, values["rollout"], "rollout")
        if objective.lengths[-1] < rollout.context:
            raise UserError(
                f"objective.lengths={objective.lengths} must reach rollout.context={rollout.context}: add it as the last"
            )
        settings = cls(
            name=values["name"],
            policy=values["policy"],
            reader=values["reader"],
            train=build(RLConfig, values["train"], "train", optim=optim, objective=objective),
            rollout=rollout,
            data=build(DataConfig, values["data"], "data"),
            retriever=build(RetrieverConfig, values["retriever"], "retriever"),
            recipe=make_recipe(name, recipe_values, environment),
            reader_rollout=build(EngineConfig, values["reader_rollout"], "reader_rollout"),
            reference=values.get("reference"),
        )
        for field, folder in (("policy", settings.policy), ("reader", settings.reader)):
            if folder and not pathlib.Path(folder, "config.json").is_file():
                raise UserError(
                    f"{field}={folder!r} is no Hugging Face folder (no config.json there); give one that is"
                )
        if settings.data.path != "miniwiki" and not pathlib.Path(settings.data.path).is_dir():
            raise UserError(
                f"data={settings.data.path!r} is no folder; give one, or miniwiki for the built-in world"
            )
        return settings


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Everything a run needs in memory."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    reader: Reader | None
    task: Task


class Clock:
    """Says what is happening, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)


def load(settings: Settings, say: Clock) -> Loaded:
    """Loads models, corpus and questions."""
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    say(f"policy {settings.policy}")
    tokenizer = load_tokenizer(settings.policy)
    decoder = load_decoder(settings.policy)
    train_side, held_out = load_corpora(settings.data, settings.retriever, say)
    reader = None
    if settings.reader:
        say(f"reader {settings.reader}")
        reader = Reader(
            load_decoder(settings.reader), load_tokenizer(settings.reader), settings.reader_rollout, mesh=mesh
        )
    engine = Engine(decoder, tokenizer, settings.rollout, retriever=train_side.retriever, mesh=mesh)
    task = Task(train_side.questions, held_out.questions, held_out.retriever)
    return Loaded(decoder, tokenizer, engine, reader, task)


def run(config: Mapping[str, Any], workdir: str | pathlib.Path) -> Outcome:
    """Trains as the config says and writes metrics, curves, trajectories, summary and the policy to `workdir`.

    Running it again with the same config continues; a finished run only reports again.
    """
    say = Clock()
    settings = Settings.of(config)
    identity = {
        "name": settings.name,
        "policy": settings.policy,
        "reader": settings.reader,
        "data": dataclasses.asdict(settings.data),
        "retriever": dataclasses.asdict(settings.retriever),
        "rollout": dataclasses.asdict(settings.rollout),
        "recipe": dataclasses.asdict(settings.recipe),  # type: ignore[call-overload]
    }
    workdir = pathlib.Path(workdir)
    refuse_other_config(workdir, dataclasses.asdict(settings.train) | {"run": identity}, MAY_DIFFER)
    enable_compilation_cache()
    loaded = load(settings, say)
    say("compiling rollout and update on first use (kept in the compilation cache for the next start)")
    outcome = train(
        settings.train,
        settings.recipe,
        loaded.task,
        loaded.engine,
        loaded.decoder,
        workdir,
        reader=loaded.reader.answers if loaded.reader else None,
        identity=identity,
    )
    report(settings, loaded, outcome, workdir, say)
    return outcome


def report(settings: Settings, loaded: Loaded, outcome: Outcome, workdir: pathlib.Path, say: Clock) -> None:
    """Writes the policy, curves, trajectories and the summary, and prints the last."""
    save_decoder(workdir / "policy", loaded.decoder, loaded.tokenizer)
    write_card(workdir / "policy", card_of(settings.recipe, settings.rollout.context, settings.rollout.top_k))
    rows = read_metrics(workdir / "metrics.jsonl")
    plot_training(rows, workdir / "curves.png", title=settings.name)
    shown = (outcome.evaluated[: SHOWN // 2] if outcome.evaluated else []) + outcome.sampled[: SHOWN // 2]
    if shown:
        write_html(
            shown,
            workdir / "trajectories.html",
            title=f"{settings.name}: held out, then training, step {outcome.step}",
            tags=settings.recipe.tags,
            token_bytes=loaded.engine.bytes,
        )
    facts = {
        "steps": f"{outcome.step} of {settings.train.steps} ({outcome.stopped})",
        "minutes": round((time.perf_counter() - say.began) / 60, 1),
        "policy": f"{settings.policy} (sha256 {folder_hash(settings.policy)[:12]})",
        "retriever": f"{settings.retriever.kind}, top {settings.rollout.top_k}",
        "seed": settings.train.seed,
        "versions": ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax")),
        "command": shlex.join(["python", *sys.argv]),
    }
    files = [str(workdir / name) for name in ("curves.png", "trajectories.html", "metrics.jsonl", "policy")]
    text = summary(outcome.before, outcome.after, run=facts, reference=settings.reference, files=files)
    (workdir / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


def parameters(decoder: Decoder) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder)))
