"""Python objects between the processes of one run."""

import pickle
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

FAILED = b"\0"
"""What no pickled value begins with."""


def gather_objects(value: T) -> list[T]:
    """What each process gives, by its number; every process must call it.

    Raises TypeError in all of them where one gives what does not pickle.
    """
    if jax.process_count() == 1:
        return [value]
    parts = _gather(_pickled(value))
    for process, part in enumerate(parts):
        if part.startswith(FAILED):
            raise TypeError(
                f"what process {process} gives to the others does not pickle: {part[1:].decode()}"
            )
    return [pickle.loads(part) for part in parts]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # the others wait for something
        return FAILED + repr(error).encode()


def _gather(data: bytes) -> list[bytes]:
    words = np.frombuffer(data, np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(words)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(words)] = words
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
