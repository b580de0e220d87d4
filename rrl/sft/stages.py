"""The stages of supervised training: turns a config into data and model, trains, and writes a Hugging Face folder.

reading (stage 0): an endless stream of reading, copying and comparing exercises, from random parameters.
evidence: an endless stream of questions with evidence, for the reader (R-Search: a model of another family than the policy).
demonstrations (stage 1): a small fixed set of demonstrations of a recipe's scripted expert, from the model of stage 0.
pairs: a fixed set of (input, output) pairs from a file, such as a teacher's demonstrations.
verdicts: an endless stream of judge examples, for a judge. At the end its agreement with the oracle is printed; the oracle
    (`rrl.rewards.oracle`) scores by gold passages and gold answers.

A world is a generated encyclopedia of passages (`rrl.miniwiki`).

Read `run` first.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerBase

from rrl.config.renamed import rename_config
from rrl.config.sections import build, fill_defaults, refuse_unknown_fields
from rrl.data.examples import Example
from rrl.errors import UserError, at_least
from rrl.files import saving, shipped
from rrl.miniwiki import generate, mixed_questions
from rrl.miniwiki.evidence import reader_examples
from rrl.miniwiki.probes import reading_probes
from rrl.miniwiki.reading import reading_examples
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.hf import folder_hash, load_language_model, save_decoder
from rrl.models.induction import init_induction_heads
from rrl.models.lora import LoraConfig, add_lora
from rrl.models.tokenizer import load_tokenizer
from rrl.parallel.rules import shard
from rrl.recipes.card import make_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.rsearch import READER_TEMPLATE
from rrl.retrieval.folder import size_and_hash
from rrl.rewards.judge_card import write_judge_card
from rrl.rl.optim import OptimConfig
from rrl.runs.datasets import DataConfig, RetrieverConfig, load_retriever, load_retriever_encoder
from rrl.runs.metrics import refuse_damaged_metrics
from rrl.runs.model_files import MODEL_FILES, write_model_files
from rrl.runs.workdir import lock_workdir, refuse_locked, refuse_other_config
from rrl.sft.config import MAY_DIFFER, MAY_GROW, SFTConfig
from rrl.sft.demonstrations import DemonstrationConfig, RecipeDataConfig, demonstration_examples
from rrl.sft.judge_agreement import held_out_judge_examples, judge_report
from rrl.sft.judge_examples import (
    PROMPT_KINDS,
    JudgeExamplesConfig,
    make_judge_examples,
    tokenize_judge_examples,
)
from rrl.sft.loop import SFTResult, train
from rrl.sft.pairs import PairsConfig, load_pairs
from rrl.sft.sources import AlternatingSource, BatchSource, FixedSource, StreamSource

AGREEMENT_QUESTIONS = 200
"""Held-out questions for the agreement of a trained judge with the oracle."""
_FIRST_WORLD_SEED = 1000
"""First seed of the worlds of streams. It keeps them apart from the worlds of runs of reinforcement learning, if their seeds are
below it."""


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """An endless stream. Each block of steps generates new worlds and takes its examples from them."""

    worlds: int = 10
    """Worlds per block."""
    world_size: int = 200
    """Passages per world."""
    steps_per_block: int = 20
    """Steps per block."""
    probes: int = 64
    """Held-out examples of each kind of exercise or judge prompt, from worlds of the dev split. Stage evidence: a quarter of the
    held-out examples."""
    short_length: int = 0
    """Row length of short blocks, in tokens; 0: no short blocks. Attention over short rows is cheaper. A step of a short block
    has more rows, so that it has as many tokens as a step of a long block."""
    short_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Arguments of the stream in short blocks; they override `options`."""
    long_every: int = 4
    """With short blocks: one block in this many has rows of `train.row_length` tokens."""
    curriculum: str = ""
    """"1:200;2:300": reading examples have at most 1 passage for 200 steps, then at most 2 for 300, and then as many as
    `options` allow. "": no curriculum."""
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further arguments of the stream (rrl.miniwiki.reading, .evidence; rrl.sft.judge_examples.JudgeExamplesConfig)."""

    reading: float = 0.0
    """Stage evidence: share of the tokens that come from reading examples, during the curriculum. Without them the model
    does not learn to retrieve from its context, because answers have too few target tokens."""
    reading_later: float = 0.0
    """Stage evidence: the same share after the curriculum."""
    reading_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Stage evidence: arguments of the reading examples."""

    def __post_init__(self) -> None:
        at_least(1, self, "worlds", "world_size", "steps_per_block", "probes", "long_every", where="data.")
        at_least(0, self, "short_length", where="data.")
        parse_curriculum(self.curriculum)
        for name in ("reading", "reading_later"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"data.{name}={getattr(self, name)} must lie in 0..1.")

    def most_passages(self, step: int) -> int | None:
        """Return the curriculum's largest number of passages at a step; None after the curriculum."""
        for passages, steps in parse_curriculum(self.curriculum):
            if step < steps:
                return passages
            step -= steps
        return None


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
    for name, kind in OPTIONAL_SECTIONS.items():
        if name not in config:
            config[name] = ConfigDict()
        fill_defaults(config[name], kind)
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
    recipe = make_recipe(section.recipe)
    fill_defaults(section.recipe_options, type(recipe))
    fill_defaults(section.environment, type(recipe.environment))
    return config


