"""What a replica measures is said once in a second."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from streamrl.extensions.gateway import reporter
from streamrl.extensions.gateway.reporter import Reporter


class Replica:
    def metrics(self, elapsed_s: float) -> dict[str, float]:
        return {"elapsed_s": elapsed_s}


class Meter:
    def __init__(self) -> None:
        self.published = list[float]()

    def publish(self, values: Mapping[str, float]) -> None:
        self.published.append(values["elapsed_s"])


def test_it_is_published_once_in_a_second_with_the_time_since(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now[0])
    meter = Meter()
    said = Reporter(Replica(), meter)  # type: ignore[arg-type]
    for moment in (0.5, 1.5, 2.0, 2.5, 3.0):
        now[0] = moment
        said.publish()
    assert meter.published == [1.5, 1.0]
