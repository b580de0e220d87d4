"""Measures rollout speed: `python -m benchmarks.rollout [--only=NAME] [--rounds=5] [--hf_python=PYTHON] [--tunix_python=PYTHON]`;
rows go to RESULTS.md.

Each comparison runs both sides in turn on the same random Qwen2-shaped model. Lengths are fixed, since the end of sequence is
never sampled. The first round compiles and is not counted. On a GPU or TPU a published shape is measured too
(`benchmarks.accelerator`).
"""

import argparse
import collections
import dataclasses
import functools
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import accelerator
from benchmarks.fixed_lengths import KEY, FixedLengths
from benchmarks.measure import BenchmarkRow, command, interleave, medians, warm_up, write
from benchmarks.peer_library import CACHES, HF, TUNIX, PeerLibrary, peers
from rrl.data.questions import Question
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import load_language_model
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import read_config
from rrl.parallel.runtime import use_huge_pages
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.episodes import run_questions
from rrl.retrieval.encode import load_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Append, Finish, Restart, SearchFor, SingleTurn

SHIPPED = "assets/miniwiki-policy"
"""Folder of the shipped policy."""
ENVIRONMENT = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256, "correction": ""}
"""Fields of the environment in configs/rsearch_grpo.py."""
DRAFT_TOKENS = 1
"""As in configs/rsearch_grpo.py."""

SectionResult = tuple[list[BenchmarkRow], list[str]]
"""(rows, notes below them)."""


@functools.cache
def model() -> FixedLengths:
    """Return a random model of the shipped policy's shape, in float32 on a CPU, otherwise in bfloat16. Peers load its weights."""
    config = dataclasses.replace(DecoderConfig.from_hf(read_config(SHIPPED)), max_positions=8192)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    decoder = Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
    return FixedLengths(decoder, load_tokenizer(SHIPPED))


def pythons(args: argparse.Namespace) -> dict[str, str]:
    """Return the Python of each peer."""
    return {HF: args.hf_python, TUNIX: args.tunix_python}


def single_turn(args: argparse.Namespace) -> SectionResult:
    """Compare one turn: sampling against Hugging Face's generate; greedy against Tunix's Sampler, which is
    fastest when greedy."""
    batch, prompt, new = args.batch, 256, 256
    what = f"one turn, batch {batch}, {prompt} prompt and {new} new tokens, tokens/s"
    target = {HF: "1.5x", TUNIX: "3x"}
    engine = model().engine(
        EngineConfig(rows=batch, context=prompt + new, wake_threshold=batch, prefill_tokens=512)
    )
    environment = SingleTurn(turn_tokens=new)
    our_side = {HF: "ours, sampled", TUNIX: "ours, greedy"}
    sides = {
        side: model().timed(
            engine, model().requests(batch, prompt, temperature=temperature), environment, batch * new
        )
        for side, temperature in (("ours, sampled", 1.0), ("ours, greedy", 0.0))
    }
    equal = []
    with peers(model(), pythons(args), batch, prompt, new) as (started, missing):
        for peer in started.values():
            sides |= peer.sides("sample")
        times = interleave(sides, args.rounds)
        greedy = engine.run(
            nnx.state(model().decoder), model().requests(batch, prompt, temperature=0.0), environment, KEY
        )
        for name, peer in started.items():
            theirs = np.array(peer.process.ask("greedy")["tokens"])
            same = np.mean([t.tokens[prompt:] == other for t, other in zip(greedy, theirs, strict=True)])
            what_is_equal = f"the same, greedy: equal tokens of {batch * new}"
            equal.append(BenchmarkRow(what_is_equal, f"{100 * same:.1f} %", name, "", "100 %"))
    seconds_of = medians(times)

    def rate(seconds: float) -> str:
        return f"{batch * new / seconds:.0f}"

    rows = [BenchmarkRow(what, "", name, reason, target[name]) for name, reason in missing.items()]
    for name, peer in started.items():
        peer_seconds, peer_text = peer.best(seconds_of, rate)
        our_rate = f"{rate(seconds_of[our_side[name]])} ({our_side[name].removeprefix('ours, ')})"
        rows.append(
            BenchmarkRow(
                what, our_rate, peer_text, f"{peer_seconds / seconds_of[our_side[name]]:.2f}x", target[name]
            )
        )
    return rows + equal, [warm_up(times)]


