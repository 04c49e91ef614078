"""The meter of a part: it publishes what the part measures.

Metrics go to their topic outside the transactions, so they never count as outputs of a run. Their
names carry their units. Those under `replays/` and `batches/` are made by the pure steps of buffer
and batcher. `run/monitoring/metric_names.py` lists all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from streamrl.config import topology
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Message, Output
from streamrl.stream.records import Metric
from streamrl.system.errors import BrokerUnreachable

METRICS = topology.METRICS
CLOSE_S = 1.0  # a part that ends does not wait longer for its last metrics


class Meter:
    """Publishes the metrics of one part."""

    def __init__(self, log: Log, source: str) -> None:
        self.source = source
        self._writer = log.producer()

    def publish(
        self,
        values: Mapping[str, float],
        step: int | None = None,
        time_s: float | None = None,
        source: str = "",
    ) -> None:
        """Send these values without waiting. `step`: the batch or policy version they are of.
        `source`: what they are of, if it is one of several things that the part does.
        """
        record = Metric(
            source=source or self.source,
            time_s=time.time() if time_s is None else time_s,
            values=dict(values),
            step=step,
        )
        self._writer.send(to_message(Output(METRICS, record.source, record)))

    def send(self, message: Message) -> None:
        """Send a metric that a step function has made."""
        self._writer.send(message)

    def close(self) -> None:
        """Send what is waiting, if there is a broker. If there is none, that is what ends the part,
        and not its last metrics.
        """
        with contextlib.suppress(BrokerUnreachable):
            self._writer.flush(CLOSE_S)
        self._writer.close()