def run(config: Mapping[str, Any], workdir: str | pathlib.Path) -> SFTResult:
    """Train the model that a config describes and write it to `config["out"]` (default: workdir/model).

    If the workdir holds a stopped run of the same config, continue it. If that run is finished, only write its model again.

    Raises:
        UserError: a field is unknown or wrong, or the workdir belongs to another config or is locked by another process.
        SaveError: the workdir or `out` cannot be written.
    """
    with contextlib.ExitStack() as stack:
        return _run(config, workdir, stack)


def _run(config: Mapping[str, Any], workdir: str | pathlib.Path, stack: contextlib.ExitStack) -> SFTResult:
    """The body of `run`. The workdir stays locked until `stack` is closed."""
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    refuse_unknown_fields(CONFIG_FIELDS, values, "config")
    stage, model = values["stage"], values["model"]
    if stage not in STAGES:
        raise UserError(f"stage={stage!r} is unknown; choose one of {', '.join(STAGES)}")
    steps = values["train"]["steps"]
    optim = build(OptimConfig, values["optim"], "optim", total_steps=max(steps, 1))
    settings = build(SFTConfig, values["train"], "train", optim=optim)
    identity: dict[str, Any] = {name: values[name] for name in ("stage", "model", "tokenizer", "data")}
    identity |= {name: values[name] for name in ("scales", "induction") if values.get(name)}
    mesh_config = build(MeshConfig, values.get("mesh", {}), "mesh")
    compute = build(ComputeConfig, values.get("compute", {}), "compute").for_platform(jax.default_backend())
    lora = build(LoraConfig, values.get("lora", {}), "lora")
    if lora.rank:
        identity["lora"] = dataclasses.asdict(lora)
    if (dtypes := (compute.dtype, compute.param_dtype)) != ("float32", "float32"):
        identity["compute"] = dtypes
    if values["init"]:
        identity["init"] = _init_hash(values["init"])
    elif (tokenizer_file := shipped(values["tokenizer"]) / "tokenizer.json").is_file():
        identity["tokenizer_sha256"] = size_and_hash(tokenizer_file)["sha256"]
    if (encoder := values["data"].get("encoder")) and shipped(encoder).is_dir():
        identity["encoder_sha256"] = folder_hash(encoder)
    recipe_data = _recipe_data_config(stage, values["data"])
    if isinstance(recipe_data, PairsConfig):
        identity["pairs"] = recipe_data.fingerprint
    out = pathlib.Path(values["out"] or pathlib.Path(workdir, "model"))
    refuse_other_config(workdir, dataclasses.asdict(settings) | {"run": identity}, MAY_DIFFER, MAY_GROW)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={str(out)!r} is a file; give a folder, which may be a new one")
    # Fail before anything is loaded. `lock_workdir` below creates the workdir, so it comes after all checks.
    refuse_locked(workdir)
    refuse_damaged_metrics(workdir)
    mesh = mesh_config.make()
    options: dict[str, Any] = {
        "dtype": jnp.dtype(compute.dtype),
        "param_dtype": jnp.dtype(compute.param_dtype),
        "attention": compute.backend(mesh.devices.flat[0].platform),
        "remat": compute.remat,
    }
    if values["init"]:
        decoder, tokenizer = load_language_model(
            values["init"], "init", chat=stage != "reading", mesh=mesh if mesh.size > 1 else None, **options
        )
    else:
        tokenizer = load_tokenizer(values["tokenizer"])
        decoder_config = build(
            DecoderConfig,
            model,
            "model",
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        decoder = Decoder(decoder_config, rngs=nnx.Rngs(settings.seed), **options)
        scale_parameters(decoder, values.get("scales", {}))
        if values.get("induction"):
            init_induction_heads(decoder, seed=settings.seed, **values["induction"])
    add_lora(decoder, lora, rngs=nnx.Rngs(settings.seed))
    if mesh.size > 1:
        nnx.update(decoder, shard(nnx.state(decoder), mesh))
    source, held_out = STAGES[stage](values["data"], settings, tokenizer, pathlib.Path(workdir))
    card = None
    if recipe_data is not None:
        card = make_card(recipe_data.make(), recipe_data.context, recipe_data.card_top_k or recipe_data.top_k)
    judge_config = _judge_examples_config(values["data"]) if stage == "verdicts" else None
    stack.enter_context(lock_workdir(workdir))
    with saving(pathlib.Path(workdir, MODEL_FILES)):
        write_model_files(workdir, decoder.config, tokenizer, card, values["init"] or None)
        if judge_config is not None:
            write_judge_card(pathlib.Path(workdir, MODEL_FILES), judge_config.card)
    result = train(settings, source, decoder, workdir, held_out=held_out, identity=identity, mesh=mesh)
    if result.stopped != "signal":
        with saving(out):
            save_decoder(out, decoder, tokenizer)
            if card is not None:
                write_card(out, card)
            if judge_config is not None:
                write_judge_card(out, judge_config.card)
        print(f"wrote {out} (sha256 {folder_hash(out)[:12]})", file=sys.stderr)
        if judge_config is not None:
            # Few rows: launch/sft.py keeps XLA's small CPU thread pool, in which a host callback with many rows can hang
            # (`rrl.parallel.runtime.prepare_host`).
            print(
                judge_report(
                    str(out),
                    "",
                    held_out_judge_examples(AGREEMENT_QUESTIONS, judge_config),
                    compute,
                    mesh,
                    rows=16,
                )
            )
    return result


def _recipe_data_config(stage: str, data: Mapping[str, Any]) -> RecipeDataConfig | None:
    """Return the recipe data of a stage; None if the stage does not train a recipe."""
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


StageLoader = Callable[
    [Mapping[str, Any], SFTConfig, PreTrainedTokenizerBase, pathlib.Path],
    tuple[BatchSource, dict[str, Sequence[Example]]],
]
"""(section data, settings, tokenizer, workdir) -> (training batches, named sets of held-out examples)."""


def _reading(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> tuple[BatchSource, dict[str, Sequence[Example]]]:
    config = build(StreamConfig, data, "data")

    def source(rows: int, row_length: int, options: Mapping[str, float]) -> BatchSource:
        def make(block: int) -> list[Example]:
            tokens = config.steps_per_block * rows * row_length
            return _reading_block(config, settings.seed, tokenizer, block, tokens, row_length, options)

        return StreamSource(make, rows, row_length, settings.seed, config.steps_per_block)

    dev = generate("dev", 0, config.worlds * config.world_size, config.worlds)
    probes = reading_probes(dev, tokenizer, 0, config.probes, limit=settings.row_length)
    full = source(settings.rows, settings.row_length, config.options)
    if not config.short_length:
        return full, dict(probes)
    short_rows = settings.rows * settings.row_length // config.short_length
    short = source(short_rows, config.short_length, {**config.options, **config.short_options})
    return AlternatingSource([short] * (config.long_every - 1) + [full], config.steps_per_block), dict(probes)


def _reading_block(
    config: StreamConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    tokens: int,
    limit: int,
    options: Mapping[str, float],
) -> list[Example]:
    """Generate the reading examples of a block, with at least `tokens` tokens in total, from new worlds."""
    world_seed = _FIRST_WORLD_SEED * (seed + 1) + block
    wiki = generate("train", world_seed, config.worlds * config.world_size, config.worlds)
    most_passages = config.most_passages(block * config.steps_per_block)
    arguments = {**options} if most_passages is None else {**options, "most_passages": most_passages}
    return _take_tokens(reading_examples(wiki, tokenizer, world_seed, limit=limit, **arguments), tokens)  # type: ignore[arg-type]


def _evidence(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> tuple[BatchSource, dict[str, Sequence[Example]]]:
    config = build(StreamConfig, data, "data")

    def stream(split: str, seed: int) -> Iterator[Example]:
        wiki = generate(split, seed, config.worlds * config.world_size, config.worlds)
        examples = reader_examples(wiki, tokenizer, seed, READER_TEMPLATE, **config.options)  # type: ignore[arg-type]
        return (example for example in examples if len(example) <= settings.row_length)

    def make(block: int) -> list[Example]:
        tokens = config.steps_per_block * settings.rows * settings.row_length
        in_curriculum = config.most_passages(block * config.steps_per_block) is not None
        share = config.reading if in_curriculum else config.reading_later
        reading_tokens = int(share * tokens)
        examples = _take_tokens(
            stream("train", _FIRST_WORLD_SEED * (settings.seed + 1) + block), tokens - reading_tokens
        )
        if reading_tokens:
            length, options = settings.row_length, config.reading_options
            examples += _reading_block(
                config, settings.seed, tokenizer, block, reading_tokens, length, options
            )
        return examples

    source = StreamSource(make, settings.rows, settings.row_length, settings.seed, config.steps_per_block)
    return source, {"answers": list(itertools.islice(stream("dev", 0), 4 * config.probes))}


def _demonstrations(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, workdir: pathlib.Path
) -> tuple[BatchSource, dict[str, Sequence[Example]]]:
    fields = dict(data)
    config = build(DemonstrationConfig, fields.pop("demonstrations"), "data.demonstrations")
    retrieval = build(RetrieverConfig, fields.pop("retriever"), "data.retriever")
    world = build(DataConfig, fields, "data")
    recipe = config.make()
    encoder = load_retriever_encoder(retrieval, "data.retriever")

    def examples(split: str, worlds: int, number: int) -> list[Example]:
        wiki = generate(split, world.seed, worlds * world.world_size, worlds)
        per_kind = -(-number // len(world.kinds))  # rounded up
        items = mixed_questions(wiki, per_kind, world.kinds, world.seed)[:number]
        retriever = load_retriever(wiki.passages, retrieval, encoder, workdir=workdir)
        if retriever is None:
            raise UserError(
                "data.retriever.kind=off: demonstrations need a retriever; choose scann, exact or bm25"
            )
        return demonstration_examples(recipe, tokenizer, items, retriever, config.top_k)

    train_examples = examples("train", world.train_worlds, config.number)
    held_out = examples("dev", world.held_out_worlds, config.held_out)
    return FixedSource(train_examples, settings.rows, settings.row_length, settings.seed), {
        "expert": held_out
    }


def _pairs(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> tuple[BatchSource, dict[str, Sequence[Example]]]:
    examples, held_out = load_pairs(build(PairsConfig, data, "data"), tokenizer, settings.row_length)
    source = FixedSource(examples, settings.rows, settings.row_length, settings.seed)
    print(f"one epoch is {source.steps_per_epoch} steps of {settings.rows} rows", file=sys.stderr)
    return source, {"pairs": held_out}


def _judge_examples(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> tuple[BatchSource, dict[str, Sequence[Example]]]:
    config, options = build(StreamConfig, data, "data"), _judge_examples_config(data)
    # `per_kind` below: questions of each kind. `prompt_kind`: class of the judge prompt.
    tokens = config.steps_per_block * settings.rows * settings.row_length

    def stream(split: str, seed: int, per_kind: int, prompt_kind: type | None = None) -> Iterator[Example]:
        wiki = generate(split, seed, config.worlds * config.world_size, config.worlds)
        selected = (
            example
            for example in make_judge_examples(wiki, seed, per_kind, options)
            if prompt_kind is None or type(example.prompt) is prompt_kind
        )
        examples = tokenize_judge_examples(selected, tokenizer, options.card)
        return (example for example in examples if len(example) <= settings.row_length)

    def make(block: int) -> list[Example]:
        # One question of each kind for 3000 tokens. This is more than enough, since a question gives four examples.
        return _take_tokens(
            stream("train", _FIRST_WORLD_SEED * (settings.seed + 1) + block, tokens // 3000 + 1), tokens
        )

    probes: dict[str, Sequence[Example]] = {
        # A fifth of the probes for each of the five kinds of questions; each question gives one prompt of each kind.
        kind.__name__.lower(): list(stream("dev", 0, config.probes // 5 + 1, kind))
        for kind in PROMPT_KINDS
    }
    return StreamSource(
        make, settings.rows, settings.row_length, settings.seed, config.steps_per_block
    ), probes


def _judge_examples_config(data: Mapping[str, Any]) -> JudgeExamplesConfig:
    return build(JudgeExamplesConfig, data["options"], "data.options")


def scale_parameters(decoder: Decoder, scales: Mapping[str, float]) -> None:
    """Multiply initial parameters, in place, by name: "embedding", or "residual" (the projections o and down of each layer).

    Raises:
        UserError: the name is unknown.
    """
    groups = {"embedding": [decoder.embedding], "residual": [decoder.layers.o, decoder.layers.down]}
    for name, scale in scales.items():
        if name not in groups:
            raise UserError(f"scales.{name} is unknown; choose from {', '.join(groups)}")
        for parameter in groups[name]:
            parameter[...] = parameter[...] * scale


def parse_curriculum(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "1:200;2:200": at most 1 passage for 200 steps, then at most 2 for 200. Returns (passages, steps) pairs."""
    try:
        pairs = tuple(tuple(map(int, part.split(":"))) for part in text.split(";") if part)
    except ValueError:
        pairs = ((),)
    if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise UserError(
            f"curriculum={text!r} must be PASSAGES:STEPS;PASSAGES:STEPS;... with whole numbers from 1"
        )
    return tuple((pair[0], pair[1]) for pair in pairs)


def _take_tokens(stream: Iterator[Example], tokens: int) -> list[Example]:
    """Take examples from a stream until they have at least `tokens` tokens."""
    examples, total = [], 0
    for example in stream:
        examples.append(example)
        total += len(example)
        if total >= tokens:
            break
    return examples


STAGES: dict[str, StageLoader] = {
    "reading": _reading,
    "evidence": _evidence,
    "demonstrations": _demonstrations,
    "pairs": _pairs,
    "verdicts": _judge_examples,
}
RECIPE_STAGES: dict[str, type[RecipeDataConfig]] = {
    "demonstrations": DemonstrationConfig,
    "pairs": PairsConfig,
}
"""Stages that train a recipe, and the dataclasses of their data."""
