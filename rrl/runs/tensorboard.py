"""TensorBoard's event files, written in the caller's thread: a scalar is in the file when the call returns."""

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
    """One event file of a folder.

    tensorboardX's own SummaryWriter has a thread and a queue: a kill loses what is in them, and after a full disk has ended
    the thread, `add_scalar` and `close` wait for it for ever. Its file keeps what it could not write, and tries again when
    the interpreter ends.

    Attributes:
      file: where it is.
    """

    def __init__(self, folder: pathlib.Path, purge_step: int) -> None:
        """Begins a new file; TensorBoard drops what older files of the folder say of `purge_step` and later steps."""
        folder.mkdir(parents=True, exist_ok=True)
        # A life that begins in the same second has other nanoseconds.
        self.file = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self.file.touch()
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes values of a step, by name. Raises OSError where the disk is full or the file was deleted."""
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        append_bytes(self.file, _record(event.SerializeToString()))


def _record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
