"""Writes the page of the reproduction: each claim with its measurement and verdict, and each run with its
command."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rrl.eval.result_card import ResultCard
from rrl.studies.reproduction.claims import CLAIMS, Claim
from rrl.studies.reproduction.manifest import run_states
from rrl.studies.reproduction.plan import PlannedRun, with_dependencies
from rrl.studies.reproduction.store import MeasurementStore
from rrl.studies.reproduction.verdict import (
    FAILS,
    HOLDS,
    MISSING,
    UNTESTED,
    ClaimEvidence,
    ClaimVerdict,
    judge_claim,
)

HEAD = """# Small-scale reproduction

Made by `{command}`. {seeds_or_smoke}

Four papers measured models of 3 to 8 billion parameters on real questions. This page measures the same recipes, rewards and
objectives with policies of one million parameters on the built-in world. A claim that holds here is a sign that its mechanism
works in this code. A claim that does not hold here says nothing about the paper's models.

- A difference above 0 favours the claim. Its 95 % interval is the wider of two: Student's t over seeds, and the bootstrap over
  questions of the mean over seeds. The bootstrap needs a value for each question (a number in the column "questions").
- **holds**: the whole interval is above 0. **does not hold**: the difference is 0 or below, however wide its interval.
  **can't be tested at this size**: the interval includes 0, or another reason that the row gives.
- All evaluations use the same held-out questions (`test` split) and greedy decoding.
- ScaNN and exact search rank the same vectors, and over so few passages they find the same ones. With
  BM25 this makes two different retrievers, not three.
- To fit into three hours on two cores, TIRESRAG-R1 takes 42 updates here, R2AG 48 and R3-RAG 22, each after a cold start of 150
  demonstrations. R2AG uses 32 questions x 8 outputs at a learning rate of 3e-4, R3-RAG 3e-4 and a critic with all layers.
  docs/recipes.md has the results of the configs' own settings.
- R-Search's settings for the built-in world were chosen on the `dev` split, and the other recipes use them too. The training
  lengths of the other recipes, R3-RAG's critic and the sizes of the cold starts of R3-RAG, TIRESRAG-R1 and R2AG were chosen on
  held-out questions like these. Their leads over their cold starts may therefore be slightly too large.
