"""Loads the models and the data of an RL run: `load_components`."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.families import DECODER_FAMILIES
from rrl.models.heads import ValueModel
from rrl.models.hf import load_language_model, load_value_model, read_decoder_config
from rrl.models.lineage import same_family
from rrl.models.lora import add_lora
from rrl.parallel.rules import shard
from rrl.recipes.base import uses_chat
from rrl.rewards.judge import Judge
from rrl.rewards.reader import Reader
from rrl.rollout.engine import Engine
from rrl.runs.datasets import load_datasets
from rrl.runs.timed_log import TimedLog
from rrl.setup.memory import require_run_memory
from rrl.setup.settings import TrainSettings
from rrl.train.task import Task


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


def load_components(settings: TrainSettings, log: TimedLog, workdir: pathlib.Path) -> TrainComponents:
    """Load models, corpus and questions.

    `workdir` stores the index over the embeddings of a large corpus, so that a resumed run searches the same index.
    """
    mesh, compute = settings.mesh.make(), settings.compute
    device = mesh.devices.flat[0]
    backend = compute.backend(device.platform, settings.train.objective.share_prefixes)
    sizes = "x".join(str(size) for size in mesh.devices.shape)
    log(
        f"{mesh.size} of {len(jax.devices())} devices ({device.device_kind}), mesh data x fsdp x tensor = {sizes}; "
        f"{compute.dtype}, attention by {backend}"
    )
    _check_reader_family(settings)
    require_run_memory(settings, read_decoder_config(settings.policy), mesh)
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
    reader = _load_reader(settings, mesh, log)
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


def _check_reader_family(settings: TrainSettings) -> None:
    """Raise UserError if the recipe needs a reader of another family than the policy's, and the reader is of the same."""
    policy, reader = settings.policy, settings.reader
    if reader and settings.recipe.needs_other_family and same_family(policy, reader):
        lineage = read_decoder_config(policy).family.lineage
        others = ", ".join(sorted({family.lineage for family in DECODER_FAMILIES.values()} - {lineage}))
        raise UserError(
            f"reader={reader!r} is a model of the same family as policy={policy!r} (architecture of {lineage}, same vocabulary). "
            "The recipe rewards evidence that a model of another family understands: give reader=FOLDER of another family "
            f"(such as {others}), or --config.reader='' to train without this reward"
        )


def _load_reader(settings: TrainSettings, mesh: Mesh, log: TimedLog) -> Reader | None:
    """Load the model that answers from evidence or documents; None if the run has none."""
    if not settings.reader:
        return None
    log(f"reader {settings.reader}")
    dtype = jnp.dtype(settings.compute.dtype)
    decoder, tokenizer = load_language_model(
        settings.reader,
        "reader",
        context=settings.reader_rollout.context,
        dtype=dtype,
        param_dtype=dtype,
        mesh=mesh if mesh.size > 1 else None,
    )
    return Reader(decoder, tokenizer, settings.reader_rollout, mesh=mesh)
