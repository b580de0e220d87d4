"""Select accepted trajectories of a cold start, and count the rejected ones by reason. Read `select_pairs` first."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ColdStartReport:
    """Counts of accepted (`kept`) and rejected (`fell`) trajectories. The field names are keys of report.json."""

    questions: int
    """Questions that were sampled."""
    trajectories: int
    """Sampled trajectories."""
    kept: int
    """Accepted trajectories."""
    answered: int
    """Questions with at least one accepted trajectory."""
    pairs: int
    """(input, output) pairs of the accepted trajectories."""
    fell: Mapping[str, int]
    """Rejected trajectories by reason."""
    by_temperature: Mapping[str, tuple[int, int]]
    """(accepted, sampled) trajectories by temperature."""
    unread: int = 0
    """Judge answers that could not be parsed; they count as "no"."""

    def text(self) -> str:
        """Return the report as a table."""
        share = 100 / max(self.trajectories, 1)
        lines = [
            f"{self.trajectories} trajectories of {self.questions} questions",
            f"  {self.kept:6} accepted ({share * self.kept:.1f} %), of {self.answered} questions: {self.pairs} pairs",
        ]
        lines += [f"  {count:6} {reason} ({share * count:.1f} %)" for reason, count in self.fell.items()]
        lines += [
            f"  at temperature {temperature}: {accepted} of {sampled} accepted"
            for temperature, (accepted, sampled) in self.by_temperature.items()
        ]
        if self.unread:
            lines.append(f"  {self.unread} answers of the judge could not be parsed; they count as no")
        return "\n".join(lines)


def select_pairs(
    records: Iterable[Mapping[str, Any]], keep: int, questions: int
) -> tuple[list[dict[str, Any]], ColdStartReport]:
    """Select trajectories and return their pairs, in the order of the records, and the report.

    Of several trajectories of a question whose outputs differ only in white space, the first is taken.

    Args:
        records: records of all blocks, as `sample_block` returns them.
        keep: largest number of trajectories per question; 0: all.
        questions: number of sampled questions, for the report.
    """
    pairs: list[dict[str, Any]] = []
    rejected: collections.Counter[str] = collections.Counter()
    sampled: collections.Counter[str] = collections.Counter()
    accepted: collections.Counter[str] = collections.Counter()
    seen: dict[int, set[tuple[str, ...]]] = collections.defaultdict(set)
    taken: collections.Counter[int] = collections.Counter()
    unread = 0
    for record in records:
        question, temperature = record["number"], str(record["temperature"])
        reason = record["fault"]
        sampled[temperature] += 1
        unread += record["unread"]
        if not reason:
            outputs = tuple(" ".join(output.split()) for _, output in record["pairs"])
            if outputs in seen[question]:
                reason = "duplicate"
            elif keep and taken[question] == keep:
                reason = "more than sampling.keep of its question"
            seen[question].add(outputs)
        if reason:
            rejected[reason] += 1
            continue
        taken[question] += 1
        accepted[temperature] += 1
        pairs += [
            {"id": record["id"], "step": step, "input": text, "output": output}
            for step, (text, output) in enumerate(record["pairs"], start=1)
        ]
    return pairs, ColdStartReport(
        questions=questions,
        trajectories=sampled.total(),
        kept=accepted.total(),
        answered=len(taken),
        pairs=len(pairs),
        fell=dict(rejected.most_common()),
        by_temperature={name: (accepted[name], count) for name, count in sampled.items()},
        unread=unread,
    )