"""
SMOKE_NOTE = "**This is a smoke run: its sizes are too small to measure anything. No row is a result.**"


def reproduction_page(
    runs: Mapping[str, PlannedRun],
    out: Path,
    store: MeasurementStore,
    seeds: Sequence[int],
    command: str,
    smoke: bool = False,
) -> str:
    """Return the page as Markdown.

    Claims with missing runs are listed with the command that executes them.

    Args:
      runs: all planned runs by name.
      out: folder of the runs.
      store: the stored measurements.
      seeds: training seeds.
      command: the command that made the page.
      smoke: whether these are smoke runs.
    """
    finished, results = set(store.entries), store.results(seeds)
    table: list[tuple[str, ...]] = []
    counts, missing = dict.fromkeys((HOLDS, FAILS, UNTESTED, MISSING), 0), list[str]()
    for claim in CLAIMS:
        if lacking := sorted(set(claim.needs(seeds)) - finished):
            counts[MISSING] += 1
            missing.append(f"- {claim.key}: `{command} --only={claim.key}` ({len(lacking)} runs)")
            table.append(
                (
                    claim.key,
                    claim.statement,
                    f"{claim.paper}: {claim.paper_result}",
                    claim.metric,
                    "–",
                    "–",
                    "–",
                    MISSING,
                )
            )
            continue
        evidence = claim.measure(results, claim.runs)
        verdict = judge_claim(evidence, claim.untestable)
        counts[verdict.word] += 1
        table.append(row_of(claim, evidence, verdict))
    lines = [
        HEAD.format(
            command=command, seeds_or_smoke=SMOKE_NOTE if smoke else f"Seeds {', '.join(map(str, seeds))}."
        )
    ]
    lines += ["; ".join(f"{word}: {number}" for word, number in counts.items() if number) + ".", ""]
    head = ("", "claim", "paper", "measured here", "values by seed", "difference", "questions", "verdict")
    lines += markdown([head, *table])
    if missing:
        lines += ["", "Not measured yet:", "", *missing]
    lines += ["", "## Runs", "", *_provenance(runs, out, store)]
    return "\n".join(lines) + "\n"


def row_of(claim: Claim, evidence: ClaimEvidence, verdict: ClaimVerdict) -> tuple[str, ...]:
    """Return the table row of a claim."""
    verdict_text = f"**{verdict.word}**" + (f": {verdict.reason}" if verdict.reason else "")
    sides = " against ".join(_values(values, claim.percent) for values in (evidence.left, evidence.right))
    return (
        claim.key,
        claim.statement,
        f"{claim.paper}: {claim.paper_result}",
        claim.metric,
        sides,
        _difference(verdict, claim.percent),
        str(evidence.questions or "–"),
        verdict_text,
    )


def _values(values: Sequence[float], percent: bool) -> str:
    return ", ".join(f"{100 * value:.1f}" if percent else f"{value:.2f}" for value in values)


def _difference(verdict: ClaimVerdict, percent: bool) -> str:
    """Return the difference with its interval, if the interval is finite."""
    scale, digits = (100, 1) if percent else (1, 2)
    mean, *ends = (
        f"{scale * value:+.{digits}f}" for value in (verdict.difference, verdict.low, verdict.high)
    )
    return f"{mean} [{', '.join(ends)}]" if math.isfinite(verdict.low) else mean


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first row is the header."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _provenance(runs: Mapping[str, PlannedRun], out: Path, store: MeasurementStore) -> list[str]:
    """Return commits, versions, minutes, and the command of each finished run."""
    finished = [(name, store.entries[name].manifest) for name in runs if name in store.entries]
    if not finished:
        return ["No run is finished."]
    minutes = sum(manifest.seconds for _, manifest in finished) / 60
    commits = ", ".join(sorted({manifest.commit for _, manifest in finished}))
    cards = [entry.card for entry in store.entries.values() if entry.card is not None]
    lines = [
        f"{len(finished)} of {len(runs)} runs, {minutes:.0f} core minutes in total, "
        f"{minutes / 120:.1f} hours with two runs at a time on two cores. Commit "
        f"{commits}. {'; '.join(_distinct(_versions(card) for card in cards))}.",
        "",
        *(f"- {part}: {'; '.join(values)}" for part, values in _settings(cards).items()),
        "",
    ]
    table = [("run", "minutes", "command")]
    table += [
        (name, f"{manifest.seconds / 60:.1f}", f"`python {' '.join(runs[name].command(out))}`")
        for name, manifest in finished
    ]
    return lines + markdown(table)


def _versions(card: ResultCard) -> str:
    return ", ".join(f"{name} {version}" for name, version in card.versions.items())


def _settings(cards: Sequence[ResultCard]) -> dict[str, list[str]]:
    """Return the values that occur for each part of `ResultCard.setting`."""
    settings = [card.setting for card in cards]
    return {part: _distinct(one[part] for one in settings) for part in (settings[0] if settings else ())}


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})


def describe_runs(runs: Sequence[PlannedRun], planned: Mapping[str, PlannedRun], out: Path, jobs: int) -> str:
    """Return a text with state, minutes and command of these runs and of those that they need, in order."""
    rows = run_states(with_dependencies([run.name for run in runs], planned), out)
    minutes_left = sum(row["minutes"] for row in rows if row["state"] != "finished")
    lines = [
        f"{row['minutes']:5.1f}  {row['state']:<10}  {row['name']:<24}  {row['command']}" for row in rows
    ]
    return "\n".join(
        [
            *lines,
            f"{minutes_left:.0f} core minutes to do: about {minutes_left / jobs:.0f} minutes with {jobs} at a time",
        ]
    )
