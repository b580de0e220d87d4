"""A user's recipe in a module outside `rrl`."""

import dataclasses

from rrl.recipes.rsearch import RSearch


@dataclasses.dataclass(frozen=True)
class Brief(RSearch):
    """R-Search with a bonus for short answers."""

    bonus: float = 0.1
