"""Event files for TensorBoard, in `tensorboard/` of the run's directory: `tensorboard --logdir
runs/RUN/tensorboard`.
"""

# pyright: reportAttributeAccessIssue=false
# messages of protobuf are made when it is imported

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from streamrl.monitoring.sinks.base import Entry, Had, Place


class TensorBoard:
    """A file a session, as TensorBoard wants it; together they are one run."""

    def __init__(self, place: Place, directory: str = "tensorboard") -> None:
        """`directory`: relative to the run's."""
        where = place.run.directory / directory
        self._had = Had()
        for name, step, _ in points(where):
            self._had.add(name, step)
        self._writer = EventFileWriter(str(where))

    def take(self, entries: Sequence[Entry]) -> None:
        for row in self._had.new(entries):
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()
            ]
            self._writer.add_event(
                Event(wall_time=row.time_s, step=row.step, summary=Summary(value=values))
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def points(directory: Path) -> Iterator[tuple[str, int, float]]:
    """(name, step, value) of all event files in there; what was torn off at the end of one is not
    among them.
    """
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value
