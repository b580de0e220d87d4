"""The training and held-out examples of each stage of supervised training (see `rrl.sft.stages`). Read `STAGES` first.

In this module a world is a sub-world of `rrl.miniwiki`: passages that no fact connects to those of another one.
"""

import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rrl.config.sections import build
from rrl.data.examples import Example
from rrl.errors import UserError
from rrl.miniwiki import MiniWiki, generate, mixed_questions
from rrl.miniwiki.evidence import reader_examples
from rrl.miniwiki.probes import reading_probes
from rrl.miniwiki.reading import reading_examples
from rrl.recipes.rsearch import READER_TEMPLATE
from rrl.runs.datasets import DataConfig, RetrieverConfig, load_retriever, load_retriever_encoder
from rrl.sft.config import SFTConfig
from rrl.sft.demonstrations import DemonstrationConfig, demonstration_examples
from rrl.sft.judge_examples import (
    PROMPT_KINDS,
    JudgeExamplesConfig,
    make_judge_examples,
    tokenize_judge_examples,
)
from rrl.sft.pairs import PairsConfig, load_pairs
from rrl.sft.sources import AlternatingSource, BatchSource, FixedSource, StreamSource
from rrl.sft.streams import StreamConfig

FIRST_WORLD_SEED = 1000
"""Streams draw their worlds with seeds from this number on, so that they differ from the worlds of reinforcement learning, whose
seeds are usually smaller."""

MIN_TOKENS_PER_FIVE_QUESTIONS = 3000
"""Lower bound of the number of tokens in the judge examples of five questions, one of each kind. Each question gives four
examples. `_judge_examples` computes from it how many questions fill a block."""

StageData = tuple[BatchSource, dict[str, Sequence[Example]]]
"""(training batches, named sets of held-out examples)."""
StageLoader = Callable[[Mapping[str, Any], SFTConfig, PreTrainedTokenizerBase, pathlib.Path], StageData]
"""(the config's section `data`, settings, tokenizer, workdir) -> data of the stage."""


def _reading(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> StageData:
    config = build(StreamConfig, data, "data")

    def source(rows: int, row_length: int, options: Mapping[str, float]) -> BatchSource:
        def make(block: int) -> list[Example]:
            tokens = config.steps_per_block * rows * row_length
            return _reading_block(config, settings.seed, tokenizer, block, tokens, row_length, options)

        return StreamSource(make, rows, row_length, settings.seed, config.steps_per_block)

    probes = reading_probes(_worlds(config, "dev", 0), tokenizer, 0, config.probes, limit=settings.row_length)
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
    wiki = _worlds(config, "train", _world_seed(seed, block))
    most_passages = config.most_passages(block * config.steps_per_block)
    arguments = {**options} if most_passages is None else {**options, "most_passages": most_passages}
    examples = reading_examples(wiki, tokenizer, _world_seed(seed, block), limit=limit, **arguments)  # type: ignore[arg-type]
    return _take_tokens(examples, tokens)


def _evidence(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> StageData:
    config = build(StreamConfig, data, "data")

    def stream(split: str, seed: int) -> Iterator[Example]:
        wiki = _worlds(config, split, seed)
        examples = reader_examples(wiki, tokenizer, seed, READER_TEMPLATE, **config.options)  # type: ignore[arg-type]
        return (example for example in examples if len(example) <= settings.row_length)

    def make(block: int) -> list[Example]:
        tokens = config.steps_per_block * settings.rows * settings.row_length
        in_curriculum = config.most_passages(block * config.steps_per_block) is not None
        share = config.reading if in_curriculum else config.reading_later
        reading_tokens = int(share * tokens)
        examples = _take_tokens(stream("train", _world_seed(settings.seed, block)), tokens - reading_tokens)
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
) -> StageData:
    fields = dict(data)
    config = build(DemonstrationConfig, fields.pop("demonstrations"), "data.demonstrations")
    retrieval = build(RetrieverConfig, fields.pop("retriever"), "data.retriever")
    world_config = build(DataConfig, fields, "data")
    recipe = config.make()
    encoder = load_retriever_encoder(retrieval, "data.retriever")

    def examples(split: str, worlds: int, number: int) -> list[Example]:
        wiki = generate(split, world_config.seed, worlds * world_config.world_size, worlds)
        per_kind = -(-number // len(world_config.kinds))  # rounded up
        items = mixed_questions(wiki, per_kind, world_config.kinds, world_config.seed)[:number]
        retriever = load_retriever(wiki.passages, retrieval, encoder, workdir=workdir)
        if retriever is None:
            raise UserError(
                "data.retriever.kind=off: demonstrations need a retriever; choose scann, exact or bm25"
            )
        return demonstration_examples(recipe, tokenizer, items, retriever, config.top_k)

    train_examples = examples("train", world_config.train_worlds, config.number)
    held_out = examples("dev", world_config.held_out_worlds, config.held_out)
    source = FixedSource(train_examples, settings.rows, settings.row_length, settings.seed)
    return source, {"expert": held_out}


def _pairs(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> StageData:
    examples, held_out = load_pairs(build(PairsConfig, data, "data"), tokenizer, settings.row_length)
    source = FixedSource(examples, settings.rows, settings.row_length, settings.seed)
    print(f"one epoch is {source.steps_per_epoch} steps of {settings.rows} rows", file=sys.stderr)
    return source, {"pairs": held_out}


def _judge_examples(
    data: Mapping[str, Any], settings: SFTConfig, tokenizer: PreTrainedTokenizerBase, _: pathlib.Path
) -> StageData:
    config, options = build(StreamConfig, data, "data"), judge_examples_config(data)
    tokens = config.steps_per_block * settings.rows * settings.row_length

    def stream(
        split: str, seed: int, questions_per_kind: int, prompt_type: type | None = None
    ) -> Iterator[Example]:
        selected = (
            example
            for example in make_judge_examples(
                _worlds(config, split, seed), seed, questions_per_kind, options
            )
            if prompt_type is None or type(example.prompt) is prompt_type
        )
        examples = tokenize_judge_examples(selected, tokenizer, options.card)
        return (example for example in examples if len(example) <= settings.row_length)

    def make(block: int) -> list[Example]:
        questions_per_kind = tokens // MIN_TOKENS_PER_FIVE_QUESTIONS + 1
        return _take_tokens(stream("train", _world_seed(settings.seed, block), questions_per_kind), tokens)

    # A fifth of the probes for each of the five kinds of questions; each question gives one prompt of each type.
    probes: dict[str, Sequence[Example]] = {
        prompt_type.__name__.lower(): list(stream("dev", 0, config.probes // 5 + 1, prompt_type))
        for prompt_type in PROMPT_KINDS
    }
    source = StreamSource(make, settings.rows, settings.row_length, settings.seed, config.steps_per_block)
    return source, probes


def judge_examples_config(data: Mapping[str, Any]) -> JudgeExamplesConfig:
    """Return the settings of judge examples from the section `data` of a config."""
    return build(JudgeExamplesConfig, data["options"], "data.options")


def _world_seed(seed: int, block: int) -> int:
    """Return the seed of the worlds of a block in a run with `seed`.

    Two runs with different seeds share no world in their first `FIRST_WORLD_SEED` blocks.
    """
    return FIRST_WORLD_SEED * (seed + 1) + block


def _worlds(config: StreamConfig, split: str, seed: int) -> MiniWiki:
    """Generate the worlds of one block."""
    return generate(split, seed, config.worlds * config.world_size, config.worlds)


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
"""Loader of the data of each stage."""
