"""The sections of `benchmarks.rollout` for one model shape (`--shape`): prefill and decoding of one turn, and search episodes.

The peer is Hugging Face's generate in float32 and bfloat16, with both caches. Each of the four runs in the warm-up round and in
the first timed round; then only the fastest ones go on.
"""

import argparse
import collections
from collections.abc import Callable, Collection, Mapping

from flax import nnx

from benchmarks.fixed_lengths import (
    KEY,
    PREFILL_TOKENS,
    SHIPPED,
    FixedLengthModel,
    engine_config,
    random_decoder,
)
from benchmarks.measure import BenchmarkRow, SectionResult, interleave, medians, warm_up_note
from benchmarks.peer_library import HF, PeerLibrary, best_of, compare_first_tokens, hf_by_dtype
from benchmarks.search_episodes import FixedTurns
from rrl.models.hardware import ComputeConfig
from rrl.models.tokenizer import load_tokenizer
from rrl.rollout.protocol import SingleTurn

DECODE_TARGETS = {16: "1.5x", 64: "2.5x"}
"""Rows -> target of decoding."""
LOOPS = {
    "turns": ("whole history read again at every turn", "4x"),
    "kept": ("cache kept between turns, all episodes in lockstep", ""),
}
"""Command of benchmarks/peers/hf_generate.py -> (what this loop does, target)."""


def shaped_model(args: argparse.Namespace) -> FixedLengthModel:
    """Return the model of `--shape` in `--dtype`, the field `compute.dtype` of a training config.

    The weights have the same dtype, as the frozen weights of a run with adapters.
    """
    compute = ComputeConfig(dtype=args.dtype, param_dtype=args.dtype)
    return FixedLengthModel(random_decoder(args.shape, compute), load_tokenizer(SHIPPED))


