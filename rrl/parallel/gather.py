"""Exchange of Python objects between the processes of a run."""

import pickle
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

PICKLE_FAILED = b"\0"
"""Prefix of a message that reports a failure; no pickled value starts with it."""


def gather_objects(value: T) -> list[T]:
    """Returns the values of all processes, in the order of their index. Every process must call it.

    Raises:
      TypeError: in all processes, if the value of one cannot be pickled.
    """
    if jax.process_count() == 1:
        return [value]
    parts = _gather(_pickled(value))
    for process, part in enumerate(parts):
        if part.startswith(PICKLE_FAILED):
            raise TypeError(f"the value of process {process} cannot be pickled: {part[1:].decode()}")
    return [pickle.loads(part) for part in parts]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # the other processes wait for a message
        return PICKLE_FAILED + repr(error).encode()


def _gather(data: bytes) -> list[bytes]:
    message = np.frombuffer(data, np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(message)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(message)] = message
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
