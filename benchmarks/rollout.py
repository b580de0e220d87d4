"""Rollout speed: `python -m benchmarks.rollout [--only=NAME] [--rounds=5] [--hf_python=PYTHON]
[--tunix_python=PYTHON]`; rows go to RESULTS.md.

Every comparison runs both sides in turn, on the same random Qwen2-shaped model, with lengths fixed by forbidding the end of
sequence. Compilation is in the first round, which is not counted.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import heapq
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.fixed_lengths import KEY, FixedLengths
from benchmarks.measure import Peer, Row, alternate, imports, write
from rrl.data.miniwiki import KINDS, generate, mixed_questions
from rrl.data.questions import Question
from rrl.data.tokenizer import load_tokenizer
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import load_language_model, save_decoder
from rrl.models.weights import read_config
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import make_recipe
from rrl.retrieval.encode import load_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.rollout.engine import Engine, EngineConfig
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Append, Finish, Restart, SearchFor, SingleTurn
from rrl.rollout.trajectory import POLICY
from rrl.train.rollouts import run_questions

SHAPE = "assets/miniwiki-policy"
TRAINING = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256, "correction": ""}
"""The environment of configs/rsearch_grpo.py."""


@functools.cache
def model() -> FixedLengths:
    """A model of the shipped policy's shape, and its tokenizer."""
    config = dataclasses.replace(DecoderConfig.from_hf(read_config(SHAPE)), max_positions=8192)
    return FixedLengths(Decoder(config, rngs=nnx.Rngs(0)), load_tokenizer(SHAPE))


def single_turn(args: argparse.Namespace) -> list[Row]:
    """One turn: drawn, against Hugging Face's generate that draws; greedy, against Tunix's Sampler, which is fastest so."""
    batch, prompt, new = args.batch, 256, 256
    what = f"one turn, batch {batch}, {prompt} prompt and {new} new tokens, tokens/s"
    wanted = {"HF generate": "1.5x", "Tunix Sampler": "3x"}
    made = model().engine(EngineConfig(rows=batch, context=prompt + new, feeds=batch, feed_tokens=512))
    environment = SingleTurn(turn_tokens=new)
    ours = {"HF generate": "ours, drawn", "Tunix Sampler": "ours, greedy"}
    sides = {
        side: model().timed(
            made, model().requests(batch, prompt, temperature=temperature), environment, batch * new
        )
        for side, temperature in (("ours, drawn", 1.0), ("ours, greedy", 0.0))
    }
    rows, peers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(folder, model().decoder, model().tokenizer)
        for name, (python, module, script) in {
            "HF generate": (args.hf_python, "torch", "hf_generate.py"),
            "Tunix Sampler": (args.tunix_python, "tunix", "tunix_sampler.py"),
        }.items():
            if not imports(python, module):
                rows.append(Row(what, "", name, f"not measured: {python} has no {module}", wanted[name]))
                continue
            peers[name] = Peer(python, script, folder, str(batch), str(prompt), str(new))
            sides[name] = lambda peer=peers[name]: peer.ask("sample")["seconds"]  # type: ignore[misc]
        greedy = made.run(
            nnx.state(model().decoder), model().requests(batch, prompt, temperature=0.0), environment, KEY
        )
        for name, peer in peers.items():
            theirs = np.array(peer.ask("greedy")["tokens"])
            same = np.mean([t.tokens[prompt:] == other for t, other in zip(greedy, theirs, strict=True)])
            what_is_equal = f"the same, greedy: equal tokens of {batch * new}"
            rows.append(Row(what_is_equal, f"{100 * same:.1f} %", name, "", "100 %"))
        rates = {side: batch * new / value for side, value in alternate(sides, args.rounds).items()}
        for peer in peers.values():
            peer.close()
    compared = [
        Row(
            what,
            f"{rates[ours[name]]:.0f} ({ours[name].removeprefix('ours, ')})",
            f"{name} {rates[name]:.0f} ({peer.says['versions']})",
            f"{rates[ours[name]] / rates[name]:.2f}x",
            wanted[name],
        )
        for name, peer in peers.items()
    ]
    return compared + rows


