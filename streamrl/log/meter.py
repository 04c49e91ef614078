"""How a part publishes what it measures: outside the transactions, so metrics never count as
outputs of a run.

Names carry their unit. `replays/` and `batches/` are listed in docs/design/overview.md and come
from the pure steps of buffer and batcher.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from streamrl.config import topology
from streamrl.errors import BrokerUnreachable
from streamrl.log.codec import to_message
from streamrl.log.protocol import Log, Message, Output
from streamrl.records import Metric

METRICS = topology.METRICS
CLOSE_S = 1.0  # a part that leaves does not wait longer for its last metrics


class Meter:
    """Publishes values of one part to the `metrics` topic."""

    def __init__(self, log: Log, source: str) -> None:
        self.source = source
        self._writer = log.producer()

    def publish(
        self, values: Mapping[str, float], step: int | None = None, time_s: float | None = None
    ) -> None:
        """Send; not waited for. `step` is the batch or policy version the values belong to."""
        record = Metric(
            source=self.source,
            time_s=time.time() if time_s is None else time_s,
            values=dict(values),
            step=step,
        )
        self._writer.send(to_message(Output(METRICS, self.source, record)))

    def send(self, message: Message) -> None:
        """A metric that a step function made."""
        self._writer.send(message)

    def close(self) -> None:
        """Send what is waiting, if there is a broker; when there is none, its part ends for that
        reason, and not for this.
        """
        with contextlib.suppress(BrokerUnreachable):
            self._writer.flush(CLOSE_S)
        self._writer.close()
