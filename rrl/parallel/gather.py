"""Python objects between the processes of one run."""

import pickle
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """What each process gives, by its number; every process must call it. Values must pickle."""
    if jax.process_count() == 1:
        return [value]
    words = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(words)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(words)] = words
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
