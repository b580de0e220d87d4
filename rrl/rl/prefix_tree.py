"""How contexts lie in a packed row: each by itself, or several as a tree whose trunk they share.

An agent that starts each step from a fresh prompt (R3-RAG) writes contexts that repeat what came before; the samples of a group
(R2AG's outputs for one prompt) begin with the same prompt. What a context has in common with the longest one of its family is
computed once: the longest is the trunk, the rest of each other context is a branch that stands where it leaves the trunk. All
that a branch may see of the trunk then stands left of it, so that causal attention needs to know nothing but the branch of each
token (`rrl.rl.batch.Batch.branches`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from rrl.data.trajectory import POLICY, Trajectory


@dataclasses.dataclass(frozen=True)
class PrefixTree:
    """One sequence of a packed row. Tokens are counted over all trajectories, one after the other."""

    tokens: Int[np.ndarray, "L"]
    """Which token stands in each column."""
    positions: Int[np.ndarray, "L"]
    """Position of each in its context."""
    branches: Int[np.ndarray, "L"]
    """0: trunk."""
    covered: Int[np.ndarray, "M"]
    """All tokens that the sequence stands for, each once."""
    columns: Int[np.ndarray, "M"]
    """Where each of them stands; tokens that were the same for several contexts stand in one column."""


class _Context(NamedTuple):
    start: int
    stop: int
    tokens: Int[np.ndarray, "T"]
    """From `start` to `stop`."""
    prompt: int
    """So many of them stand before the policy's first."""


def prefix_trees(trajectories: Sequence[Trajectory], share: bool, longest: int) -> list[PrefixTree]:
    """The sequences of all trajectories: one for each context, or, with `share`, trees of at most `longest` tokens: of the
    contexts of one trajectory, or of those trajectories of a group that have a single context."""
    families: dict[tuple[str, int], list[_Context]] = {}
    first = 0
    for index, trajectory in enumerate(trajectories):
        parts = trajectory.contexts
        family = ("group", trajectory.group) if share and len(parts) == 1 else ("trajectory", index)
        families.setdefault(family, []).extend(_context(trajectory, part, first) for part in parts)
        first += len(trajectory.tokens)
    if not share:
        return [_tree(part, []) for contexts in families.values() for part in contexts]
    return [one for contexts in families.values() for one in _trees(contexts, longest)]


def _context(trajectory: Trajectory, part: slice, first: int) -> _Context:
    """A context of a trajectory whose first token has that number."""
    own = trajectory.roles[part] == POLICY
    prompt = int(own.argmax()) if own.any() else len(own)
    return _Context(first + part.start, first + part.stop, trajectory.tokens[part], prompt)


def _trees(contexts: Sequence[_Context], longest: int) -> list[PrefixTree]:
    """What the first tree has no room for, or has nothing in common with its trunk, begins another."""
    found: list[PrefixTree] = []
    while contexts:
        trunk = max(contexts, key=lambda part: len(part.tokens))
        room = longest - len(trunk.tokens)
        branches: list[tuple[int, _Context]] = []
        apart: list[_Context] = []
        for part in contexts:
            if part is trunk:
                continue
            common = _common(trunk, part)
            more = len(part.tokens) - common
            if common and more <= room:
                branches.append((common, part))
                room -= more
            else:
                apart.append(part)
        found.append(_tree(trunk, sorted(branches, key=lambda branch: branch[0])))
        contexts = apart
    return found


def _common(trunk: _Context, part: _Context) -> int:
    """How many tokens a context begins with as the trunk does; what the policy wrote is never one of them, nor the token before
    it, which predicts it from the column left of its own."""
    most = max(0, min(trunk.prompt, part.prompt) - 1)
    same = trunk.tokens[:most] == part.tokens[:most]
    return most if same.all() else int(same.argmin())


def _tree(trunk: _Context, branches: Sequence[tuple[int, _Context]]) -> PrefixTree:
    """`branches`, and after how many tokens of the trunk each of them leaves it, in that order."""
    tokens, positions, marks = [], [], []
    held, columns = [np.arange(trunk.start, trunk.stop)], [np.empty(trunk.stop - trunk.start, np.int64)]
    done = width = 0

    def lay(start: int, stop: int, position: int, mark: int) -> np.ndarray:
        """Tokens start..stop in the next columns, which are returned."""
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
    return PrefixTree(*joined)
