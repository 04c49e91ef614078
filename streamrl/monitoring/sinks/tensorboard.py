"""Writes event files for TensorBoard to `tensorboard/` in the run's directory.

`tensorboard --logdir runs/RUN/tensorboard` shows them.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes its message classes when it is imported, so pyright does not know them.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from streamrl.monitoring.sinks.base import MetricRecord, SinkContext, WrittenPoints


class TensorBoard:
    """Writes one file for each session of the run. TensorBoard shows them as one run."""

    def __init__(self, context: SinkContext, directory: str = "tensorboard") -> None:
        """`directory`: relative to the run's."""
        where = context.run.directory / directory
        self._had = WrittenPoints()
        for name, step, _ in points(where):
            self._had.add(name, step)
        self._writer = EventFileWriter(str(where))

    def write(self, records: Sequence[MetricRecord]) -> None:
        for row in self._had.new(records):
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
    """The (name, step, value) of every whole event in the directory's files."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value
