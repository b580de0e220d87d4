"""Exchange of Python objects between the processes of a run."""

import pickle
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

PICKLE_FAILED = b"\0"
"""First byte of the message of a process whose value cannot be pickled; the reason follows. No pickled value starts with it."""


def gather_objects(value: T) -> list[T]:
    """Returns the values of all processes, in the order of their index. Every process must call it.

    Raises:
      TypeError: in all processes, if the value of one cannot be pickled.
    """
    if jax.process_count() == 1:
        return [value]
    messages = _gather(_pickled(value))
    for process, message in enumerate(messages):
        if message.startswith(PICKLE_FAILED):
            reason = message.removeprefix(PICKLE_FAILED).decode()
            raise TypeError(f"the value of process {process} cannot be pickled: {reason}")
    return [pickle.loads(message) for message in messages]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # the other processes wait for a message
        return PICKLE_FAILED + repr(error).encode()


def _gather(data: bytes) -> list[bytes]:
    """Returns the data of all processes. Arrays must have the same size in each, so the data is padded."""
    message = np.frombuffer(data, np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(message)]))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(message)] = message
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
