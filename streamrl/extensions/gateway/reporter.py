"""Publishes the metrics of a replica of the gateway."""

from __future__ import annotations

import time

from streamrl.extensions.gateway.replica import GatewayReplica
from streamrl.stream.log.meter import Meter

REPORT_S = 1.0


class Reporter:
    """Publishes what a replica measures, once in REPORT_S."""

    def __init__(self, replica: GatewayReplica, meter: Meter) -> None:
        self._replica = replica
        self._meter = meter
        self._reported_s = time.monotonic()

    def publish(self) -> None:
        now = time.monotonic()
        if now - self._reported_s >= REPORT_S:
            self._meter.publish(self._replica.metrics(now - self._reported_s))
            self._reported_s = now
