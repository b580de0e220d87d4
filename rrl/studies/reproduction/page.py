"""The page: each claim with what was measured and what follows, and each run with how to make it again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rrl.eval.result_card import ResultCard
from rrl.studies.reproduction.claims import CLAIMS, Claim
from rrl.studies.reproduction.plan import PlannedRun, with_dependencies
from rrl.studies.reproduction.queue import run_states
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

HEAD = """# The reproduction in the small

Made by `{command}`. {what}

What four papers measured with models of 3 to 8 billion parameters on real questions, measured with policies of one million
parameters on the built-in world: same recipes, rewards and objectives, other sizes. A claim that holds here is a sign that its
mechanism is at work in this code; one that does not says nothing of the paper's models.

- A difference above 0 is on the claim's side. Its 95 % interval reaches as far as either of two: Student's t over seeds, and the
  bootstrap over questions of the mean over seeds, where the measure has a value for each question (a number in "questions").
- **can't be tested at this size**: for the reason that stands there, whatever was measured; or the interval reaches 0. Else
  **does not hold**: the difference is 0 or on the other side, however wide its interval; **holds**: the whole interval is above
  0.
- All evaluations ask the same held-out questions (`test` split), greedily.
- ScaNN and exact search rank the same vectors, and over so few passages find the same ones: beside BM25 they are one other
  retriever, not two.
- TIRESRAG-R1 takes 42 updates here, R2AG 48 and R3-RAG 22, from starts of 150 demonstrations, for everything to fit into three
  hours of two cores, R2AG's of 32 questions x 8 outputs at 3e-4, R3-RAG's at 3e-4 with a critic of all layers; docs/recipes.md
  has what the configs' own settings bring.
- Settings of R-Search in the built-in world were found on the `dev` split. The other recipes take them over; how long those
  train, R3-RAG's critic and the sizes of R3-RAG's, TIRESRAG-R1's and R2AG's cold starts were settled by looking at such
  held-out questions, so that their leads over their cold starts may be a little too large.
"""
SMOKE = "**This is a smoke run: sizes at which nothing can be measured. No row is a result.**"


def reproduction_page(
    runs: Mapping[str, PlannedRun],
    out: Path,
    kept: MeasurementStore,
    seeds: Sequence[int],
    command: str,
    smoke: bool = False,
) -> str:
    """The page as Markdown, of what is kept; claims that lack runs are listed with the command, whose folder is `out`."""
    there, results = set(kept.entries), kept.results(seeds)
    table: list[tuple[str, ...]] = []
    counts, missing = dict.fromkeys((HOLDS, FAILS, UNTESTED, MISSING), 0), list[str]()
    for claim in CLAIMS:
        if lacking := sorted(set(claim.needs(seeds)) - there):
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
    lines = [HEAD.format(command=command, what=SMOKE if smoke else f"Seeds {', '.join(map(str, seeds))}.")]
    lines += ["; ".join(f"{word}: {number}" for word, number in counts.items() if number) + ".", ""]
    head = ("", "claim", "paper", "measured here", "values by seed", "difference", "questions", "verdict")
    lines += markdown([head, *table])
    if missing:
        lines += ["", "Not measured yet:", "", *missing]
    lines += ["", "## Runs", "", *_provenance(runs, out, kept)]
    return "\n".join(lines) + "\n"


def row_of(claim: Claim, evidence: ClaimEvidence, verdict: ClaimVerdict) -> tuple[str, ...]:
    """One line of the table."""
    said = f"**{verdict.word}**" + (f": {verdict.reason}" if verdict.reason else "")
    sides = " against ".join(_values(values, claim.percent) for values in (evidence.left, evidence.right))
    return (
        claim.key,
        claim.statement,
        f"{claim.paper}: {claim.paper_result}",
        claim.metric,
        sides,
        _difference(verdict, claim.percent),
        str(evidence.questions or "–"),
        said,
    )


def _values(values: Sequence[float], percent: bool) -> str:
    return ", ".join(f"{100 * value:.1f}" if percent else f"{value:.2f}" for value in values)


def _difference(verdict: ClaimVerdict, percent: bool) -> str:
    """With its interval, where there is one."""
    scale, digits = (100, 1) if percent else (1, 2)
    mean, *ends = (
        f"{scale * value:+.{digits}f}" for value in (verdict.difference, verdict.low, verdict.high)
    )
    return f"{mean} [{', '.join(ends)}]" if math.isfinite(verdict.low) else mean


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown whose first row is its head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _provenance(runs: Mapping[str, PlannedRun], out: Path, kept: MeasurementStore) -> list[str]:
    """Commits, versions, minutes, and the command of each finished run."""
    found = [(name, kept.entries[name].manifest) for name in runs if name in kept.entries]
    if not found:
        return ["None is finished."]
    minutes = sum(record.seconds for _, record in found) / 60
    commits = ", ".join(sorted({record.commit for _, record in found}))
    cards = [entry.card for entry in kept.entries.values() if entry.card is not None]
    lines = [
        f"{len(found)} of {len(runs)} runs, {minutes:.0f} minutes in all, of one core where two ran side by side: "
        f"{minutes / 120:.1f} hours of two. Commit "
        f"{commits}. {'; '.join(_distinct(_versions(card) for card in cards))}.",
        "",
        *(f"- {part}: {'; '.join(values)}" for part, values in _settings(cards).items()),
        "",
    ]
    table = [("run", "minutes", "command")]
    table += [
        (name, f"{record.seconds / 60:.1f}", f"`python {' '.join(runs[name].command(out))}`")
        for name, record in found
    ]
    return lines + markdown(table)


def _versions(card: ResultCard) -> str:
    return ", ".join(f"{name} {version}" for name, version in card.versions.items())


def _settings(cards: Sequence[ResultCard]) -> dict[str, list[str]]:
    """What of each part of `ResultCard.setting` there was."""
    settings = [card.setting for card in cards]
    return {part: _distinct(one[part] for one in settings) for part in (settings[0] if settings else ())}


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})


def list_of(runs: Sequence[PlannedRun], known: Mapping[str, PlannedRun], out: Path, jobs: int) -> str:
    """What would be run, in order, with its state, minutes and command."""
    rows = run_states(with_dependencies([run.name for run in runs], known), out)
    todo = sum(row["minutes"] for row in rows if row["state"] != "finished")
    lines = [
        f"{row['minutes']:5.1f}  {row['state']:<10}  {row['name']:<24}  {row['command']}" for row in rows
    ]
    return "\n".join(
        [*lines, f"{todo:.0f} minutes of one core to do: some {todo / jobs:.0f} with {jobs} at a time"]
    )
