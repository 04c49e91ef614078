"""Every record of the topic as a line of JSON, in `metrics.jsonl` of the run's directory: its
offset there, `source`, `time_s`, `values`, `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.monitoring.sinks.base import Entry, Place

TAIL_BYTES = 1 << 20


class Line(msgspec.Struct):
    """What is read back of one."""

    offset: int


class JsonLines:
    """Goes on behind its last whole line. A line that was being written when its process died is
    cut off, and written again.
    """

    def __init__(self, place: Place, path: str = "metrics.jsonl") -> None:
        """`path`: relative to the run's directory."""
        self._path = place.run.directory / path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last = mend(self._path)
        self._file = self._path.open("ab")

    def take(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.offset > self._last:
                self._file.write(
                    msgspec.json.encode(
                        {"offset": entry.offset, **msgspec.to_builtins(entry.metric)}
                    )
                    + b"\n"
                )
                self._last = entry.offset
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def mend(path: Path) -> int:
    """Cut off what is not a whole line. Returns the offset in the last one that is; -1 where there
    is none.

    Lines without an offset are of before there were any: they are written anew.
    """
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        whole, _, torn = tail.rpartition(b"\n")
        file.truncate(size - len(torn))
        try:
            return msgspec.json.decode(whole.rpartition(b"\n")[2], type=Line).offset
        except msgspec.DecodeError:
            file.truncate(0)
            return -1