@dataclasses.dataclass(frozen=True)
class FixedTurns:
    """Search episodes of fixed lengths.

    With `reprefill`, each turn clears the context and prefills the whole history again.
    """

    searches: int
    reprefill: bool = False
    turn_tokens: int = 64
    observation_tokens: int = 384
    prompt: int = 128

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def step(self, episode: Any, text: str, stop: str) -> Any:
        # Equal queries would share one search, so queries are distinct.
        query = f"question {episode.question.id}, turn {episode.turn}"
        return SearchFor(query) if episode.turn < self.searches else Finish("done")

    def overflow(self, episode: Any, message: Any, room: int) -> Any:
        return Finish("context_limit")

    def observe(self, episode: Any, passages: Any) -> Any:
        if not self.reprefill:
            # Longer than the limit, so that the engine cuts it to exactly `observation_tokens`.
            return Append(body="a b " * self.observation_tokens)
        turn = self.turn_tokens + self.observation_tokens
        length = self.prompt + (episode.turn + 1) * turn
        draw = np.random.default_rng((int(episode.question.id), episode.turn))
        return Restart(draw.integers(0, 1000, length).astype(np.int32))


KEPT_CACHE = f"{HF} with a kept cache, all episodes in lockstep"
"""Name of the loop that keeps generate's cache between turns, so all turns must have the same length."""
FULL_TURNS = f"{HF}, each turn written to its limit"
"""Name of the loop whose turns do not end at the tag, but at RESPONSE_TOKENS."""
RESPONSE_TOKENS = 500
"""Limit per turn in Search-R1's scripts (max_response_length). Its loop samples without stop strings up
to the end of sequence or this limit, and then removes the text after the closing tag."""


