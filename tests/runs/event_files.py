"""Reads the scalars that TensorBoard would show for a workdir."""

import pathlib
import struct
from collections.abc import Iterator

from tensorboardX.proto.event_pb2 import Event


def scalars_of(workdir: pathlib.Path) -> list[tuple[str, int, float]]:
    """Return (name, step, value) in the order of writing, without the steps that a later file purges."""
    found: list[tuple[str, int, float]] = []
    files = [list(_events(file)) for file in (workdir / "tensorboard").iterdir()]
    for event in (event for events in sorted(files, key=lambda some: some[0].wall_time) for event in events):
        if event.HasField("session_log"):
            found = [point for point in found if point[1] < event.step]
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def _events(file: pathlib.Path) -> Iterator[Event]:
    """Yield the complete records of an event file: length, checksum of the length, event, checksum of the event."""
    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("Q", data, at)
        if at + 16 + length > len(data):
            return
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
