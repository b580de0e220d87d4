"""The section "episodes" of `benchmarks.rollout`: search episodes against loops that prefill the history at every turn."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.fixed_lengths import random_model
from benchmarks.measure import BenchmarkRow, SectionResult, interleave, medians, warm_up_note
from benchmarks.peer_library import CACHES, HF, TUNIX, PeerLibrary, peers, pythons
from rrl.rollout.config import EngineConfig
from rrl.rollout.protocol import Append, Finish, Restart, SearchFor


@dataclasses.dataclass(frozen=True)
class FixedTurns:
    """Search episodes of fixed lengths.

    With `reprefill`, each turn clears the context and prefills as many tokens as the whole history has. These are random, which
    does not change the time.
    """

    searches: int
    reprefill: bool = False
    turn_tokens: int = 64
    observation_tokens: int = 384
    prompt: int = 128

    @property
    def histories(self) -> list[int]:
        """Number of tokens in the context at the beginning of each turn."""
        turn = self.turn_tokens + self.observation_tokens
        return [self.prompt + number * turn for number in range(self.searches + 1)]

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


KEPT_CACHE = f"{HF} with the cache kept between turns, all episodes in lockstep"
"""Name of the loop that keeps generate's cache between turns, so all turns must have the same length."""
FULL_TURNS = f"{HF}, each turn written to its limit"
"""Name of the loop whose turns do not end at the tag, but at RESPONSE_TOKENS."""
RESPONSE_TOKENS = 500
"""Limit per turn in Search-R1's scripts (max_response_length). Its loop samples without stop strings up to the end of sequence or
this limit, and then removes the text after the closing tag."""
REPREFILL = "this engine, whole history prefilled at every turn"
"""Name of the loop that prefills the whole history again, over this engine; "ours" is this engine without that loop."""
NOTES = [
    "This engine and Hugging Face's generate sample; Tunix's Sampler is greedy, which is faster, and its cache is only as "
    "long as each turn needs. A loop that prefills the history again, or that keeps generate's cache, waits for the longest "
    "turn of the batch. Here all turns have the same length, so such a loop loses no time by waiting.",
    f"{FULL_TURNS}: Search-R1's loop as published (there over vLLM). It samples without stop strings and cuts the text "
    f"after its tag afterwards. Its scripts allow {RESPONSE_TOKENS} tokens per turn, of which 64 are kept here. A model that "
    "ends its sequence after a tag writes fewer; here none does, so this is the longest time of its loop, most of it for "
    "text that is cut. This row has no target. In the other rows a turn ends at its tag, as with a stop string; they have "
    "targets.",
]


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
    all_peers, only_hf = pythons(args), {HF: args.hf_python}
    for searches, batch, used in (
        (2, args.batch // 4, all_peers),
        (4, args.batch // 4, all_peers),
        (4, args.batch, only_hf),
    ):
        new_rows, times = _compare(searches, batch, used, args.rounds)
        rows += new_rows
        notes.append(f"{searches} searches, batch {batch}: {warm_up_note(times)}")
    return rows, notes


def _compare(
    searches: int, batch: int, used: Mapping[str, str], rounds: int
) -> tuple[list[BenchmarkRow], dict[str, list[float]]]:
    """Return the rows of one size, and the seconds of all runs. `used` has the Python of each peer library."""
    turns = FixedTurns(searches)
    what = f"episodes of {searches} searches (64 sampled, 384 observation tokens per turn), batch {batch}, seconds"
    target = "4x at 4 turns, growing" if searches == 4 else ""
    sides = _our_sides(turns, batch)
    with peers(random_model(), used, batch, turns.histories[-1], turns.turn_tokens) as (started, missing):
        for peer in started.values():
            sides |= peer.sides("turns", *turns.histories)
        if TUNIX in used and HF in started:
            process = started[HF].process
            started |= {name: PeerLibrary(name, process, CACHES) for name in (KEPT_CACHE, FULL_TURNS)}
            sides |= started[KEPT_CACHE].sides("kept", *turns.histories)
            sides |= started[FULL_TURNS].sides("uncut", RESPONSE_TOKENS, *turns.histories)
        times = interleave(sides, rounds)
    seconds_of = medians(times)

    def row(seconds: float, text: str, goal: str, bound: str = "") -> BenchmarkRow:
        ratio = f"{seconds / seconds_of['ours']:.2f}x{bound}"
        return BenchmarkRow(what, f"{seconds_of['ours']:.2f}", text, ratio, goal)

    # The ratio of prefilled tokens would be the speedup if decoding took no time.
    max_ratio = sum(turns.histories) / (turns.prompt + searches * turns.observation_tokens)
    reprefill = seconds_of[REPREFILL]
    bound = f" (at most {max_ratio:.1f}x, the ratio of prefilled tokens)"
    rows = [row(reprefill, f"{REPREFILL} {reprefill:.2f}", target, bound)]
    for name, peer in started.items():
        seconds, text = peer.best(seconds_of, "{:.2f}".format)
        if name != KEPT_CACHE:
            text = f"whole history prefilled at every turn: {text}"
        # The target is for turns that have the same length on both sides, and no cache from one turn to the next.
        rows.append(row(seconds, text, "" if name in (KEPT_CACHE, FULL_TURNS) else target))
    rows += [BenchmarkRow(what, "", name, reason, target) for name, reason in missing.items()]
    return rows, times


def _our_sides(turns: FixedTurns, batch: int) -> dict[str, Callable[[], float]]:
    """Return this engine's episodes, and its loop that prefills the whole history at every turn."""
    config = EngineConfig(
        rows=batch,
        context=turns.histories[-1] + turns.turn_tokens + 64,
        wake_threshold=max(16, batch // 2),
        prefill_tokens=1024,
        share_prompts=False,
    )
    requests = random_model().requests(batch, turns.prompt)
    tokens = batch * (turns.searches + 1) * turns.turn_tokens
    return {
        name: random_model().timed(random_model().engine(config), requests, environment, tokens)
        for name, environment in (("ours", turns), (REPREFILL, dataclasses.replace(turns, reprefill=True)))
    }
