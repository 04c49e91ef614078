"""Writes every metric record as a line of JSON to `metrics.jsonl` in the run's directory.

A line has the record's offset in the topic, `source`, `time_s`, `values` and `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.run.monitoring.sinks.base import MetricRecord, SinkContext

TAIL_BYTES = 1 << 20


class Line(msgspec.Struct):
    """The field of a line that is read back."""

    offset: int


class JsonLines:
    """Continues after the last whole line of the file.

    A line that was only written in part when its process died is cut off and written again.
    """

    def __init__(self, context: SinkContext, path: str = "metrics.jsonl") -> None:
        """`path` is relative to the run's directory."""
        self._path = context.run.directory / path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last = mend(self._path)
        self._file = self._path.open("ab")

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            if record.offset > self._last:
                line = {"offset": record.offset, **msgspec.to_builtins(record.metric)}
                self._file.write(msgspec.json.encode(line) + b"\n")
                self._last = record.offset
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def mend(path: Path) -> int:
    """Cut off an unfinished last line. Returns the offset in the last whole one, -1 without one.

    A file whose last whole line cannot be read is emptied and written again.
    """
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        tail = b""
        # A line may be longer than what is read at a time, so read back until one is whole.
        while len(tail) < size and tail.count(b"\n") < 2:
            start = max(0, size - len(tail) - TAIL_BYTES)
            file.seek(start)
            tail = file.read(size - len(tail) - start) + tail
        whole, _, torn = tail.rpartition(b"\n")
        file.truncate(size - len(torn))
        try:
            return msgspec.json.decode(whole.rpartition(b"\n")[2], type=Line).offset
        except msgspec.DecodeError:
            file.truncate(0)
            return -1
