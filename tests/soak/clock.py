"""A clock that can be set wrong: an offset in a file that all processes of a run map, added to
Python's time and to the timestamps of records.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Any

STEP_S = 3600.0


class Clock:
    """Seconds that every process of the run adds to the time."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def offset_s(self) -> float:
        return struct.unpack_from("<d", self._map)[0]

    def set(self, offset_s: float) -> None:
        struct.pack_into("<d", self._map, 0, offset_s)


def follow(clock: Clock) -> None:
    """From now on this process goes by that clock. To be called before anything of streamrl is
    imported that keeps `time.time` for later.
    """
    now = time.time
    time.time = lambda: now() + clock.offset_s

    from streamrl.stream.log.kafka import producer as kafka_producer
    from streamrl.stream.log.kafka import writer as kafka_writer

    produce = kafka_producer.produce

    def stamped(
        producer: Any, prefix: str, message: Any, on_delivery: Any = None, timestamp_ms: int = 0
    ) -> None:
        produce(producer, prefix, message, on_delivery, timestamp_ms or round(time.time() * 1000))

    kafka_producer.produce = stamped
    kafka_writer.produce = stamped
