"""One metric of a run: its name, its unit and its meaning."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

PREFIX = "streamrl"


class MetricSpec(NamedTuple):
    """One metric. A counter only grows while its part lives. All other metrics are gauges."""

    name: str
    unit: str  # 1 for a plain number or a share
    meaning: str
    kind: Literal["gauge", "counter"] = "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names in braces."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @property
    def prometheus(self) -> str:
        """The metric's name in Prometheus."""
        suffix = "_total" if self.kind == "counter" else ""
        return prometheus_name(re.sub(r"\{\w+\}", "", self.name)) + suffix


def prometheus_name(name: str) -> str:
    """The name in Prometheus of a gauge without labels."""
    return f"{PREFIX}_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}"
