"""Writes event files for TensorBoard to `tensorboard/` in the run's directory.

`tensorboard --logdir runs/RUN/tensorboard` shows them.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes its message classes when it is imported, so pyright does not know them.

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext


class TensorBoard:
    """Writes one file for each start of the run. TensorBoard shows them as one run."""

    def __init__(self, context: SinkContext, directory: str = "tensorboard") -> None:
        """`directory` is relative to the run's directory."""
        self._writer = EventFileWriter(str(context.run.directory / directory))

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            for row in record.rows:
                values = [
                    Summary.Value(tag=name, simple_value=value)
                    for name, value in row.values.items()
                ]
                self._writer.add_event(
                    Event(wall_time=row.time_s, step=row.step, summary=Summary(value=values))
                )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