def episodes(args: argparse.Namespace) -> SectionResult:
    """Compare search episodes with loops that prefill the whole history again at every turn.

    There are four such loops:
    - Search-R1's, over Hugging Face's generate, as published: each turn is generated up to its limit;
    - the same loop with turns that end at the tag;
    - Tunix's, over its Sampler;
    - one over this engine.

    A fifth loop, over generate, keeps its cache between turns. This works only if all turns and observations
    have the same length. A batch four times as large is compared only with generate and this engine.
    """
    rows, notes = [], []
    for searches, batch in ((2, args.batch // 4), (4, args.batch // 4), (4, args.batch)):
        environment, reprefilling, all_peers = (
            FixedTurns(searches),
            FixedTurns(searches, reprefill=True),
            batch < args.batch,
        )
        what = f"episodes of {searches} searches (64 written, 384 read a turn), batch {batch}, seconds"
        target = "4x at 4 turns, growing" if searches == 4 else ""
        # Tokens in the context at the beginning of each turn.
        histories = [
            environment.prompt + turn * (environment.turn_tokens + environment.observation_tokens)
            for turn in range(searches + 1)
        ]
        config = EngineConfig(
            rows=batch,
            context=histories[-1] + environment.turn_tokens + 64,
            wake_threshold=max(16, batch // 2),
            prefill_tokens=1024,
            share_prompts=False,
        )
        requests = model().requests(batch, environment.prompt)
        tokens = batch * (searches + 1) * environment.turn_tokens
        reprefill = "this engine, whole history prefilled at every turn"
        sides = {
            "ours": model().timed(model().engine(config), requests, environment, tokens),
            reprefill: model().timed(model().engine(config), requests, reprefilling, tokens),
        }
        named = pythons(args) if all_peers else {HF: args.hf_python}
        with peers(model(), named, batch, histories[-1], environment.turn_tokens) as (started, missing):
            for peer in started.values():
                sides |= peer.sides("turns", *histories)
            if all_peers and HF in started:
                process = started[HF].process
                started |= {name: PeerLibrary(name, process, CACHES) for name in (KEPT_CACHE, FULL_TURNS)}
                sides |= started[KEPT_CACHE].sides("kept", *histories)
                sides |= started[FULL_TURNS].sides("uncut", RESPONSE_TOKENS, *histories)
            times = interleave(sides, args.rounds)
        seconds_of = medians(times)
        # Prefilled tokens of the loop over prefilled tokens of ours: the speedup if decoding took no time.
        max_ratio = sum(histories) / (environment.prompt + searches * environment.observation_tokens)
        # (seconds, text for the row, addition to the ratio, target)
        compared = [
            (
                seconds_of[reprefill],
                f"{reprefill} {seconds_of[reprefill]:.2f}",
                f" (at most {max_ratio:.1f}x: tokens read)",
                target,
            )
        ]
        for name, peer in started.items():
            peer_seconds, peer_text = peer.best(seconds_of, "{:.2f}".format)
            reads = "" if name == KEPT_CACHE else "whole history prefilled at every turn: "
            # The target is for equal turn lengths on both sides.
            compared.append(
                (peer_seconds, reads + peer_text, "", "" if name in (KEPT_CACHE, FULL_TURNS) else target)
            )
        rows += [
            BenchmarkRow(
                what,
                f"{seconds_of['ours']:.2f}",
                text,
                f"{seconds / seconds_of['ours']:.2f}x{addition}",
                goal,
            )
            for seconds, text, addition, goal in compared
        ]
        rows += [BenchmarkRow(what, "", name, reason, target) for name, reason in missing.items()]
        notes.append(f"{searches} searches, batch {batch}: {warm_up(times)}")
    return rows, notes


def group(args: argparse.Namespace) -> SectionResult:
    """Compare the prefill of eight samples of a prompt with that of one sample."""
    config = EngineConfig(rows=8, context=1100, wake_threshold=8, prefill_tokens=256)
    environment, params = SingleTurn(turn_tokens=1), nnx.state(model().decoder)
    sides = {}
    for samples in (1, 8):
        engine, requests = model().engine(config), model().requests(1, 1024, samples=samples)

        def run(engine: Engine = engine, requests: list[Request] = requests) -> float:
            began = time.perf_counter()
            for _ in range(5):
                engine.run(params, requests, environment, KEY)
            return (time.perf_counter() - began) / 5

        sides[f"{samples} of a prompt"] = run
    times = interleave(sides, args.rounds)
    one, eight = medians(times).values()
    row = BenchmarkRow(
        "8 samples of a prompt of 1,024 tokens, one token each, seconds",
        f"{eight:.3f}",
        f"1 sample {one:.3f}",
        f"{eight / one:.2f}x",
        "at most 1.2x",
    )
    return [row], [warm_up(times)]


class DelayedRetriever:
    """A retriever that sleeps before it answers."""

    needs_embeddings = False

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.queries: list[str] = []

    def search(self, queries: Sequence[str], k: int, embeddings: Any = None) -> list[list[Any]]:
        self.queries += queries
        time.sleep(self.delay)
        return [[] for _ in queries]


def latency(args: argparse.Namespace) -> SectionResult:
    """Compare searches that take 50 ms with searches that take no time.

    Oversubscribed slots, as in the configs, let other episodes decode during a search. All queries are
    distinct, so each needs its own search.
    """
    oversubscribed, searches = args.batch // 2, 4
    config = EngineConfig(
        rows=args.batch,
        oversubscribed_slots=oversubscribed,
        context=1600,
        wake_threshold=16,
        prefill_tokens=256,
    )

    @dataclasses.dataclass(frozen=True)
    class VariedTurns(FixedTurns):
        """Turns of different lengths, as in practice, so that not all rows search at the same time."""

        # A random model generates an "e" after a random number of tokens.
        stops: tuple[str, ...] = ("e",)  # type: ignore[misc]

    environment, requests = (
        VariedTurns(searches, observation_tokens=128),
        model().requests(8 * args.batch, 128),
    )

    def side(delay: float) -> Callable[[], float]:
        retriever = DelayedRetriever(delay)
        run = model().timed(model().engine(config, retriever), requests, environment)

        def timed() -> float:
            retriever.queries.clear()
            took = run()
            assert len(set(retriever.queries)) == len(retriever.queries) == searches * len(requests)
            return took

        return timed

    sides = {f"{1000 * delay:.0f} ms": side(delay) for delay in (0.0, 0.05)}
    times = interleave(sides, args.rounds)
    fast, slow = medians(times).values()
    row = BenchmarkRow(
        f"{len(requests)} episodes of {searches} searches over {args.batch} rows and {oversubscribed} oversubscribed slots, "
        "distinct queries, seconds by search latency",
        f"50 ms {slow:.2f}",
        f"0 ms {fast:.2f}",
        f"{100 * (slow / fast - 1):+.1f} %",
        "at most +5 %",
    )
    return [row], [warm_up(times)]


def mixed(args: argparse.Namespace) -> SectionResult:
    """Measure the share of slots that decode, on average, if the lengths of requests vary tenfold.

    It is compared with a scheduler that refills each slot as soon as its request has ended.
    """
    config = EngineConfig(rows=args.batch, context=640, wake_threshold=16, prefill_tokens=256)
    draws = np.random.default_rng(0).geometric(1 / 100, 16 * args.batch).clip(20, 200)
    requests = [
        dataclasses.replace(request, turn_tokens=int(length))
        for request, length in zip(model().requests(len(draws), 64), draws, strict=True)
    ]
    free_at = [0] * args.batch
    for length in draws.tolist():
        heapq.heapreplace(free_at, free_at[0] + length)
    ideal = draws.sum() / (max(free_at) * args.batch)
    engine = model().engine(config)
    run = model().timed(engine, requests, SingleTurn(turn_tokens=200), int(draws.sum()))
    times = interleave({"ours": run}, args.rounds)
    row = BenchmarkRow(
        f"{len(draws)} requests of 20 to 200 tokens over {args.batch} slots: share of slots that decode",
        f"{100 * engine.stats.busy:.1f} % ({medians(times)['ours']:.2f} s)",
        f"if refilled at once, in the same order {100 * ideal:.1f} %",
        f"{engine.stats.busy / ideal:.3f}",
        "at least 85 %",
    )
    return [row], [warm_up(times)]


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
        decode_only = FixedLengths(decoder, tokenizer).engine(config)
        rates, times = _training_rates(
            args.rounds, nnx.state(decoder), *engines, decode_only, recipe, questions
        )
        notes.append(f"{batch} rows: {warm_up(times)}")
        decode_rate = rates["decoding"]
        for side, how in (("episodes", ""), ("without drafts", "the same without draft tokens: ")):
            rate, busy, per_step = (rates[side, what] for what in ("rate", "busy", "per step"))
            rows.append(
                BenchmarkRow(
                    f"{how}128 training episodes of the built-in world over {batch} rows and {batch // 2} oversubscribed "
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
        run_questions(engine, params, recipe, prompts, key=key, samples=4)
        stats = engine.stats
        rates[side, "rate"].append(stats.tokens_per_second)
        rates[side, "busy"].append(stats.busy)
        rates[side, "per step"].append(stats.tokens_per_step)
        return stats.seconds

    def decoding() -> float:
        # All rows share one prompt, so the prefill is negligible.
        prompts = model().requests(1, 64, samples=decode_only.config.rows)
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


SECTIONS: dict[str, Callable[[argparse.Namespace], SectionResult]] = {
    section.__name__: section for section in (single_turn, episodes, group, latency, mixed, training)
}

PEER_SECTIONS = ("single_turn", "episodes")
"""Sections that measure other libraries."""

NOTES = {
    "single_turn": [
        "Tunix recommends vLLM for rollouts in production; its Sampler is what runs without vLLM."
    ],
    "episodes": [
        "This engine and Hugging Face's generate sample; Tunix's Sampler is greedy, which is faster, and its cache is only as "
        "long as each turn needs. A loop that prefills the history again, or that keeps generate's cache, waits for the longest "
        "turn of the batch. Here all turns have the same length, so such a loop loses no time by waiting.",
        f"{FULL_TURNS}: Search-R1's loop as published (there over vLLM). It samples without stop strings and cuts the text "
        f"after its tag afterwards. Its scripts allow {RESPONSE_TOKENS} tokens per turn, of which 64 are kept here. A model that "
        "ends its sequence after a tag writes fewer; here none does, so this is the longest time of its loop, most of it for "
        "text that is cut. This row has no target. In the other rows a turn ends at its tag, as with a stop string; they have "
        "targets.",
    ],
    "training": [
        "An episode prefills its prompt and observations, except for a prefix that it shares with another sample of its "
        "question. It attends to a longer context than the peer. Its time includes the end of the batch, when some rows have no "
        "questions left. Draft tokens are guesses of the next token, from what all rows have read and written; if a guess is "
        "right, one step yields two tokens, the same ones that two steps would yield. The peer yields one token per step.",
    ],
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the selected sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="section to run (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--batch", type=int, default=64, help="number of rows")
    parser.add_argument(
        "--hf_python", default=sys.executable, help="Python interpreter with torch and transformers"
    )
    parser.add_argument("--tunix_python", default=sys.executable, help="Python interpreter with google-tunix")
    args = parser.parse_args(argv)
    for name, section in SECTIONS.items():
        if args.only in (None, name):
            rows, notes = section(args)
            used = vars(args) | {"only": name}
            if name not in PEER_SECTIONS:
                used = {option: value for option, value in used.items() if not option.endswith("_python")}
            command_line = command("benchmarks.rollout", parser, used)
            write(f"Rollout: {name.replace('_', ' ')}", command_line, rows, NOTES.get(name, []) + notes)
    if args.only is None and jax.default_backend() != "cpu":
        given = {name: vars(args)[name] for name in ("rounds", "hf_python")}
        accelerator.main([f"--{name}={value}" for name, value in given.items()])


if __name__ == "__main__":
    use_huge_pages()  # as in every training run; the peers get them too
    main()