@dataclasses.dataclass(frozen=True)
class Turns:
    """Search episodes of fixed lengths; `again` clears the context at each turn and prefills all of it once more."""

    searches: int
    again: bool = False
    turn_tokens: int = 64
    observation_tokens: int = 384
    prompt: int = 128

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    def react(self, episode: Any, text: str, stop: str) -> Any:
        return SearchFor("query") if episode.turn < self.searches else Finish("done")

    def overflow(self, episode: Any, message: Any, room: int) -> Any:
        return Finish("context_limit")

    def observe(self, episode: Any, passages: Any) -> Any:
        if not self.again:
            return Append(body="a b " * self.observation_tokens)
        turn = self.turn_tokens + self.observation_tokens
        length = self.prompt + (episode.turn + 1) * turn
        draw = np.random.default_rng((int(episode.question.id or 0), episode.turn))
        return Restart(draw.integers(0, 1000, length).astype(np.int32))


def episodes(args: argparse.Namespace) -> list[Row]:
    """Search episodes, against loops that read the whole history again at every turn: Search-R1's over Hugging Face's generate,
    Tunix's over its Sampler, and one over this engine."""
    rows, batch = [], args.batch // 4
    for searches in (2, 4):
        live, again = Turns(searches), Turns(searches, again=True)
        histories = [
            live.prompt + turn * (live.turn_tokens + live.observation_tokens) for turn in range(searches + 1)
        ]
        config = EngineConfig(
            rows=batch,
            context=histories[-1] + live.turn_tokens + 64,
            feeds=16,
            feed_tokens=512,
            share_prompts=False,
        )
        asked = model().requests(batch, live.prompt)
        tokens = batch * (searches + 1) * live.turn_tokens
        own = "this engine, all read again at every turn"
        sides = {
            "ours": model().timed(model().engine(config), asked, live, tokens),
            own: model().timed(model().engine(config), asked, again, tokens),
        }
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            save_decoder(folder, model().decoder, model().tokenizer)
            for name, python, module, script in (
                ("HF generate", args.hf_python, "torch", "hf_generate.py"),
                ("Tunix Sampler", args.tunix_python, "tunix", "tunix_sampler.py"),
            ):
                if imports(python, module):
                    sizes = str(batch), str(histories[-1]), str(live.turn_tokens)
                    peer = Peer(python, script, folder, *sizes)
                    stack.callback(peer.close)
                    line = " ".join(["turns", *map(str, histories)])
                    sides[f"{name} at every turn ({peer.says['versions']})"] = (
                        lambda peer=peer, line=line: peer.ask(line)["seconds"]  # type: ignore[misc]
                    )
            found = alternate(sides, args.rounds)
        # With decoding that takes no time at all.
        most = sum(histories) / (live.prompt + searches * live.observation_tokens)
        rows += [
            Row(
                f"episodes of {searches} searches (64 written, 384 read a turn), batch {batch}, seconds",
                f"{found['ours']:.2f}",
                f"{side} {value:.2f}",
                f"{value / found['ours']:.2f}x"
                + (f" (at most {most:.1f}x: tokens read)" if side == own else ""),
                "4x at 4 turns, growing" if searches == 4 else "",
            )
            for side, value in found.items()
            if side != "ours"
        ]
    return rows


def group(args: argparse.Namespace) -> list[Row]:
    """The prefill of eight samples of a prompt, against one sample's."""
    config = EngineConfig(rows=8, context=1100, feeds=8, feed_tokens=256)
    environment, params = SingleTurn(turn_tokens=1), nnx.state(model().decoder)
    sides = {}
    for samples in (1, 8):
        made, asked = model().engine(config), model().requests(1, 1024, samples=samples)

        def run(made: Engine = made, asked: list[Request] = asked) -> float:
            began = time.perf_counter()
            for _ in range(5):
                made.run(params, asked, environment, KEY)
            return (time.perf_counter() - began) / 5

        sides[f"{samples} samples"] = run
    found = alternate(sides, args.rounds)
    one, eight = found["1 samples"], found["8 samples"]
    return [
        Row(
            "8 samples of a prompt of 1,024 tokens, one token each, seconds",
            f"{eight:.3f}",
            f"1 sample {one:.3f}",
            f"{eight / one:.2f}x",
            "at most 1.2x",
        )
    ]


