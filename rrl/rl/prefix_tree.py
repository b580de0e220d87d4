"""Prefix trees: contexts with a common prefix share it in a packed row, so that it is computed once. Read `prefix_trees` first.

An agent that starts each step with a new prompt (R3-RAG) produces contexts that repeat earlier text. The samples of a group
(R2AG's outputs for one prompt) start with the same prompt. Such contexts form one tree: the longest context is the trunk, and
each other context is a branch with the tokens that differ from the trunk. A branch is inserted in the row right after the
prefix that it shares. All trunk tokens that it may see are then to its left, so causal attention needs only the branch of
each token (`rrl.rl.batch.Batch.branches`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from rrl.data.trajectory import POLICY, Trajectory


@dataclasses.dataclass(frozen=True)
class PrefixTree:
    """One sequence of a packed row: its columns, and the tokens of the trajectories that they stand for.

    Token indices refer to the concatenated tokens of all trajectories.
    """

    column_token_indices: Int[np.ndarray, "L"]
    """Index of the token in each column."""
    positions: Int[np.ndarray, "L"]
    """Position of each column's token in its context."""
    branches: Int[np.ndarray, "L"]
    """Branch of each column's token; 0 is the trunk."""
    context_token_indices: Int[np.ndarray, "M"]
    """Indices of all tokens of the tree's contexts, one context after another. A shared prefix occurs once for each context
    that contains it; M then exceeds L."""
    context_columns: Int[np.ndarray, "M"]
    """Column of each of `context_token_indices`. The copies of a shared token have the same column."""

    @classmethod
    def of_context(cls, start: int, stop: int) -> "PrefixTree":
        """The tree of a single context with the token indices start..stop-1: a trunk without branches."""
        indices, columns = np.arange(start, stop), np.arange(stop - start)
        return cls(indices, columns, np.zeros_like(columns), indices, columns)


class _Context(NamedTuple):
    """One context of a trajectory: the token indices start..stop-1."""

    start: int
    stop: int
    tokens: Int[np.ndarray, "T"]
    """The token ids."""
    prompt_length: int
    """Number of tokens before the policy's first token."""


def prefix_trees(trajectories: Sequence[Trajectory], longest: int) -> list[PrefixTree]:
    """Builds prefix trees from the contexts of all trajectories.

    Contexts can share a tree if they belong to one trajectory, or to trajectories of one group that have a single context
    each.

    Args:
      trajectories: each of their contexts is in one tree.
      longest: largest number of tokens in a tree. A longer context forms a tree alone.
    """
    # The contexts that can share a tree: those of a trajectory, or of a group.
    candidates: dict[tuple[str, int], list[_Context]] = {}
    first = 0
    for index, trajectory in enumerate(trajectories):
        spans = trajectory.contexts
        key = ("group", trajectory.group) if len(spans) == 1 else ("trajectory", index)
        candidates.setdefault(key, []).extend(_context(trajectory, span, first) for span in spans)
        first += len(trajectory.tokens)
    return [tree for contexts in candidates.values() for tree in _trees(contexts, longest)]


def _context(trajectory: Trajectory, span: slice, first: int) -> _Context:
    """The context that `span` selects from a trajectory; `first` is the index of the trajectory's first token."""
    is_policy = trajectory.roles[span] == POLICY
    prompt_length = int(is_policy.argmax()) if is_policy.any() else len(is_policy)
    return _Context(first + span.start, first + span.stop, trajectory.tokens[span], prompt_length)


def _trees(contexts: Sequence[_Context], longest: int) -> list[PrefixTree]:
    """Builds trees; contexts that do not fit in a tree, or share nothing with its trunk, form further trees."""
    trees: list[PrefixTree] = []
    while contexts:
        trunk = max(contexts, key=lambda context: len(context.tokens))
        room = longest - len(trunk.tokens)
        branches: list[tuple[int, _Context]] = []
        rest: list[_Context] = []
        for context in contexts:
            if context is trunk:
                continue
            common = _common_length(trunk, context)
            added = len(context.tokens) - common
            if common and added <= room:
                branches.append((common, context))
                room -= added
            else:
                rest.append(context)
        trees.append(_tree(trunk, sorted(branches, key=lambda branch: branch[0])))
        contexts = rest
    return trees


def _common_length(trunk: _Context, other: _Context) -> int:
    """Length of the prefix that a context shares with the trunk.

    It ends before the prompt's last token, because that token's column predicts the policy's first token, which differs
    between contexts.
    """
    limit = max(0, min(trunk.prompt_length, other.prompt_length) - 1)
    same = trunk.tokens[:limit] == other.tokens[:limit]
    return limit if same.all() else int(same.argmin())


def _tree(trunk: _Context, branches: Sequence[tuple[int, _Context]]) -> PrefixTree:
    """Lays out a tree; `branches` are pairs (length of the shared prefix, context), sorted by length."""
    column_token_indices, positions, branch_numbers = [], [], []
    trunk_columns = np.empty(trunk.stop - trunk.start, np.int64)
    context_token_indices, context_columns = [np.arange(trunk.start, trunk.stop)], [trunk_columns]
    placed = 0  # trunk tokens that have a column
    width = 0  # columns so far

    def append(start: int, stop: int, position: int, branch: int) -> np.ndarray:
        """Puts the tokens with the indices start..stop-1 in the next columns and returns these columns."""
        nonlocal width
        size = stop - start
        column_token_indices.append(np.arange(start, stop))
        positions.append(np.arange(position, position + size))
        branch_numbers.append(np.full(size, branch))
        width += size
        return np.arange(width - size, width)

    for branch, (common, context) in enumerate(branches, start=1):
        trunk_columns[placed:common] = append(trunk.start + placed, trunk.start + common, placed, 0)
        placed = common
        own_columns = append(context.start + common, context.stop, common, branch)
        context_token_indices.append(np.arange(context.start, context.stop))
        context_columns.append(np.concatenate([trunk_columns[:common], own_columns]))
    trunk_columns[placed:] = append(trunk.start + placed, trunk.stop, placed, 0)
    parts = (column_token_indices, positions, branch_numbers, context_token_indices, context_columns)
    return PrefixTree(*(np.concatenate(part) for part in parts))
