"""TensorBoard event files, written synchronously: a scalar is in the file when `EventFile.write` returns."""

import pathlib
import socket
import struct
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from rrl.files import append_bytes


class EventFile:
    """One event file in a folder.

    tensorboardX's SummaryWriter uses a thread and a queue. A kill loses what they hold. A full disk ends the thread, after
    which `add_scalar` and `close` wait forever, and its file retries the failed write when the interpreter exits.

    Attributes:
      file: path of the event file.
    """

    def __init__(self, folder: pathlib.Path, purge_step: int) -> None:
        """Start a new file. TensorBoard then ignores `purge_step` and later steps in older files of the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        # Nanoseconds distinguish processes that start in the same second.
        self.file = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self.file.touch()
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the values of a step, by name. Raises OSError if the disk is full or the file was deleted."""
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        append_bytes(self.file, _record(event.SerializeToString()))


def _record(data: bytes) -> bytes:
    """Return a TFRecord: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
