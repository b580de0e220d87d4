"""Measures rollout speed; rows go to RESULTS.md:

    python -m benchmarks.rollout [--only=NAME] [--rounds=5] [--hf_python=PYTHON] [--tunix_python=PYTHON]
    python -m benchmarks.rollout --shape=Qwen2.5-0.5B --dtype=bfloat16 [--only=NAME] [--rounds=5] [--hf_python=PYTHON]

Each comparison runs its sides in turn on the same model. The first round compiles and is not counted. The model is random, has
Qwen2's shape and never samples the end of sequence, so that each section sets the lengths. Only `training` uses the shipped
policy, whose episodes end by themselves. "Rows" are the sequences that decode together (`EngineConfig.rows`). On a GPU or TPU a
published shape is measured too (`benchmarks.accelerator`). With `--shape` the sections are those of `benchmarks.shape_rollouts`.
"""

import argparse
import dataclasses
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import accelerator, search_episodes, shape_rollouts, training_rollouts
from benchmarks.fixed_lengths import KEY, add_shape_arguments, random_model
from benchmarks.measure import BenchmarkRow, SectionResult, command, interleave, medians, warm_up_note, write
from benchmarks.peer_library import HF, TUNIX, peers, pythons
from benchmarks.search_episodes import FixedTurns, episodes
from benchmarks.training_rollouts import training
from rrl.parallel.runtime import use_huge_pages
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import SingleTurn


def single_turn(args: argparse.Namespace) -> SectionResult:
    """Compare one turn: sampling against Hugging Face's generate; greedy against Tunix's Sampler, which is
    fastest when greedy."""
    batch, prompt, new = args.batch, 256, 256
    what = f"one turn, batch {batch}, {prompt} prompt and {new} new tokens, tokens/s"
    target = {HF: "1.5x", TUNIX: "3x"}
    engine = random_model().engine(
        EngineConfig(rows=batch, context=prompt + new, wake_threshold=batch, prefill_tokens=512)
    )
    environment = SingleTurn(turn_tokens=new)
    our_side = {HF: "ours, sampled", TUNIX: "ours, greedy"}
    sides = {
        side: random_model().timed(
            engine, random_model().requests(batch, prompt, temperature=temperature), environment, batch * new
        )
        for side, temperature in (("ours, sampled", 1.0), ("ours, greedy", 0.0))
    }
    equal_tokens = []
    with peers(random_model(), pythons(args), batch, prompt, new) as (started, missing):
        for peer in started.values():
            sides |= peer.sides("sample")
        times = interleave(sides, args.rounds)
        greedy = engine.run(
            nnx.state(random_model().decoder),
            random_model().requests(batch, prompt, temperature=0.0),
            environment,
            KEY,
        )
        for name, peer in started.items():
            theirs = np.array(peer.process.ask("greedy")["tokens"])
            same = np.mean([t.tokens[prompt:] == other for t, other in zip(greedy, theirs, strict=True)])
            label = f"the same, greedy: equal tokens of {batch * new}"
            equal_tokens.append(BenchmarkRow(label, f"{100 * same:.1f} %", name, "", "100 %"))
    seconds_of = medians(times)

    def rate(took: float) -> str:
        return f"{batch * new / took:.0f}"

    rows = [BenchmarkRow(what, "", name, reason, target[name]) for name, reason in missing.items()]
    for name, peer in started.items():
        peer_seconds, peer_text = peer.best(seconds_of, rate)
        our_rate = f"{rate(seconds_of[our_side[name]])} ({our_side[name].removeprefix('ours, ')})"
        rows.append(
            BenchmarkRow(
                what, our_rate, peer_text, f"{peer_seconds / seconds_of[our_side[name]]:.2f}x", target[name]
            )
        )
    return rows + equal_tokens, [warm_up_note(times)]


def group(args: argparse.Namespace) -> SectionResult:
    """Compare the prefill of eight samples of a prompt with that of one sample."""
    config = EngineConfig(rows=8, context=1100, wake_threshold=8, prefill_tokens=256)
    environment, params = SingleTurn(turn_tokens=1), nnx.state(random_model().decoder)
    sides = {}
    for samples in (1, 8):
        engine, requests = random_model().engine(config), random_model().requests(1, 1024, samples=samples)

        def run(engine: Engine = engine, requests: list[Request] = requests) -> float:
            began = time.perf_counter()
            for _ in range(5):
                engine.run(params, requests, environment, KEY)
            return (time.perf_counter() - began) / 5

        sides["1 sample" if samples == 1 else f"{samples} samples"] = run
    times = interleave(sides, args.rounds)
    one, eight = medians(times).values()
    row = BenchmarkRow(
        "8 samples of a prompt of 1,024 tokens, one token each, seconds",
        f"{eight:.3f}",
        f"1 sample {one:.3f}",
        f"{eight / one:.2f}x",
        "at most 1.2x",
    )
    return [row], [warm_up_note(times)]


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
        random_model().requests(8 * args.batch, 128),
    )

    def side(delay: float) -> Callable[[], float]:
        retriever = DelayedRetriever(delay)
        run = random_model().timed(random_model().engine(config, retriever), requests, environment)

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
    return [row], [warm_up_note(times)]


