"""Divides trajectories into minibatches with nearly equal numbers of packed tokens. Read `balanced_minibatches` first."""

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from rrl.data.trajectory import Trajectory
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.packing import packed_sequences


def balanced_minibatches(
    trajectories: Sequence[Trajectory], config: ObjectiveConfig, count: int
) -> list[Int[np.ndarray, "n"]]:
    """Indices of the trajectories of each minibatch.

    Trajectories that can share a prefix tree are in the same minibatch.

    Args:
      trajectories: the trajectories of a rollout batch.
      config: how trajectories are packed.
      count: largest number of minibatches; there are fewer if there are fewer trajectories or groups.
    """
    sizes = packed_token_counts(trajectories, config)
    if not config.share_prefixes:
        return balanced_partition(sizes, count)
    _, groups = np.unique([t.group for t in trajectories], return_inverse=True)
    group_sizes = np.bincount(groups, weights=sizes).astype(np.int64)
    return [np.flatnonzero(np.isin(groups, part)) for part in balanced_partition(group_sizes, count)]


def packed_token_counts(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> Int[np.ndarray, "N"]:
    """Number of tokens that each trajectory adds to the packed rows if all trajectories are packed together.

    A prefix that several contexts share counts once, for the trajectory with the longest of these contexts (the trunk of their
    prefix tree).
    """
    owner = np.repeat(np.arange(len(trajectories)), [len(t.tokens) for t in trajectories])
    counts = np.zeros(len(trajectories), np.int64)
    for tree in packed_sequences(trajectories, config):
        counts += np.bincount(owner[tree.column_token_indices], minlength=len(counts))
    return counts


def balanced_partition(sizes: Int[np.ndarray, "N"], count: int) -> list[Int[np.ndarray, "n"]]:
    """Divides items into at most `count` non-empty parts with nearly equal sums of sizes.

    Takes the largest item first and gives it to the part with the smallest sum (Graham, 1969).

    Returns:
        Indices of the items in each part.
    """
    members: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    # (sum of sizes, number of items, part): among equal sums, the part with the fewest items comes first.
    sums = [(0, 0, part) for part in range(len(members))]
    for item in np.argsort(-sizes, kind="stable").tolist():
        total, items, part = heapq.heappop(sums)
        members[part].append(item)
        heapq.heappush(sums, (total + int(sizes[item]), items + 1, part))
    return [np.sort(part) for part in members]
