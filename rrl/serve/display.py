"""A trajectory that a notebook displays in colour."""

import dataclasses
from collections.abc import Mapping, Sequence

from rrl.data.trajectory import Trajectory
from rrl.report.segments import RSEARCH_TAGS
from rrl.report.trajectories_html import fragment
from rrl.text.spans import Tag


@dataclasses.dataclass(slots=True, repr=False)
class DisplayedTrajectory(Trajectory):
    """A trajectory with a rich representation. Jupyter renders it if it is the last value of a cell."""

    tags: Mapping[Tag, str] = dataclasses.field(default_factory=lambda: RSEARCH_TAGS)
    """Tag that the policy writes -> kind of segment."""
    token_bytes: Sequence[bytes] | None = None
    """Bytes of each token id. If given, each token shows its log-probability."""

    @classmethod
    def of(
        cls, trajectory: Trajectory, tags: Mapping[Tag, str], token_bytes: Sequence[bytes] | None
    ) -> "DisplayedTrajectory":
        """Return a copy of a trajectory that can be displayed."""
        values = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(Trajectory)}
        return cls(**values, tags=tags, token_bytes=token_bytes)

    def _repr_html_(self) -> str:
        return fragment(self, tags=self.tags, token_bytes=self.token_bytes)

    def show(self) -> None:
        """Display it: in colour in a notebook, as text elsewhere."""
        try:
            from IPython.core.getipython import get_ipython
            from IPython.display import display
        except ImportError:
            print(self)
        else:
            if get_ipython() is None:
                print(self)
            else:
                display(self)

    def __repr__(self) -> str:
        lines = [self.question.text, *(text.strip() for _, text in self.segments[1:]), f"[{self.ended}]"]
        return "\n".join(lines)
