"""The stages of supervised training: turns a config into data and model, trains, and writes a Hugging Face folder.

reading (stage 0): an endless stream of reading, copying and comparing tasks. Training starts from random parameters.
evidence: an endless stream of questions with evidence, for the reader (R-Search: a model of another family than the policy).
demonstrations (stage 1): a small fixed set of demonstrations by a recipe's scripted expert. Training starts from the model of
    stage 0.
pairs: a fixed set of (input, output) pairs from a file, such as a teacher's demonstrations.
verdicts: an endless stream of judge examples, for a judge. At the end its agreement with the oracle is printed; the oracle
    (`rrl.rewards.oracle`) scores by gold passages and gold answers.

`rrl.sft.stage_data` has the examples of each stage. Read `run` first.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerBase

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, fill_sections, refuse_unknown_fields
from rrl.errors import UserError
from rrl.files import saving, shipped
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash, load_language_model, read_decoder_config, save_decoder
from rrl.models.induction import init_induction_heads
from rrl.models.lora import LoraConfig, add_lora
from rrl.models.tokenizer import load_tokenizer
from rrl.parallel.rules import shard
from rrl.recipes.card import RecipeCard, make_card, write_card
from rrl.recipes.catalogue import fill_recipe_defaults
from rrl.retrieval.folder import size_and_hash
from rrl.rewards.judge_card import write_judge_card
from rrl.rl.optim import OptimConfig
from rrl.runs.datasets import DataConfig
from rrl.runs.metrics import refuse_damaged_metrics
from rrl.runs.model_files import MODEL_FILES, write_model_files
from rrl.runs.retriever import RetrieverConfig
from rrl.runs.workdir import refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied
from rrl.sft.config import MAY_DIFFER, MAY_GROW, SFTConfig
from rrl.sft.demonstrations import DemonstrationConfig, RecipeDataConfig
from rrl.sft.judge_agreement import held_out_judge_examples, judge_report
from rrl.sft.judge_examples import (
    JudgeExamplesConfig,
)
from rrl.sft.loop import SFTResult, train
from rrl.sft.memory import require_training_memory
from rrl.sft.pairs import PairsConfig
from rrl.sft.stage_data import STAGES, judge_examples_config
from rrl.sft.streams import StreamConfig

AGREEMENT_QUESTIONS = 200
"""Held-out questions for the agreement of a trained judge with the oracle."""
RECIPE_STAGES: dict[str, type[RecipeDataConfig]] = {
    "demonstrations": DemonstrationConfig,
    "pairs": PairsConfig,
}
"""Stages that train a policy for a recipe, and the dataclasses of their data."""
OPTIONAL_SECTIONS = {"mesh": MeshConfig, "compute": ComputeConfig, "lora": LoraConfig}
"""Optional config sections and their dataclasses."""
CONFIG_FIELDS = (
    *("stage", "init", "tokenizer", "out", "model", "scales", "induction", "data", "train", "optim"),
    *OPTIONAL_SECTIONS,
)
"""All top-level fields of a config: sections and single values."""


def with_defaults(config: ConfigDict) -> ConfigDict:
    """Add every missing field with its default to a config (see configs/miniwiki_*.py), so that each can be overridden."""
    rename_config(config)
    fill_defaults(config.train, SFTConfig)
    fill_defaults(config.optim, OptimConfig)
    fill_sections(config, OPTIONAL_SECTIONS)
    if not config.init:
        fill_defaults(config.model, DecoderConfig)
    if config.stage not in RECIPE_STAGES:
        fill_defaults(config.data, StreamConfig)
        return config
    if config.stage == "demonstrations":
        fill_defaults(config.data, DataConfig)
        fill_defaults(config.data.retriever, RetrieverConfig)
    section = config.data.demonstrations if config.stage == "demonstrations" else config.data
    fill_defaults(section, RECIPE_STAGES[config.stage])
    fill_recipe_defaults(section.recipe, section.recipe_options, section.environment)
    return config


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """The checked settings of a run."""

    values: Mapping[str, Any]
    """The whole config as plain values."""
    training: SFTConfig
    mesh: MeshConfig
    compute: ComputeConfig
    lora: LoraConfig
    recipe_data: RecipeDataConfig | None
    """The recipe of the policy that the stage trains; None if the stage trains another model."""
    judge_data: JudgeExamplesConfig | None
    """The judge examples of the stage "verdicts"; None in other stages."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "StageSettings":
        """Check a config without loading anything. Raises UserError."""
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        refuse_unknown_fields(CONFIG_FIELDS, values, "config")
        stage, data = values["stage"], values["data"]
        if stage not in STAGES:
            raise UserError(f"stage={stage!r} is unknown; choose one of {', '.join(STAGES)}")
        steps = values["train"]["steps"]
        optim = build(OptimConfig, values["optim"], "optim", total_steps=max(steps, 1))
        compute = build(ComputeConfig, values.get("compute", {}), "compute")
        return cls(
            values=values,
            training=build(SFTConfig, values["train"], "train", optim=optim),
            mesh=build(MeshConfig, values.get("mesh", {}), "mesh"),
            compute=compute.for_platform(jax.default_backend()),
            lora=build(LoraConfig, values.get("lora", {}), "lora"),
            recipe_data=_recipe_data_config(stage, data),
            judge_data=judge_examples_config(data) if stage == "verdicts" else None,
        )

    def identity(self) -> dict[str, Any]:
        """Return what identifies the run besides its training settings: stage, model, data and options of the model.

        Models, tokenizers and files of pairs are identified by their content. Raises UserError if `init` holds no model.
        """
        values = self.values
        identity: dict[str, Any] = {name: values[name] for name in ("stage", "model", "tokenizer", "data")}
        identity |= {name: values[name] for name in ("scales", "induction") if values.get(name)}
        if self.lora.rank:
            identity["lora"] = dataclasses.asdict(self.lora)
        if (dtypes := (self.compute.dtype, self.compute.param_dtype)) != ("float32", "float32"):
            identity["compute"] = dtypes
        if values["init"]:
            identity["init"] = _init_hash(values["init"])
        elif (tokenizer_file := shipped(values["tokenizer"]) / "tokenizer.json").is_file():
            identity["tokenizer_sha256"] = size_and_hash(tokenizer_file)["sha256"]
        if (encoder := values["data"].get("encoder")) and shipped(encoder).is_dir():
            identity["encoder_sha256"] = folder_hash(encoder)
        if self.recipe_data is not None and self.recipe_data.fingerprint:
            identity["pairs"] = self.recipe_data.fingerprint
        return identity

    def load_model(self, mesh: Mesh) -> tuple[Decoder, PreTrainedTokenizerBase]:
        """Load the initial model, or make one with random parameters; add LoRA adapters; shard over `mesh`."""
        values, seed = self.values, self.training.seed
        options: dict[str, Any] = {
            "dtype": jnp.dtype(self.compute.dtype),
            "param_dtype": jnp.dtype(self.compute.param_dtype),
            "attention": self.compute.backend(mesh.devices.flat[0].platform),
            "remat": self.compute.remat,
        }
        several_devices = mesh.size > 1
        if values["init"]:
            chat = values["stage"] != "reading"
            self._require_memory(read_decoder_config(values["init"]), mesh, f"init={values['init']!r}")
            decoder, tokenizer = load_language_model(
                values["init"], "init", chat=chat, mesh=mesh if several_devices else None, **options
            )
        else:
            tokenizer = load_tokenizer(values["tokenizer"])
            decoder_config = build(
                DecoderConfig,
                values["model"],
                "model",
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            self._require_memory(decoder_config, mesh, "model")
            decoder = Decoder(decoder_config, rngs=nnx.Rngs(seed), **options)
            scale_parameters(decoder, values.get("scales", {}))
            if values.get("induction"):
                init_induction_heads(decoder, seed=seed, **values["induction"])
        add_lora(decoder, self.lora, rngs=nnx.Rngs(seed))
        if several_devices:
            nnx.update(decoder, shard(nnx.state(decoder), mesh))
        return decoder, tokenizer

    def _require_memory(self, config: DecoderConfig, mesh: Mesh, model: str) -> None:
        require_training_memory(config, self.training, self.compute, self.lora, mesh, model)

    def recipe_card(self) -> RecipeCard | None:
        """Return the card of the trained policy; None if the stage trains no policy."""
        data = self.recipe_data
        return None if data is None else make_card(data.make(), data.context, data.card_top_k or data.top_k)


def run(config: Mapping[str, Any], workdir: str | pathlib.Path) -> SFTResult:
    """Train the model that a config describes and write it to `config["out"]` (default: workdir/model).

    If the workdir holds a stopped run of the same config, continue it. If that run is finished, do not train, but
    evaluate and write its model again.

    Raises:
        UserError: a field is unknown or wrong, or the workdir belongs to another config or is locked by another process.
        SaveError: the workdir or `out` cannot be written.
    """
    settings = StageSettings.from_config(config)
    values, training, identity = settings.values, settings.training, settings.identity()
    out = pathlib.Path(values["out"] or pathlib.Path(workdir, "model"))
    # Fail before anything is loaded. `lock_workdir` below creates the workdir, so it comes after all checks.
    refuse_other_config(workdir, dataclasses.asdict(training) | {"run": identity}, MAY_DIFFER, MAY_GROW)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={str(out)!r} is a file; give a folder, which may be a new one")
    refuse_occupied(workdir)
    refuse_damaged_metrics(workdir)
    mesh = settings.mesh.make()
    decoder, tokenizer = settings.load_model(mesh)
    load_data = STAGES[values["stage"]]
    source, held_out = load_data(values["data"], training, tokenizer, pathlib.Path(workdir))
    card, judge_data = settings.recipe_card(), settings.judge_data
    with lock_workdir(workdir):
        with saving(pathlib.Path(workdir, MODEL_FILES)):
            write_model_files(
                workdir, decoder.config, tokenizer, card, values["init"] or None, identity.get("init")
            )
            if judge_data is not None:
                write_judge_card(pathlib.Path(workdir, MODEL_FILES), judge_data.card)
        result = train(training, source, decoder, workdir, held_out=held_out, identity=identity, mesh=mesh)
        if result.stopped != "signal":
            with saving(out):
                save_decoder(out, decoder, tokenizer)
                if card is not None:
                    write_card(out, card)
                if judge_data is not None:
                    write_judge_card(out, judge_data.card)
            print(f"wrote {out} (sha256 {folder_hash(out)[:12]})", file=sys.stderr)
            if judge_data is not None:
                _print_agreement(out, judge_data, settings.compute, mesh)
    return result


def _print_agreement(
    judge: pathlib.Path, data: JudgeExamplesConfig, compute: ComputeConfig, mesh: Mesh
) -> None:
    """Print the agreement of the judge in a folder with the oracle on held-out questions of the built-in world."""
    examples = held_out_judge_examples(AGREEMENT_QUESTIONS, data)
    # Few rows: launch/sft.py keeps XLA's small CPU thread pool, in which a host callback with many rows can hang
    # (`rrl.parallel.runtime.prepare_host`).
    print(judge_report(str(judge), "", examples, compute, mesh, rows=16))


def _recipe_data_config(stage: str, data: Mapping[str, Any]) -> RecipeDataConfig | None:
    """Return the recipe data of a stage; None if the stage does not train a policy."""
    if stage == "demonstrations":
        return build(DemonstrationConfig, data["demonstrations"], "data.demonstrations")
    return build(PairsConfig, data, "data") if stage == "pairs" else None


def _init_hash(folder: str) -> str:
    try:
        return folder_hash(folder)
    except UserError as error:
        raise UserError(
            f"init={folder!r} holds no model ({error}). Make one first, by python launch/sft.py "
            "--config=configs/miniwiki_pretrain.py --workdir=runs/pretrain, or give init=FOLDER"
        ) from error


def scale_parameters(decoder: Decoder, scales: Mapping[str, float]) -> None:
    """Multiply groups of initial parameters by factors, in place.

    The groups are "embedding", and "residual": the projections o and down of each layer.

    Raises:
        UserError: a group is unknown.
    """
    groups = {"embedding": [decoder.embedding], "residual": [decoder.layers.o, decoder.layers.down]}
    for name, scale in scales.items():
        if name not in groups:
            raise UserError(f"scales.{name} is unknown; choose from {', '.join(groups)}")
        for parameter in groups[name]:
            parameter[...] = parameter[...] * scale