class Delayed:
    """A retriever that takes its time."""

    needs_embeddings = False

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def search(self, queries: Sequence[str], k: int, embeddings: Any = None) -> list[list[Any]]:
        time.sleep(self.delay)
        return [[] for _ in queries]


def latency(args: argparse.Namespace) -> list[Row]:
    """Searches of 50 ms, against searches of no time, with the spare rows that the configs have for waiting."""
    spare = args.batch // 2
    config = EngineConfig(rows=args.batch, spare_rows=spare, context=1600, feeds=16, feed_tokens=256)

    @dataclasses.dataclass(frozen=True)
    class Varied(Turns):
        """Turns of different lengths, as real ones are, so that not all rows search at once."""

        stops: tuple[str, ...] = ("e",)  # type: ignore[misc]

    environment, asked = Varied(4, observation_tokens=128), model().requests(8 * args.batch, 128)
    sides = {
        f"{1000 * delay:.0f} ms": model().timed(model().engine(config, Delayed(delay)), asked, environment)
        for delay in (0.0, 0.05)
    }
    found = alternate(sides, args.rounds)
    return [
        Row(
            f"{len(asked)} episodes of 4 searches over {args.batch} rows and {spare} spare ones, seconds by search latency",
            f"50 ms {found['50 ms']:.2f}",
            f"0 ms {found['0 ms']:.2f}",
            f"{100 * (found['50 ms'] / found['0 ms'] - 1):+.1f} %",
            "at most +5 %",
        )
    ]


def mixed(args: argparse.Namespace) -> list[Row]:
    """How many slots write, where lengths are geometric, ten to one; and how many would if each were refilled at once."""
    config = EngineConfig(rows=args.batch, context=640, feeds=16, feed_tokens=256)
    draws = np.random.default_rng(0).geometric(1 / 100, 16 * args.batch).clip(20, 200)
    asked = [
        dataclasses.replace(request, turn_tokens=int(length))
        for request, length in zip(model().requests(len(draws), 64), draws, strict=True)
    ]
    free_at = [0] * args.batch
    for length in draws.tolist():
        heapq.heapreplace(free_at, free_at[0] + length)
    most = draws.sum() / (max(free_at) * args.batch)
    made = model().engine(config)
    run = model().timed(made, asked, SingleTurn(turn_tokens=200), int(draws.sum()))
    found = alternate({"ours": run}, args.rounds)["ours"]
    return [
        Row(
            f"{len(draws)} requests of 20 to 200 tokens over {args.batch} slots: slots that write",
            f"{100 * made.stats.busy:.1f} % ({found:.2f} s)",
            f"refilled at once, in the same order {100 * most:.1f} %",
            f"{made.stats.busy / most:.3f}",
            "at least 85 %",
        )
    ]