def mixed(args: argparse.Namespace) -> SectionResult:
    """Measure the share of rows that decode, on average, if the lengths of requests vary tenfold.

    It is compared with a scheduler that refills each row as soon as its request has ended.
    """
    config = EngineConfig(rows=args.batch, context=640, wake_threshold=16, prefill_tokens=256)
    draws = np.random.default_rng(0).geometric(1 / 100, 16 * args.batch).clip(20, 200)
    requests = [
        dataclasses.replace(request, turn_tokens=int(length))
        for request, length in zip(random_model().requests(len(draws), 64), draws, strict=True)
    ]
    free_at = [0] * args.batch
    for length in draws.tolist():
        heapq.heapreplace(free_at, free_at[0] + length)
    ideal = draws.sum() / (max(free_at) * args.batch)
    engine = random_model().engine(config)
    run = random_model().timed(engine, requests, SingleTurn(turn_tokens=200), int(draws.sum()))
    times = interleave({"ours": run}, args.rounds)
    row = BenchmarkRow(
        f"{len(draws)} requests of 20 to 200 tokens over {args.batch} rows: share of rows that decode",
        f"{100 * engine.stats.busy:.1f} % ({medians(times)['ours']:.2f} s)",
        f"if refilled at once, in the same order {100 * ideal:.1f} %",
        f"{engine.stats.busy / ideal:.3f}",
        "at least 85 %",
    )
    return [row], [warm_up_note(times)]


SECTIONS: dict[str, Callable[[argparse.Namespace], SectionResult]] = {
    section.__name__: section for section in (single_turn, episodes, group, latency, mixed, training)
}

SHAPE_SECTIONS: dict[str, Callable[[argparse.Namespace], SectionResult]] = {
    section.__name__: section for section in (shape_rollouts.turn, shape_rollouts.episodes)
}
"""Sections with `--shape`."""
SHAPE_ARGUMENTS = (
    "shape",
    "dtype",
    "rollout",
    "prompt",
    "new",
    "searches",
    "turn_tokens",
    "observation_tokens",
)
"""Arguments that have a meaning only with `--shape`."""
PEER_SECTIONS = ("single_turn", "episodes")
"""Sections that measure other libraries."""

NOTES = {
    "single_turn": [
        "Tunix recommends vLLM for rollouts in production; its Sampler is what runs without vLLM."
    ],
    "episodes": search_episodes.NOTES,
    "training": training_rollouts.NOTES,
}


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser and the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=list(SECTIONS | SHAPE_SECTIONS), help="section to run (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--batch", type=int, default=64, help="number of rows")
    add_shape_arguments(parser)
    parser.add_argument("--prompt", type=int, default=256, help="with --shape: number of prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="with --shape: decode steps of a turn")
    parser.add_argument("--searches", type=int, default=3, help="with --shape: searches of an episode")
    parser.add_argument(
        "--turn_tokens", type=int, default=64, help="with --shape: tokens written in a turn of an episode"
    )
    parser.add_argument(
        "--observation_tokens", type=int, default=256, help="with --shape: tokens read after a search"
    )
    parser.add_argument(
        "--hf_python", default=sys.executable, help="Python interpreter with torch and transformers"
    )
    parser.add_argument("--tunix_python", default=sys.executable, help="Python interpreter with google-tunix")
    args = parser.parse_args(argv)
    sections = SHAPE_SECTIONS if args.shape else SECTIONS
    if args.only and args.only not in sections:
        with_or_without = "with" if args.shape else "without"
        parser.error(f"--only={args.only} is no section {with_or_without} --shape: {', '.join(sections)}")
    return parser, args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the selected sections."""
    parser, args = parse(argv)
    for name, section in (SHAPE_SECTIONS if args.shape else SECTIONS).items():
        if args.only in (None, name):
            rows, notes = section(args)
            used = vars(args) | {"only": name}
            if not args.shape:
                used = {option: value for option, value in used.items() if option not in SHAPE_ARGUMENTS}
            if name not in PEER_SECTIONS and not args.shape:
                used = {option: value for option, value in used.items() if not option.endswith("_python")}
            title = f"Rollout: {name.replace('_', ' ')}"
            if args.shape:
                title += f", {args.shape}'s shape, {args.dtype}"
            own_notes = [] if args.shape else NOTES.get(name, [])
            write(title, command("benchmarks.rollout", parser, used), rows, own_notes + notes)
    if args.only is None and not args.shape and jax.default_backend() != "cpu":
        given = {name: vars(args)[name] for name in ("rounds", "hf_python")}
        accelerator.main([f"--{name}={value}" for name, value in given.items()])


if __name__ == "__main__":
    use_huge_pages()  # as in every training run; the peers get them too
    main()
