"""`RunOptions`: how the reproduction and the analyses execute their runs."""

import dataclasses
from collections.abc import Sequence

from rrl.errors import UserError
from rrl.parallel.runtime import available_cores


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The flags that launch/reproduce.py and launch/analyze.py share."""

    seeds: Sequence[int] = (0, 1, 2)
    """Training seeds."""
    jobs: int | None = None
    """Number of runs at a time; None: 2, or 1 on a single core."""
    smoke: bool = False
    """Whether to use sizes that only check whether all commands complete."""
    list_only: bool = False
    """Whether to print the runs that would be executed, and to do nothing else."""
    execute: bool = True
    """If false, no run is executed, and the results are written from the runs that are finished."""

    @property
    def jobs_or_default(self) -> int:
        """Number of runs at a time."""
        return min(2, available_cores()) if self.jobs is None else self.jobs


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """Parse seeds from a flag. Raises UserError for an empty list, duplicates, or anything but whole numbers."""
    if not texts or len(set(texts)) < len(texts) or not all(text.isdigit() for text in texts):
        raise UserError(f"seeds={','.join(texts)} must be whole numbers, one or more, each once")
    return [int(text) for text in texts]