def turn(args: argparse.Namespace) -> SectionResult:
    """Compare prefill and decoding of one turn, with a quarter of the rows and with all."""
    model = shaped_model(args)
    rows, notes = [], []
    for batch in (args.batch // 4, args.batch):
        new_rows, new_notes = _turn(model, batch, args, check=not rows)
        rows += new_rows
        notes += new_notes
    return rows, notes


def _turn(model: FixedLengthModel, batch: int, args: argparse.Namespace, check: bool) -> SectionResult:
    """Return the rows and notes for one number of rows. `check` compares the first greedy tokens of both sides, too."""
    prompt, new = args.prompt, args.new
    # One token more: the first one needs the prefill only, and `new` decode steps follow.
    engine = model.engine(
        engine_config(
            args, rows=batch, context=prompt + new + 2, wake_threshold=batch, prefill_tokens=PREFILL_TOKENS
        )
    )
    prefills: dict[str, list[float]] = collections.defaultdict(list)
    requests = model.requests(batch, prompt)
    first, every = (
        model.timed(engine, requests, SingleTurn(turn_tokens=count), batch * count) for count in (1, new + 1)
    )

    def ours() -> float:
        prefills["ours"].append(first())
        return every()

    what = (
        f"one turn, {batch} rows, {prompt} prompt and {new} new tokens, products in {engine.product_format}"
    )
    targets = {"prefill": "0.9x", "decoding": DECODE_TARGETS.get(batch, "")}
    with hf_by_dtype(model, args.hf_python, batch, prompt, new + 1) as started:
        if isinstance(started, str):
            return [
                BenchmarkRow(f"{what}: {name}, tokens/s", "", HF, started, target)
                for name, target in targets.items()
            ], []
        sides = {"ours": ours} | _split_sides(started.values(), prefills)
        select = _fastest_of_each(prefills)
        times = interleave(sides, args.rounds, select)
        rows = _turn_rows(what, (batch * prompt, batch * new), times, prefills, started.values(), targets)
        if check:
            greedy = engine.run(
                nnx.state(model.decoder),
                model.requests(batch, prompt, temperature=0.0),
                SingleTurn(turn_tokens=1),
                KEY,
            )
            tokens = [trajectory.tokens[prompt] for trajectory in greedy]
            rows.append(compare_first_tokens(started[args.dtype].process, tokens))
    return rows, [f"{batch} rows: {warm_up_note(times)}"]


def _split_sides(
    peers: Collection[PeerLibrary], prefills: dict[str, list[float]]
) -> dict[str, Callable[[], float]]:
    """Return one side for each peer and cache. Each run adds its seconds until the first token to `prefills`."""

    def side(peer: PeerLibrary, cache: str) -> Callable[[], float]:
        def run() -> float:
            answer = peer.answer("split", cache)
            prefills[peer.side_name(cache)].append(answer["first"])
            return answer["seconds"]

        return run

    return {peer.side_name(cache): side(peer, cache) for peer in peers for cache in peer.caches}


def _decode_times(
    times: Mapping[str, list[float]], prefills: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Return the seconds of the decode steps of every run: those of all tokens without those until the first."""
    return {
        name: [total - first for total, first in zip(times[name], prefills[name], strict=True)]
        for name in times
    }


def _fastest_of_each(
    prefills: Mapping[str, list[float]],
) -> Callable[[dict[str, list[float]]], Collection[str]]:
    """Return the selection of `interleave` that keeps our side, the peer's fastest prefill and its fastest decoding."""

    def select(times: dict[str, list[float]]) -> Collection[str]:
        peers = [name for name in times if name != "ours"]
        decoding = _decode_times(times, prefills)
        return {"ours", *(min(peers, key=lambda n: values[n][-1]) for values in (prefills, decoding))}

    return select


def _turn_rows(
    what: str,
    tokens: tuple[int, int],
    times: Mapping[str, list[float]],
    prefills: Mapping[str, list[float]],
    peers: Collection[PeerLibrary],
    targets: Mapping[str, str],
) -> list[BenchmarkRow]:
    """Return the rows of prefill and decoding. `tokens` are the numbers of prompt tokens and of decoded tokens."""
    rows = []
    for (name, target), count, values in zip(
        targets.items(), tokens, (prefills, _decode_times(times, prefills)), strict=True
    ):
        seconds_of = medians(values)
        theirs, text = best_of(peers, seconds_of, lambda seconds, count=count: f"{count / seconds:.0f}")
        our_rate = f"{count / seconds_of['ours']:.0f}"
        rows.append(
            BenchmarkRow(
                f"{what}: {name}, tokens/s", our_rate, text, f"{theirs / seconds_of['ours']:.2f}x", target
            )
        )
    return rows


def episodes(args: argparse.Namespace) -> SectionResult:
    """Compare search episodes, with a quarter of the rows, with a loop over generate that reads the whole history again.

    A second loop keeps generate's cache between turns. It works only because all turns have the same length here.
    """
    model, batch = shaped_model(args), args.batch // 4
    turns = FixedTurns(
        args.searches,
        turn_tokens=args.turn_tokens,
        observation_tokens=args.observation_tokens,
        prompt=args.prompt,
    )
    config = engine_config(
        args,
        rows=batch,
        context=turns.histories[-1] + turns.turn_tokens + 64,
        wake_threshold=batch,
        prefill_tokens=PREFILL_TOKENS,
    )
    written = batch * (turns.searches + 1) * turns.turn_tokens
    run = model.timed(model.engine(config), model.requests(batch, turns.prompt), turns, written)
    what = (
        f"episodes of {turns.searches} searches ({turns.turn_tokens} sampled, {turns.observation_tokens} observation tokens per "
        f"turn) after a prompt of {turns.prompt}, {batch} rows, {args.dtype}: seconds"
    )
    with hf_by_dtype(model, args.hf_python, batch, turns.histories[-1], turns.turn_tokens) as started:
        if isinstance(started, str):
            return [BenchmarkRow(what, "", HF, started, "4x")], []
        sides: dict[str, Callable[[], float]] = {"ours": run}
        peers = {
            command: [
                PeerLibrary(f"{peer.name}, {loop}", peer.process, peer.caches) for peer in started.values()
            ]
            for command, (loop, _) in LOOPS.items()
        }
        for command, libraries in peers.items():
            for library in libraries:
                sides |= library.sides(command, *turns.histories)
        times = interleave(sides, args.rounds, lambda times: {"ours", *_fastest_of_loops(peers, times)})
    seconds_of = medians(times)
    rows = []
    for command, (_, target) in LOOPS.items():
        theirs, text = best_of(peers[command], seconds_of, "{:.1f}".format)
        ratio = f"{theirs / seconds_of['ours']:.2f}x"
        rows.append(BenchmarkRow(what, f"{seconds_of['ours']:.1f}", text, ratio, target))
    return rows, [warm_up_note(times)]


def _fastest_of_loops(
    peers: Mapping[str, list[PeerLibrary]], times: Mapping[str, list[float]]
) -> Collection[str]:
    """Return the fastest side of each loop in the last round."""
    names = [[peer.side_name(cache) for peer in group for cache in peer.caches] for group in peers.values()]
    return {min(group, key=lambda name: times[name][-1]) for group in names}
