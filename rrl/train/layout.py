"""How the contexts of a trajectory lie in a packed row: each by itself, or as a tree whose trunk they share.

An agent that starts each step from a fresh prompt (R3-RAG, R2AG) writes contexts that repeat what came before. What a context
has in common with the longest one of its trajectory is computed once: the longest is the trunk, the rest of each other context
is a branch that stands where it leaves the trunk. All that a branch may see of the trunk then stands left of it, so that
causal attention needs to know nothing but the branch of each token (`rrl.rl.batch.Batch.branches`).
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from rrl.rollout.trajectory import POLICY, Trajectory


@dataclasses.dataclass(frozen=True)
class Layout:
    """One sequence of a packed row."""

    tokens: Int[np.ndarray, "L"]
    """Which of its trajectory's tokens stands in each column."""
    positions: Int[np.ndarray, "L"]
    """Position of each in its context."""
    branches: Int[np.ndarray, "L"]
    """0: trunk."""
    held: Int[np.ndarray, "M"]
    """All tokens of the trajectory that the sequence stands for, each once."""
    columns: Int[np.ndarray, "M"]
    """Where each of them stands; tokens that were the same for several contexts stand in one column."""


def layouts(trajectory: Trajectory, share: bool, longest: int) -> list[Layout]:
    """The sequences of a trajectory: one for each context, or, with `share`, one tree of at most `longest` tokens and one for
    each context that it has no room for, or that has nothing in common with the trunk."""
    contexts = trajectory.contexts
    if not share or len(contexts) == 1:
        return [_alone(part) for part in contexts]
    trunk = max(contexts, key=lambda part: part.stop - part.start)
    room = longest - (trunk.stop - trunk.start)
    branches: list[tuple[int, slice]] = []
    apart: list[Layout] = []
    for part in contexts:
        if part == trunk:
            continue
        common = _common(trajectory, trunk, part)
        more = part.stop - part.start - common
        if common and more <= room:
            branches.append((common, part))
            room -= more
        else:
            apart.append(_alone(part))
    return [_tree(trunk, sorted(branches, key=lambda branch: branch[0])), *apart]


def _alone(part: slice) -> Layout:
    columns = np.arange(part.stop - part.start)
    held = columns + part.start
    return Layout(held, columns, np.zeros_like(columns), held, columns)


def _common(trajectory: Trajectory, trunk: slice, part: slice) -> int:
    """How many tokens a context begins with as the trunk does; what the policy wrote is never one of them, nor the token before
    it, which predicts it from the column left of its own."""
    most = min(_prompt(trajectory, trunk), _prompt(trajectory, part)) - 1
    most = max(0, most)
    same = trajectory.tokens[trunk][:most] == trajectory.tokens[part][:most]
    return most if same.all() else int(same.argmin())


def _prompt(trajectory: Trajectory, part: slice) -> int:
    """Tokens of a context before the policy's first."""
    own = trajectory.roles[part] == POLICY
    return int(own.argmax()) if own.any() else len(own)


def _tree(trunk: slice, branches: list[tuple[int, slice]]) -> Layout:
    """`branches`, and after how many tokens of the trunk each of them leaves it, in that order."""
    tokens, positions, marks = [], [], []
    held, columns = [np.arange(trunk.start, trunk.stop)], [np.empty(trunk.stop - trunk.start, np.int64)]
    done = width = 0

    def lay(start: int, stop: int, position: int, mark: int) -> np.ndarray:
        """Tokens start..stop of the trajectory in the next columns, which are returned."""
        nonlocal width
        size = stop - start
        tokens.append(np.arange(start, stop))
        positions.append(np.arange(position, position + size))
        marks.append(np.full(size, mark))
        width += size
        return np.arange(width - size, width)

    for mark, (common, part) in enumerate(branches, start=1):
        columns[0][done:common] = lay(trunk.start + done, trunk.start + common, done, 0)
        done = common
        own = lay(part.start + common, part.stop, common, mark)
        held.append(np.arange(part.start, part.stop))
        columns.append(np.concatenate([columns[0][:common], own]))
    columns[0][done:] = lay(trunk.start + done, trunk.stop, done, 0)
    joined = (np.concatenate(parts) for parts in (tokens, positions, marks, held, columns))
    return Layout(*joined)
