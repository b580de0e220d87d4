"""Balanced minibatches: every item once, and nearly equal sums. Those with prefix trees are in `test_prefix_tree.py`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rrl.rl.minibatches import balanced_partition


@given(st.lists(st.integers(1, 24), min_size=1, max_size=40), st.integers(1, 9))
def test_balanced_parts_hold_every_item_once_and_differ_by_at_most_the_largest_item(sizes, count):
    found = balanced_partition(np.array(sizes), count)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(sizes)))
    assert len(found) == min(count, len(sizes)) and all(len(part) for part in found)
    sums = [sum(sizes[item] for item in part) for part in found]
    assert max(sums) - min(sums) <= max(sizes)
