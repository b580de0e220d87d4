"""The section "training" of `benchmarks.rollout`: training rollouts of the shipped policy against decoding alone."""

import argparse
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks.fixed_lengths import KEY, SHIPPED, FixedLengthModel, random_model
from benchmarks.measure import BenchmarkRow, SectionResult, interleave, medians, warm_up_note
from rrl.data.questions import Question
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.models.hf import load_language_model
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.episodes import Sampling, run_questions
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn

ENVIRONMENT = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256, "correction": ""}
"""Fields of the environment in configs/rsearch_grpo.py."""
DRAFT_TOKENS = 1
"""As in configs/rsearch_grpo.py."""
NOTES = [
    "An episode prefills its prompt and observations, except for a prefix that it shares with another sample of its "
    "question. It attends to a longer context than the peer. Its time includes the end of the batch, when some rows have no "
    "questions left. Draft tokens are guesses of the next token by prompt lookup in the texts of all rows; if a guess is "
    "right, one step yields two tokens, the same ones that two steps would yield. The peer yields one token per step.",
]


def training(args: argparse.Namespace) -> SectionResult:
    """Compare the shipped policy's training rollouts, with and without draft tokens, with decoding alone
    at the same batch, one token per step."""
    decoder, tokenizer = load_language_model(SHIPPED, "policy")
    card = read_card(SHIPPED)
    assert card is not None
    recipe = make_recipe("rsearch", {"instruction": card.fields["instruction"]}, ENVIRONMENT)
    wiki = generate("train", 1, 1600, 8)
    questions = [item.question for item in mixed_questions(wiki, 200, KINDS, 1)]
    encoder = load_text_encoder("assets/miniwiki-encoder")
    rows, notes = [], []
    for batch in (args.batch, args.batch // 2):
        # top_k passages per search; top_p of sampling.
        config = EngineConfig(
            rows=batch, context=1024, wake_threshold=16, prefill_tokens=256, top_k=2, top_p=0.95
        )
        with_slots = dataclasses.replace(config, oversubscribed_slots=batch // 2)
        engines = [
            Engine(
                decoder,
                tokenizer,
                dataclasses.replace(with_slots, draft_tokens=draft_tokens),
                # Each engine has its own retriever, so that they share no cached searches.
                retriever=make_retriever(wiki.passages, "scann", encoder),
            )
            for draft_tokens in (DRAFT_TOKENS, 0)
        ]
        decode_only = FixedLengthModel(decoder, tokenizer).engine(config)
        rates, times = _training_rates(
            args.rounds, nnx.state(decoder), *engines, decode_only, recipe, questions
        )
        notes.append(f"{batch} rows: {warm_up_note(times)}")
        decode_rate = rates["decoding"]
        for side, prefix in (("episodes", ""), ("without drafts", "the same without draft tokens: ")):
            rate, busy, per_step = (rates[side, name] for name in ("rate", "busy", "per step"))
            rows.append(
                BenchmarkRow(
                    f"{prefix}128 training episodes of the built-in world over {batch} rows and {batch // 2} oversubscribed "
                    "slots, prompts and searches included: policy tokens/s",
                    f"{rate:.0f} ({100 * busy:.0f} % of {batch} rows decode, {per_step:.2f} tokens per step)",
                    f"{batch} rows that only decode {decode_rate:.0f}",
                    f"{100 * rate / decode_rate:.1f} %",
                    "at least 60 %",
                )
            )
    return rows, notes


def _training_rates(
    rounds: int,
    params: Any,
    drafting: Engine,
    plain: Engine,
    decode_only: Engine,
    recipe: Any,
    questions: Sequence[Question],
) -> tuple[dict[Any, float], dict[str, list[float]]]:
    """Run training episodes with and without draft tokens, and decoding alone.

    Returns:
      Medians: (side, "rate") is policy tokens/s, (side, "busy") the share of rows that decode, and
        (side, "per step") tokens per row and step; "decoding" is tokens/s of decoding alone.
      Seconds of all runs, as `interleave` returns them.
    """
    rates = collections.defaultdict[Any, list[float]](list)

    def episodes(side: str, engine: Engine) -> float:
        run_index = len(rates[side, "rate"])
        prompts = questions[32 * (run_index % (len(questions) // 32)) :][:32]
        key = jax.random.key(1 + run_index)
        run_questions(engine, params, recipe, prompts, Sampling(key, samples=4))
        stats = engine.stats
        rates[side, "rate"].append(stats.tokens_per_second)
        rates[side, "busy"].append(stats.busy)
        rates[side, "per step"].append(stats.tokens_per_step)
        return stats.seconds

    def decoding() -> float:
        # All rows share one prompt, so the prefill is negligible.
        prompts = random_model().requests(1, 64, samples=decode_only.config.rows)
        decode_only.run(params, prompts, SingleTurn(turn_tokens=256), KEY)
        rates["decoding"].append(decode_only.stats.tokens_per_second)
        return decode_only.stats.seconds

    sides = {
        "episodes": lambda: episodes("episodes", drafting),
        "without drafts": lambda: episodes("without drafts", plain),
        "decoding": decoding,
    }
    times = interleave(sides, rounds)
    return medians(rates), times