def training(args: argparse.Namespace) -> list[Row]:
    """The shipped policy's training rollouts in the built-in world, against decoding alone at the same batch."""
    decoder, tokenizer = load_language_model(SHAPE, "policy")
    card = read_card(SHAPE)
    assert card is not None
    recipe = make_recipe("rsearch", {"instruction": card.fields["instruction"]}, TRAINING)
    wiki = generate("train", 1, 1600, 8)
    questions = [item.question for item in mixed_questions(wiki, 100, KINDS, 1)]
    retriever = make_retriever(wiki.passages, "scann", load_text_encoder("assets/miniwiki-encoder"))
    found = []
    for batch in (args.batch, args.batch // 2):
        config = EngineConfig(rows=batch, context=1024, feeds=16, feed_tokens=256, top_k=2, top_p=0.95)
        more = dataclasses.replace(config, spare_rows=batch // 2)
        made = Engine(decoder, tokenizer, more, retriever=retriever)
        alone = FixedLengths(decoder, tokenizer).engine(config)
        rates = _training_rates(args.rounds, nnx.state(decoder), made, alone, recipe, questions)
        useful, raw = rates["episodes"], rates["decoding"]
        # Were all to write all the time: a token's own time at its position, and that of what is prefilled.
        most = 1 / (raw / rates["decoding there"] + rates["read"] * raw / rates["reading"])
        rows = f"{batch} rows that only"
        found += [
            Row(
                f"128 training episodes of the built-in world over {batch} rows and {batch // 2} spare ones, prompts, searches "
                "and all: policy tokens/s",
                f"{useful:.0f} ({100 * rates['busy']:.0f} % of {batch} write)",
                f"{rows} decode {raw:.0f}",
                f"{100 * useful / raw:.1f} %",
                "at least 60 %",
            ),
            Row(
                f"the most of it, {batch} writing all the time at these positions, with {rates['read']:.2f} tokens prefilled "
                "for one written",
                f"{most * raw:.0f}",
                f"{rows} decode at these positions {rates['decoding there']:.0f}, that only read {rates['reading']:.0f}",
                f"{100 * most:.0f} %",
                "",
            ),
        ]
    return found


def _training_rates(
    rounds: int, params: Any, made: Engine, alone: Engine, recipe: Any, questions: Sequence[Question]
) -> dict[str, float]:
    """Medians: policy tokens/s of training episodes, the share of rows that write, tokens prefilled for one written; and
    tokens/s of decoding alone from short prompts, of decoding at the episodes' positions, and of reading alone."""
    new, rows = 256, alone.config.rows
    rates = collections.defaultdict[str, list[float]](list)
    positions: list[float] = []

    def episodes() -> float:
        asked = questions[32 * (len(positions) % 10) :][:32]
        key = jax.random.key(1 + len(positions))
        done = run_questions(made, params, recipe, asked, key=key, samples=4)
        positions.append(float(np.concatenate([np.flatnonzero(t.roles == POLICY) for t in done]).mean()))
        stats = made.stats
        rates["episodes"].append(stats.tokens_per_second)
        rates["busy"].append(stats.busy)
        rates["read"].append(stats.prefilled_tokens / stats.policy_tokens)
        return stats.seconds

    def only(name: str, asked: list[Request], tokens: int) -> float:
        alone.run(params, asked, SingleTurn(turn_tokens=tokens), KEY)
        count = alone.stats.policy_tokens if tokens > 1 else alone.stats.prefilled_tokens
        rates[name].append(count / alone.stats.seconds)
        return alone.stats.seconds

    def decoding_there() -> float:
        # One prompt, which all rows share: nearly nothing is read.
        return only("decoding there", model().requests(1, round(positions[0]) - new // 2, samples=rows), new)

    sides = {
        "episodes": episodes,
        "decoding": lambda: only("decoding", model().requests(rows, 64), new),
        "decoding there": decoding_there,
        "reading": lambda: only("reading", model().requests(2 * rows, 256), 1),
    }
    alternate(sides, rounds)
    return {name: float(np.median(values[1:])) for name, values in rates.items()}


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    section.__name__: section for section in (single_turn, episodes, group, latency, mixed, training)
}


NOTES = {
    "single_turn": ["Tunix recommends vLLM for rollouts in production; its Sampler is what runs without."],
    "training": [
        "An episode is prefilled what it reads, but for what another sample of its question has read alike; it looks further "
        "back in its context than the peer does; and rows run out of questions before the last one is done: that is in its "
        "time, not in the peer's. The second row leaves the idle rows out.",
    ],
}


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hf_python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--tunix_python", default=sys.executable, help="a Python with google-tunix")
    args = parser.parse_args()
    for name, section in SECTIONS.items():
        if args.only in (None, name):
            write(
                f"Rollout: {name.replace('_', ' ')}",
                f"python -m benchmarks.rollout --only={name}",
                section(args),
                NOTES.get(name, []),
            )


if __name__ == "__main__":
    main()
